"""Recorded routing traces, from Python: what a file holds, and what other caches would have made of it.

Owns the lifetime of a trace in memory. Needs no model. The GIL is released during every call into the core.
"""

from dataclasses import dataclass, fields
from os import PathLike, fsencode
from types import TracebackType
from typing import Any, Self

from colibri.core._core import ffi, lib
from colibri.core.errors import InvalidError, error_from

POLICIES = {"LRU": 0, "LFU": 1, "LFRU": 2, "least-stale": 3, "S3-FIFO": 4, "pins": 5, "ours": 6, "Belady": 7}
"""The policies that Trace.policy knows; docs/caching.md defines them."""
KNOWN_ONLINE = tuple(name for name in POLICIES if name not in ("pins", "ours", "Belady"))
"""Those of POLICIES that others use, and that know neither a part to learn from nor the future."""


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
    """What the cache of this build made of a recording, repeated event by event; see cl_replay in colibri.h."""

    hits: int
    loads: int
    prefill_uses: int
    prefill_loads: int
    early_loads: int
    evictions: int
    differences: int
    accesses: int
    decode_loads: int


@dataclass(frozen=True)
class PolicyResult:
    """What the uses of decoding would have read under a policy, over the counted part; see cl_policy_result."""

    accesses: int
    steps: int
    loads: int
    bytes: int

    @property
    def hit_rate(self) -> float:
        """0..1; of no accesses: 0."""
        return 1 - self.loads / self.accesses if self.accesses else 0.0


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

    def replay(self) -> Replay:
        """Repeat the recording through the product's own cache, with its numbers of slots, from its first state."""
        out, err = ffi.new("cl_replay *"), ffi.new("cl_error *")
        lib.cl_trace_replay(self._c(), out, err)
        _raise(err)
        return Replay(**{field.name: int(getattr(out, field.name)) for field in fields(Replay)})

    def policy(self, name: str, slots: int, count_from: int = 0) -> PolicyResult:
        """Return what the uses of decoding would have read under one of POLICIES with `slots` experts in memory in all
        (1..records), from an empty cache, counted from the turn of access `count_from` on. Raises InvalidError for a
        number of slots out of range."""
        if name not in POLICIES:
            raise InvalidError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
        out, err = ffi.new("cl_policy_result *"), ffi.new("cl_error *")
        counts = _unsigned("slots", slots), _unsigned("count_from", count_from)
        lib.cl_trace_policy(self._c(), POLICIES[name], *counts, out, err)
        _raise(err)
        return PolicyResult(**{field.name: int(getattr(out, field.name)) for field in fields(PolicyResult)})

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
