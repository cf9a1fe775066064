"""Stop strings, matched on the text of an answer whatever the token borders are.

The rule is that of reading the text one character at a time: the answer stops as soon as it ends in a stop string; if
it ends in several, the longest counts. The outcome therefore does not depend on how the text was cut into pieces. Text
is held back only while it is the beginning of some stop string. The matcher never sees the prompt, so a stop string
inside it, or one that only begins there, does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from colibri.daemon.chat.errors import TextError


class StopMatcher:
    """Holds back what may become a stop string; `push` releases the rest.

    `include_stop`: the stop string itself is released too. Raises TextError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if "" in stops:
            raise TextError(f"stop string {list(stops).index('')} is empty")
        # Longest first: at one end position the longest match is found first.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._beginnings = frozenset(stop[:length] for stop in self._stops for length in range(1, len(stop)))
        self._longest = max((len(stop) - 1 for stop in self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._matched

    @property
    def held(self) -> str:
        """Text received and not yet released."""
        return self._held

    def push(self, text: str) -> str:
        """Takes the next text; returns what may be shown now. After a match nothing more is released."""
        if self._matched is not None or not text:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        end, stop = self._first_match(buffer)
        if stop is not None:
            self._matched, self._held = stop, ""
            return buffer[:end] if self._include_stop else buffer[: end - len(stop)]
        keep = self._open_suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Ends the answer without a match: releases what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, buffer: str) -> tuple[int, str | None]:
        """The match that ends first, the longest of those that end there, as (end, stop); or (0, None)."""
        best_end, best = 0, None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best_end):
                best_end, best = start + len(stop), stop
        return best_end, best

    def _open_suffix(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is the beginning of a stop string."""
        lengths = range(min(self._longest, len(buffer)), 0, -1)
        return next((length for length in lengths if buffer[-length:] in self._beginnings), 0)
