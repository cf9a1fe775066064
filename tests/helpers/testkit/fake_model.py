"""A model without weights for tests of the engine: deterministic, exact about KV, and easy to make fail.

The next token is a hash of all tokens so far, and a sequence's KV is those tokens: a sequence that was resumed, cut or
batched wrongly answers differently. It holds the engine to the core's rules: KV pages are counted, a sequence is in one
item at a time, cursors are few, and everything that was opened is closed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from colibri.core.errors import CancelledError, FullError
from colibri.daemon.generation import SamplingSpec
from colibri.daemon.model_port import PAGE_POSITIONS, PageSection, PrefillPort, RowPort, SequencePort

CONTENT = "ab" * 32
PAGE_BYTES = 2 * PAGE_POSITIONS * 4


def next_token(tokens: Sequence[int], sampling: SamplingSpec, vocab: int) -> int:
    """What follows `tokens`; sampling matters only above temperature 0."""
    digest = hashlib.sha256(np.asarray(tokens, dtype="<u4").tobytes())
    if sampling.temperature > 0:
        digest.update(f"{sampling.seed}/{len(tokens)}".encode())
    return int.from_bytes(digest.digest()[:8], "little") % vocab


def continuation(
    tokens: Sequence[int], count: int, sampling: SamplingSpec | None = None, vocab: int = 1000
) -> list[int]:
    """The `count` tokens that the model produces behind `tokens`."""
    everything = list(tokens)
    for _ in range(count):
        everything.append(next_token(everything, sampling or SamplingSpec(), vocab))
    return everything[len(tokens) :]


@dataclass(frozen=True)
class FakeCounts:
    hits: int = 0
    loads: int = 0
    bytes: int = 0


class FakeSequence:
    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.kv: list[int] = []
        self.cancelled = False
        self.in_use = False
        self.closed = False

    @property
    def length(self) -> int:
        return len(self.kv)

    def cancel(self) -> None:
        assert not self.closed, "cancel of a closed sequence"
        self.cancelled = True

    def extend(self, tokens: Sequence[int]) -> None:
        self.kv.extend(tokens)
        self.model.check_pages()

    def export_page(self, index: int) -> bytes:
        tokens = self.kv[index * PAGE_POSITIONS : (index + 1) * PAGE_POSITIONS]
        assert tokens, "export of a page without positions"
        page = np.zeros((2, PAGE_POSITIONS), dtype="<u4")
        page[:, : len(tokens)] = tokens
        return page.tobytes()

    def import_page(self, data: bytes, positions: int) -> None:
        assert self.length % PAGE_POSITIONS == 0
        assert len(data) == PAGE_BYTES
        self.model.imported_pages += 1
        self.extend(np.frombuffer(data, dtype="<u4")[:positions].tolist())

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.model.open_sequences.remove(self)


@dataclass
class FakeRow:
    sequence: FakeSequence
    token: int
    sampling: SamplingSpec
    next_token: int = -1
    counts: FakeCounts = FakeCounts()
    error: Exception | None = None


@dataclass
class FakePrefill:
    sequence: FakeSequence
    tokens: list[int]
    sampling: SamplingSpec
    done: bool = False
    positions_done: int = 0
    next_token: int = -1
    counts: FakeCounts = FakeCounts()
    error: Exception | None = None
    closed: bool = False

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.sequence.in_use = False
        self.sequence.model.open_prefills.remove(self)


@dataclass
class FakeModel:
    """`positions_per_step`: how far the cursors of one step get. `before_item(kind, sequence)` may raise what the item
    fails with; `before_step` runs first in every step (to wait for a test's signal, for instance)."""

    max_context: int = 512
    kv_pages: int = 32
    max_rows: int = 4
    max_prefills: int = 1
    pass_tokens: int = 100
    vocab_size: int = 1000
    numerics_id: str = "1/i16/f16/64"
    content_id: str = CONTENT
    positions_per_step: int = 40
    item_seconds: float = 0.0
    before_item: Callable[[str, FakeSequence], None] = lambda *_: None
    before_step: Callable[[], None] = lambda: None
    open_sequences: list[FakeSequence] = field(default_factory=list)
    open_prefills: list[FakePrefill] = field(default_factory=list)
    imported_pages: int = 0
    decoded: int = 0
    prefilled: int = 0
    kv_page_bytes: int = PAGE_BYTES
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def page_sections(self) -> tuple[PageSection, ...]:
        half = PAGE_BYTES // 2
        return (PageSection(0, 1, 1, 0, half), PageSection(1, 1, 1, half, half))

    def check_pages(self) -> None:
        used = sum(-(-sequence.length // PAGE_POSITIONS) for sequence in self.open_sequences)
        if used > self.kv_pages:
            raise FullError(f"{used} KV pages are needed; there are {self.kv_pages}")

    def sequence(self) -> FakeSequence:
        sequence = FakeSequence(self)
        self.open_sequences.append(sequence)
        return sequence

    def row(self, sequence: SequencePort, token: int, sampling: SamplingSpec) -> FakeRow:
        assert isinstance(sequence, FakeSequence)
        return FakeRow(sequence, token, sampling)

    def prefill(self, sequence: SequencePort, tokens: list[int], sampling: SamplingSpec) -> FakePrefill:
        assert isinstance(sequence, FakeSequence)
        assert 1 <= len(tokens) <= self.pass_tokens
        assert not sequence.in_use
        if len(self.open_prefills) == self.max_prefills:
            raise FullError("all prefill workspaces are taken")
        sequence.in_use = True
        prefill = FakePrefill(sequence, list(tokens), sampling)
        self.open_prefills.append(prefill)
        return prefill

    def step(self, rows: Sequence[RowPort], prefills: Sequence[PrefillPort], budget_us: int | None) -> None:
        assert budget_us is None or budget_us > 0
        assert self._busy.acquire(blocking=False), "two steps at once"
        try:
            self._step(rows, prefills)
        finally:
            self._busy.release()

    def _step(self, rows: Sequence[RowPort], prefills: Sequence[PrefillPort]) -> None:
        assert len(rows) <= self.max_rows
        self.before_step()
        for row in rows:
            assert isinstance(row, FakeRow)
            assert not row.sequence.in_use
            row.error = self._item("row", row.sequence)
            if row.error is None:
                row.sequence.extend([row.token])
                row.next_token = next_token(row.sequence.kv, row.sampling, self.vocab_size)
                row.counts = FakeCounts(3, 1, 4096)
                self.decoded += 1
        left = self.positions_per_step
        for prefill in prefills:
            assert isinstance(prefill, FakePrefill)
            while left > 0 and not prefill.done and prefill.error is None:
                left -= self._advance(prefill, left)

    def _advance(self, prefill: FakePrefill, most: int) -> int:
        prefill.error = self._item("prefill", prefill.sequence)
        if prefill.error is not None:
            return 0
        count = min(most, 10, len(prefill.tokens) - prefill.positions_done)
        prefill.positions_done += count
        if prefill.positions_done == len(prefill.tokens):
            prefill.sequence.extend(prefill.tokens)
            prefill.next_token = next_token(prefill.sequence.kv, prefill.sampling, self.vocab_size)
            prefill.counts = FakeCounts(len(prefill.tokens), 2, 8192)
            prefill.done = True
            self.prefilled += len(prefill.tokens)
        return count

    def _item(self, kind: str, sequence: FakeSequence) -> Exception | None:
        assert not sequence.closed
        until = time.monotonic() + self.item_seconds
        while True:
            if sequence.cancelled:
                sequence.cancelled = False
                return CancelledError("cancelled")
            if time.monotonic() >= until:
                break
            time.sleep(0.001)
        try:
            self.before_item(kind, sequence)
        except Exception as error:
            return error
        return None
