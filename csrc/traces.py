"""Recorded routing traces, from Python: what a file holds, and what other caches would have made of it.

Owns the lifetime of a trace in memory. Needs no model. The GIL is released during every call into the core.
"""

from dataclasses import dataclass, fields
from os import PathLike, fsencode
from types import TracebackType
from typing import Any, Self

from colibri.core._core import ffi, lib
from colibri.core.errors import InvalidError, error_from

POLICIES = {"LRU": 0, "LFU": 1, "LFRU": 2, "least-stale": 3, "S3-FIFO": 4, "pins": 5, "Belady": 6}
"""The policies that Trace.policy_loads knows; docs/caching.md defines them."""


@dataclass(frozen=True)
class TraceInfo:
    """What a trace holds; see cl_trace_info in colibri.h."""

    layers: int
    is_complete: int
    records: int
    most_record_bytes: int
    model_bytes: int
    cache_slots: int
    ring_slots: int
    steps: int
    events: int
    accesses: int
    prefill_uses: int
    live_hits: int
    live_loads: int
    bytes: int


@dataclass(frozen=True)
class Replay:
    """What the cache of this build made of a trace; see cl_replay in colibri.h."""

    is_exact: int
    hits: int
    loads: int
    prefill_uses: int
    prefill_loads: int
    early_loads: int
    evictions: int
    differences: int
    accesses: int
    decode_loads: int
    counted_accesses: int
    counted_loads: int
    counted_bytes: int


class Trace:
    """A recorded trace, read and checked."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Raises CorruptError for a file that is damaged or no trace, UnsupportedError for another version of the
        format, StorageError if it cannot be read."""
        self._handle: Any = None
        out, err = ffi.new("cl_trace **"), ffi.new("cl_error *")
        lib.cl_trace_open(out, fsencode(path), err)
        _raise(err)
        self._handle = out[0]
        info = ffi.new("cl_trace_info *")
        lib.cl_trace_get_info(self._handle, info)
        self.info = TraceInfo(**{field.name: int(getattr(info, field.name)) for field in fields(TraceInfo)})

    def _c(self) -> Any:
        if self._handle is None:
            raise InvalidError("the trace is closed")
        return self._handle

    def replay(self, slots: int, count_from: int = 0) -> Replay:
        """Run the product's own cache over the trace with `slots` (1..records); the `counted_` results leave out the
        first `count_from` accesses of decoding. Raises InvalidError for a number of slots out of range."""
        out, err = ffi.new("cl_replay *"), ffi.new("cl_error *")
        lib.cl_trace_replay(self._c(), _unsigned("slots", slots), _unsigned("count_from", count_from), out, err)
        _raise(err)
        return Replay(**{field.name: int(getattr(out, field.name)) for field in fields(Replay)})

    def policy_loads(self, policy: str, slots: int, count_from: int = 0) -> int:
        """Return how many of the accesses from `count_from` on would be reads under one of POLICIES."""
        if policy not in POLICIES:
            raise InvalidError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        loads, err = ffi.new("uint64_t *"), ffi.new("cl_error *")
        counts = _unsigned("slots", slots), _unsigned("count_from", count_from)
        lib.cl_trace_policy(self._c(), POLICIES[policy], *counts, loads, err)
        _raise(err)
        return int(loads[0])

    def close(self) -> None:
        """Free the trace; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.cl_trace_close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _unsigned(name: str, number: int) -> int:
    if not 0 <= number < 2**63:
        raise InvalidError(f"{name} is {number}, must be 0 or more")
    return number


def _raise(err: Any) -> None:
    error = error_from(err)
    if error is not None:
        raise error
