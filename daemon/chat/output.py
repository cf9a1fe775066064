"""The visible text of one answer: detokeniser and stop strings in a row.

Its state is a function of the ids pushed so far, so after a restart the service pushes the ids of the log again and
continues; what is shown for the first k ids never depends on when or how often that happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from colibri.daemon.chat.detokenizer import Detokenizer
from colibri.daemon.chat.stops import StopMatcher


class Piece(NamedTuple):
    """Text that may be shown now, and the stop string that ended the answer, if one did."""

    text: str
    stop: str | None


class OutputText:
    """Text of the ids of an answer, in the order they were sampled."""

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    def push(self, token_id: int) -> Piece:
        """Takes the next id. Once a stop string matched, ids contribute no more text."""
        return Piece(self._stops.push(self._detokenizer.push(token_id)), self._stops.matched)

    def replay(self, token_ids: Iterable[int]) -> str:
        """Pushes the ids of a log; returns all the text that they released."""
        return "".join([self.push(token_id).text for token_id in token_ids])

    def flush(self) -> Piece:
        """Ends the answer: an open character becomes U+FFFD and held text is released, unless a stop string matched.

        The last U+FFFD can itself complete a stop string.
        """
        text = self._stops.push(self._detokenizer.flush())
        if self._stops.matched is None:
            text += self._stops.flush()
        return Piece(text, self._stops.matched)
