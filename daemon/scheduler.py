"""What goes into the next step: which generations run, which wait, and what each does next. Pure, no I/O.

Owns the bounded FIFO queue, the reservation of KV pages (an admitted generation has all pages it can ever need, so it
never stops in the middle for want of them), the cutting of prompts into passes, and the choice of which idle sequences
must give up their pages (the one unused for longest first). Knows keys and numbers, neither tokens nor the core.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice

from colibri.daemon.errors import ContextExceededError, QueueFullError
from colibri.daemon.model_port import PAGE_POSITIONS


def pages_for(positions: int) -> int:
    return -(-positions // PAGE_POSITIONS)


@dataclass(frozen=True)
class Limits:
    """From the memory plan. `max_queue`: generations that may wait beside those that run."""

    max_rows: int
    max_prefills: int
    pass_tokens: int
    max_context: int
    kv_pages: int
    max_queue: int = 64

    @property
    def context(self) -> int:
        """Positions that one sequence can have."""
        return min(self.max_context, self.kv_pages * PAGE_POSITIONS)


class Phase(enum.Enum):
    QUEUED = "queued"
    ADMITTED = "admitted"  # has its pages; its KV is not ready yet
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True)
class Pass:
    """The next `positions` positions of a prompt."""

    key: str
    positions: int


@dataclass(frozen=True)
class Plan:
    decode: tuple[str, ...]
    prefills: tuple[Pass, ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefills)


@dataclass
class _Entry:
    key: str
    session: str | None
    pages: int
    phase: Phase = Phase.QUEUED
    todo: int = 0  # prompt positions that are not prefilled yet


class Scheduler:
    """Keys are generation names. Not thread-safe; the engine's lock covers it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._entries: dict[str, _Entry] = {}
        self._queue: deque[_Entry] = deque()
        self._running: dict[str, _Entry] = {}  # in order of admission
        self._prefilling: dict[str, _Entry] = {}  # in order of their start, so that one under way keeps its workspace
        self._admitted: list[str] = []
        self._evicted: list[str] = []
        self._idle: OrderedDict[str, int] = OrderedDict()  # session -> pages, unused for longest first

    # ---- admission

    def token_limit(self, prompt_positions: int, max_tokens: int | None) -> int:
        """How many tokens may be produced behind a prompt. Raises ContextExceededError with both numbers."""
        limit = self.limits.context
        wanted = prompt_positions + (1 if max_tokens is None else max_tokens)
        if wanted > limit:
            what = "at least one token" if max_tokens is None else f"max_tokens {max_tokens}"
            raise ContextExceededError(
                f"a prompt of {prompt_positions} tokens and {what} need {wanted} positions; the context has {limit}",
                field="input",
                prompt_tokens=prompt_positions,
                needed=wanted,
                limit=limit,
            )
        return limit - prompt_positions if max_tokens is None else max_tokens

    def check_queue(self, positions: int, session: str | None) -> None:
        """Raises QueueFullError if a generation of so many positions could neither run nor wait now."""
        entry = _Entry("", session, pages_for(positions))
        if len(self._queue) >= self.limits.max_queue and (self._queue or not self._fits(entry)):
            raise QueueFullError(
                f"{len(self._queue)} generations are waiting; the queue holds {self.limits.max_queue}",
                limit=self.limits.max_queue,
            )

    def enqueue(self, key: str, positions: int, session: str | None = None) -> None:
        """Adds a generation that needs `positions` positions in all, prompt and output. Raises QueueFullError."""
        assert key not in self._entries
        assert positions <= self.limits.context
        self.check_queue(positions, session)
        entry = self._entries[key] = _Entry(key, session, pages_for(positions))
        self._queue.append(entry)
        self._promote()

    def take_evicted(self) -> list[str]:
        """Sessions whose idle sequences must be closed now, before anything of `take_admitted` starts."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_admitted(self) -> list[str]:
        """What was admitted since the last call, in order."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def queue_position(self, key: str) -> int:
        """1 for the next to be admitted; 0 once admitted."""
        entry = self._entries[key]
        return self._queue.index(entry) + 1 if entry.phase is Phase.QUEUED else 0

    def _fits(self, entry: _Entry) -> bool:
        reserved = sum(running.pages for running in self._running.values())
        return len(self._running) < self.limits.max_rows and reserved + entry.pages <= self.limits.kv_pages

    def _promote(self) -> None:
        while self._queue and self._fits(self._queue[0]):
            entry = self._queue.popleft()
            entry.phase = Phase.ADMITTED
            if entry.session is not None:
                self._idle.pop(entry.session, None)  # its pages are part of the reservation from now on
            self._running[entry.key] = entry
            self._admitted.append(entry.key)
            while self.pages_used > self.limits.kv_pages:
                session, _ = self._idle.popitem(last=False)
                self._evicted.append(session)

    # ---- steps

    def start_prefill(self, key: str, positions: int) -> None:
        """The KV of an admitted generation is ready, but for the last `positions` positions of its prompt."""
        entry = self._entries[key]
        assert entry.phase is Phase.ADMITTED
        assert positions > 0
        entry.phase, entry.todo = Phase.PREFILLING, positions
        self._prefilling[key] = entry

    def plan(self) -> Plan:
        """Every decoding generation, and the prompts that started first, each with its next pass. The same until
        something changes, so a pass that is under way is planned again with the same length."""
        decode = tuple(e.key for e in self._running.values() if e.phase is Phase.DECODING)
        first = islice(self._prefilling.values(), self.limits.max_prefills)
        passes = (Pass(e.key, min(e.todo, self.limits.pass_tokens)) for e in first)
        return Plan(decode, tuple(passes))

    def prefilled(self, key: str, positions: int) -> bool:
        """A pass is done; whether it was the prompt's last."""
        entry = self._entries[key]
        assert entry.phase is Phase.PREFILLING
        assert 0 < positions <= entry.todo
        entry.todo -= positions
        if entry.todo == 0:
            entry.phase = Phase.DECODING
            del self._prefilling[key]
        return entry.todo == 0

    def remove(self, key: str, idle_positions: int = 0) -> None:
        """A generation is over, in whatever phase. `idle_positions`: its session keeps that many positions of KV in
        memory, as long as nobody else needs the pages (an eviction that is under way stands)."""
        entry = self._entries.pop(key)
        self._prefilling.pop(key, None)
        if entry.phase is Phase.QUEUED:
            self._queue.remove(entry)
        else:
            del self._running[key]
            if key in self._admitted:
                self._admitted.remove(key)
        if idle_positions and entry.session is not None and entry.session not in self._evicted:
            assert pages_for(idle_positions) <= entry.pages
            self._idle[entry.session] = pages_for(idle_positions)
        self._promote()

    # ---- idle sequences and views

    def forget_idle(self, session: str) -> None:
        """The session's idle sequence was closed."""
        self._idle.pop(session, None)
        self._promote()

    def phase(self, key: str) -> Phase:
        return self._entries[key].phase

    @property
    def queued(self) -> tuple[str, ...]:
        return tuple(entry.key for entry in self._queue)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    @property
    def idle(self) -> tuple[str, ...]:
        return tuple(self._idle)

    @property
    def pages_used(self) -> int:
        """Reserved by what runs, and held by idle sequences."""
        return sum(entry.pages for entry in self._running.values()) + sum(self._idle.values())
