"""The model in memory, from Python: one call per step, typed results, handles that refuse use after closing.

Owns the lifetime of the core's handles and the translation of its errors. Refuses policy: what runs next, and what text
means, is decided above. Everything here but Sequence.cancel and Model.stats is for one thread at a time. The GIL is
released during every call into the core.
"""

import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from os import PathLike, fsencode
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from colibri.core._core import ffi, lib
from colibri.core.container import Container
from colibri.core.core_options import COptions, ModelOptions
from colibri.core.drives import DriveStats
from colibri.core.errors import CoreError, InvalidError, error_from

__all__ = [
    "Counts",
    "DriveStats",
    "KvSection",
    "MemoryPlan",
    "Model",
    "ModelOptions",
    "ModelStats",
    "Prefill",
    "Row",
    "Sampling",
    "Sequence",
    "plan",
]

CData = Any  # a cffi handle or struct
F32 = npt.NDArray[np.float32]
KV_PAGE_POSITIONS = 64
_NUMERICS_VERSION = 1
_TO_THE_END = 2**64 - 1
_DTYPE_NAMES = {1: "f16", 2: "f32"}


@dataclass(frozen=True)
class MemoryPlan:
    """What an open would allocate, in bytes; total_bytes is the sum of all but kv_page_bytes and slot_bytes."""

    dense_bytes: int
    kv_bytes: int
    kv_page_bytes: int
    slot_bytes: int
    slots_bytes: int
    ring_bytes: int
    prefill_bytes: int
    buffers_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ModelStats:
    """Counters since the model was opened; times in microseconds. See cl_model_stats in colibri.h."""

    load_bytes_done: int
    load_bytes_total: int
    heartbeat: int
    expert_hits: int
    expert_loads: int
    expert_evictions: int
    expert_bytes: int
    read_errors: int
    checksum_errors: int
    steps: int
    decode_tokens: int
    prefill_tokens: int
    compute_us: int
    wait_us: int
    lookahead_predicted: int
    lookahead_right: int
    lookahead_loads: int
    lookahead_bytes: int
    lookahead_wasted_bytes: int
    lookahead_late: int
    lookahead_saved_us: int
    lookahead_us: int
    lookahead_active: int
    lookahead_trying: int
    prefill_wasted_bytes: int
    kv_pages_free: int
    prefills_free: int
    direct_active: int
    threads: int
    buffered_stripes: int


@dataclass(frozen=True)
class KvSection:
    """One layer's part of a KV page: kind 1 is keys and values; dtype is f16 or f32."""

    layer: int
    kind: int
    dtype: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0: greedy. top_k 0 and top_p 1: off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Counts:
    """Expert uses of an item: found in memory, read, and the bytes of those reads."""

    hits: int = 0
    loads: int = 0
    bytes: int = 0


def plan(container: Container, options: ModelOptions) -> MemoryPlan:
    """Return what opening a model with these options would allocate. Raises what Model() raises for bad options."""
    c_options, c_plan, err = COptions(container, options), ffi.new("cl_memory_plan *"), ffi.new("cl_error *")
    lib.cl_model_plan(c_options.c, c_plan, err)
    _raise(err)
    return MemoryPlan(**{field.name: int(getattr(c_plan, field.name)) for field in fields(MemoryPlan)})


def _raise(err: CData) -> None:
    error = error_from(err)
    if error is not None:
        raise error


def _fill_sampling(c: CData, sampling: Sampling) -> None:
    try:
        c.temperature, c.top_k = sampling.temperature, sampling.top_k
        c.top_p, c.seed = sampling.top_p, sampling.seed
    except (OverflowError, TypeError) as error:
        raise InvalidError(f"sampling: {sampling} has a number that does not fit: {error}") from error


def _counts(c: CData) -> Counts:
    return Counts(int(c.expert_hits), int(c.expert_loads), int(c.expert_bytes))


class Sequence:
    """Positions with their KV. Made by Model.sequence(); closed by close() or with its model."""

    def __init__(self, model: "Model", handle: CData) -> None:
        self._model = model
        self._handle: CData | None = handle
        self._lock = threading.Lock()  # cancel() may come from any thread, also while another one closes
        self._prefill: Prefill | None = None

    def _c(self) -> CData:
        if self._handle is None:
            raise InvalidError("the sequence is closed")
        return self._handle

    @property
    def length(self) -> int:
        """Positions whose KV is present."""
        return int(lib.cl_seq_length(self._c()))

    def cancel(self) -> None:
        """Make the running or the next item of this sequence end with CancelledError. From any thread."""
        with self._lock:
            if self._handle is not None:
                lib.cl_seq_cancel(self._handle)

    def export_page(self, index: int) -> bytes:
        """Return page `index` (positions from 64 * index); positions beyond the length are zero bytes.

        Raises InvalidError if the sequence has no such page.
        """
        out, err = bytearray(self._model.kv_page_bytes), ffi.new("cl_error *")
        if index < 0:
            raise InvalidError(f"page {index} is not a page number")
        lib.cl_seq_export_page(self._c(), index, ffi.from_buffer("uint8_t[]", out), len(out), err)
        _raise(err)
        return bytes(out)

    def import_page(self, data: bytes, positions: int) -> None:
        """Append a page with `positions` (1..64) valid positions; the length must be a multiple of 64 before.

        Raises InvalidError for a page of another size or at the wrong place, FullError without a free page.
        """
        err = ffi.new("cl_error *")
        if not 1 <= positions <= KV_PAGE_POSITIONS:
            raise InvalidError(f"positions is {positions}, must be 1..{KV_PAGE_POSITIONS}")
        lib.cl_seq_import_page(self._c(), ffi.from_buffer("uint8_t[]", data), len(data), positions, err)
        _raise(err)

    def close(self) -> None:
        """Give the pages back, and end a prefill that still runs on them; a second call does nothing."""
        if self._prefill is not None:
            self._prefill.close()
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            lib.cl_seq_free(handle)
            self._model._forget(self)


class Row:
    """One token of one sequence in a step: runs `token` at the sequence's end and samples the next.

    After the step: next_token (-1 on failure), logits (if wanted), counts, error.
    """

    def __init__(self, seq: Sequence, token: int, sampling: Sampling, want_logits: bool = False) -> None:
        self.seq = seq
        self.token = token
        self.sampling = sampling
        self.want_logits = want_logits
        self.next_token = -1
        self.logits: F32 | None = None
        self.counts = Counts()
        self.error: CoreError | None = None

    def _fill(self, c: CData, vocab_size: int) -> F32 | None:
        """Describe this row to the core; return the array that its logits go to."""
        try:
            c.seq, c.token = self.seq._c(), self.token
        except (OverflowError, TypeError) as error:
            raise InvalidError(f"token {self.token} is not a token id") from error
        _fill_sampling(c.sampling, self.sampling)
        logits = np.empty(vocab_size, np.float32) if self.want_logits else None
        c.logits = ffi.from_buffer("float[]", logits) if logits is not None else ffi.NULL
        return logits

    def _take(self, c: CData, logits: F32 | None) -> None:
        self.error = error_from(c.error)
        self.next_token = int(c.next_token) if self.error is None else -1
        self.logits = logits if self.error is None else None
        self.counts = _counts(c.counts)


class Prefill:
    """A pass of a prompt on its way. Made by Model.prefill(); done, or failed with `error`, after some steps.

    positions_done tells the progress; next_token and logits [n, vocab_size] (if wanted) are valid once done.
    """

    def __init__(self, seq: Sequence, handle: CData, logits: F32 | None) -> None:
        self._seq = seq
        self._handle: CData | None = handle
        self._all_logits = logits
        self.done = False
        self.positions_done = 0
        self.next_token = -1
        self.counts = Counts()
        self.error: CoreError | None = None

    @property
    def logits(self) -> F32 | None:
        """The logits of all positions, [n, vocab_size]; None until done or if they were not asked for."""
        return self._all_logits if self.done else None

    def _c(self) -> CData:
        if self._handle is None:
            raise InvalidError("the prefill is closed")
        return self._handle

    def _take(self, c: CData) -> None:
        self.error = error_from(c.error)
        self.done, self.positions_done = bool(c.done), int(c.positions_done)
        self.next_token = int(c.next_token) if self.done else -1
        self.counts = _counts(c.counts)

    def close(self) -> None:
        """Give the workspace back; the sequence keeps its length unless the pass is done. Twice is fine."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.cl_prefill_free(handle)
            self._seq._prefill = None


class Model:
    """A container in memory. Open (allocates), load (reads the dense weights), then sequences, prefills and steps."""

    def __init__(self, container: Container, options: ModelOptions) -> None:
        """Check the container against its spec, open its files, allocate and touch all memory.

        Raises InvalidError, UnsupportedError, CorruptError, StorageError or NoMemoryError, naming what is wrong.
        """
        self._handle: CData | None = None
        self._lock = threading.Lock()  # stats() may come from any thread, also while another one closes
        self._sequences: set[Sequence] = set()
        c_options, out, err = COptions(container, options), ffi.new("cl_model **"), ffi.new("cl_error *")
        self._rows = ffi.new("cl_row[]", max(options.max_rows, 0))
        self._cursors = ffi.new("cl_cursor[]", max(options.max_prefills, 0))
        lib.cl_model_open(out, c_options.c, err)
        _raise(err)
        self._handle = out[0]
        self._options = options
        self.vocab_size = int(container.manifest.spec.vocab_size)
        self.max_context = options.max_context
        self.kv_page_bytes = sum(section.bytes for section in self.kv_layout())
        self.isa = ffi.string(lib.cl_model_isa(self._handle)).decode()
        self.numerics_id = f"{_NUMERICS_VERSION}/{options.activation}/{options.kv_dtype}/{KV_PAGE_POSITIONS}"

    def _c(self) -> CData:
        if self._handle is None:
            raise InvalidError("the model is closed")
        return self._handle

    def load(self) -> None:
        """Read, verify and tile the dense weights. Once; progress is in stats(). After a failure only close() is left.

        Raises CorruptError or StorageError, naming tensor and offset.
        """
        err = ffi.new("cl_error *")
        lib.cl_model_load(self._c(), err)
        _raise(err)

    def stats(self) -> ModelStats:
        """Return the counters. From any thread."""
        c = ffi.new("cl_model_stats *")
        with self._lock:
            lib.cl_model_get_stats(self._c(), c)
        return ModelStats(**{field.name: int(getattr(c, field.name)) for field in fields(ModelStats)})

    def drive_stats(self) -> list[DriveStats]:
        """Return what each stripe's drive has done, in stripe order. From any thread."""
        with self._lock:
            count = lib.cl_model_drive_stats(self._c(), ffi.NULL, 0)
            c = ffi.new("cl_drive_stats[]", count)
            lib.cl_model_drive_stats(self._c(), c, count)
        return [DriveStats.from_c(drive) for drive in c]

    def reopen_stripes(self) -> None:
        """Open again every stripe and mirror that is degraded, missing or another file by now. Between steps.

        The others are reopened even if one fails. Raises the first failure of a stripe, after which that file is still
        the old one: CorruptError for a header that does not fit the container, StorageError. A mirror's is in its note.
        """
        err = ffi.new("cl_error *")
        lib.cl_model_reopen_stripes(self._c(), err)
        _raise(err)

    def export_heat(self) -> F32:
        """Return how much decoding has wanted each expert of late, 0..1, layer by layer."""
        heat = np.empty(lib.cl_model_heat_entries(self._c()), np.float32)
        err = ffi.new("cl_error *")
        lib.cl_model_export_heat(self._c(), ffi.from_buffer("float[]", heat), heat.size, err)
        _raise(err)
        return heat

    def import_heat(self, heat: F32) -> None:
        """Take heat that an earlier run of this model exported; warm() then has something to read.

        Raises InvalidError for another number of experts, for a value outside 0..1, and while a trace is recorded.
        """
        values, err = np.ascontiguousarray(heat, np.float32).ravel(), ffi.new("cl_error *")
        lib.cl_model_import_heat(self._c(), ffi.from_buffer("float[]", values), values.size, err)
        _raise(err)

    def warm(self, budget_us: int) -> bool:
        """Read hot absent experts into empty slots for about `budget_us`; whether there is more to do."""
        more, err = ffi.new("uint32_t *"), ffi.new("cl_error *")
        lib.cl_model_warm(self._c(), min(max(budget_us, 0), _TO_THE_END), more, err)
        _raise(err)
        return bool(more[0])

    def trace(self, path: str | PathLike[str] | None) -> None:
        """Begin to record routing into the new file `path`; None ends the recording, if there is one.

        Raises StorageError if the file cannot be created or, at the end, if not everything could be written.
        """
        err = ffi.new("cl_error *")
        lib.cl_model_trace(self._c(), ffi.NULL if path is None else fsencode(path), err)
        _raise(err)

    def trace_error(self) -> CoreError | None:
        """Return what has stopped the recording, None while it goes on and without one."""
        err = ffi.new("cl_error *")
        lib.cl_model_trace_state(self._c(), err)
        return error_from(err)

    def kv_layout(self) -> list[KvSection]:
        """Return what a KV page holds, in order of offset."""
        count = lib.cl_kv_layout(self._c(), ffi.NULL, 0)
        sections = ffi.new("cl_kv_section[]", count)
        lib.cl_kv_layout(self._c(), sections, count)
        return [
            KvSection(int(s.layer), int(s.kind), _DTYPE_NAMES[int(s.dtype)], int(s.offset), int(s.bytes))
            for s in sections
        ]

    def sequence(self) -> Sequence:
        """Return a new, empty sequence."""
        out, err = ffi.new("cl_seq **"), ffi.new("cl_error *")
        lib.cl_seq_create(out, self._c(), err)
        _raise(err)
        seq = Sequence(self, out[0])
        self._sequences.add(seq)
        return seq

    def prefill(
        self, seq: Sequence, tokens: SequenceOf[int], sampling: Sampling, *, all_logits: bool = False
    ) -> Prefill:
        """Return a cursor over `tokens` (1..pass_tokens), to be appended to `seq` by the steps it is given to.

        Raises InvalidError for bad tokens or a sequence in use, FullError without a workspace or enough KV pages.
        """
        out, err, c_sampling = ffi.new("cl_prefill **"), ffi.new("cl_error *"), ffi.new("cl_sampling *")
        if seq._model is not self:
            raise InvalidError("the sequence is not this model's")
        _fill_sampling(c_sampling, sampling)
        logits = np.empty((len(tokens), self.vocab_size), np.float32) if all_logits else None
        c_logits = ffi.from_buffer("float[]", logits) if logits is not None and logits.size else ffi.NULL
        try:
            c_tokens = ffi.new("int32_t[]", list(tokens))
        except (OverflowError, TypeError) as error:
            raise InvalidError(f"the tokens are not all token ids: {error}") from error
        self._c()
        lib.cl_prefill_create(out, seq._c(), c_tokens, len(tokens), c_sampling, c_logits, err)
        _raise(err)
        seq._prefill = Prefill(seq, out[0], logits)
        return seq._prefill

    def step(self, rows: SequenceOf[Row], prefills: SequenceOf[Prefill], budget_us: int | None = None) -> None:
        """Run all rows, then advance the prefills for about `budget_us` (None: to their ends).

        Results and failures of items land in the items. Raises InvalidError for a malformed call: too many items, a
        closed or foreign handle, a sequence twice.
        """
        model, err = self._c(), ffi.new("cl_error *")
        if len(rows) > len(self._rows):
            raise InvalidError(f"{len(rows)} rows are more than max_rows, {len(self._rows)}")
        if len(prefills) > len(self._cursors):
            raise InvalidError(f"{len(prefills)} prefills are more than max_prefills, {len(self._cursors)}")
        logits = [row._fill(c, self.vocab_size) for row, c in zip(rows, self._rows, strict=False)]
        for prefill, c in zip(prefills, self._cursors, strict=False):
            c.prefill = prefill._c()
        budget = _TO_THE_END if budget_us is None else min(max(budget_us, 0), _TO_THE_END)
        lib.cl_step(model, self._rows, len(rows), self._cursors, len(prefills), budget, err)
        _raise(err)
        for row, c, row_logits in zip(rows, self._rows, logits, strict=False):
            row._take(c, row_logits)
        for prefill, c in zip(prefills, self._cursors, strict=False):
            prefill._take(c)

    def _forget(self, seq: Sequence) -> None:
        self._sequences.discard(seq)

    def close(self) -> None:
        """Close prefills, sequences and the model, in this order; a second call does nothing."""
        for seq in list(self._sequences):
            seq.close()
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            lib.cl_model_close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
