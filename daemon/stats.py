"""What WatchStats shows: one look at everything that has numbers, as the contract's message.

Owns the translation from the engine's, the drives' and the machine's numbers into `Stats`, and what of it is looked up
seldom because it costs (the bytes of the state folder). Fields without a source stay unset. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from colibri.daemon.drives import DriveView
from colibri.daemon.engine_api import EngineApi, EngineStats
from colibri.daemon.machine import anonymous_bytes
from colibri.daemon.rpc import Phase
from colibri.daemon.views import generation_message
from colibri.v1 import admin_service_pb2 as admin_pb2

SESSION_BYTES_SECONDS = 10.0
_MIB = 1 << 20


@dataclass(frozen=True)
class RuntimeView:
    """What the runtime knows of model, drives and memory. `remarks`: what is less than it could be; `doing`: what it
    does beside the generations, in words; `scrub_fraction`: of the pass under way, None without one; `lookahead`: None
    while loading; `expert_read_bytes`: from the drives since the start, on demand and ahead."""

    drives: Sequence[DriveView] = ()
    remarks: tuple[str, ...] = ()
    doing: tuple[str, ...] = ()
    planned_bytes: int = 0
    experts: int = 0
    expert_slots: int = 0
    warming: bool = False
    scrub_fraction: float | None = None
    lookahead: admin_pb2.Lookahead | None = None
    expert_read_bytes: int = 0


class StatsRuntime(Protocol):
    """The part of the runtime that has numbers. `look` is cheap, the others are called on a thread."""

    def look(self) -> RuntimeView: ...

    def load_progress(self) -> tuple[int, int]: ...

    def expert_heat(self) -> bytes:
        """One byte per expert, layer-major, 255 for the hottest; b"" if the model keeps none. Waits for a step."""

    def session_bytes(self) -> int:
        """Bytes of all sessions in the state folder. Raises OSError."""


@dataclass(frozen=True)
class Situation:
    """Where the server stands. `degraded` and `detail` as the status line has them."""

    phase: Phase
    detail: str
    degraded: tuple[str, ...]
    engine: EngineApi | None


class StatsSource:
    """Makes snapshots. `situation` is asked anew for each."""

    def __init__(self, runtime: StatsRuntime, situation: Callable[[], Situation]) -> None:
        self._runtime = runtime
        self._situation = situation
        self._session_bytes = 0
        self._counted_at = float("-inf")

    async def snapshot(self, with_heat: bool) -> admin_pb2.Stats:
        now = self._situation()
        view = self._runtime.look()
        done, total = self._runtime.load_progress()
        stats = admin_pb2.Stats(
            state=state_of(now),
            detail=now.detail,
            load_fraction=done / total if total else 1.0,
            devices=[device_message(drive) for drive in view.drives],
            resident_bytes=anonymous_bytes(),
            degraded=now.degraded,
            planned_bytes=view.planned_bytes,
            experts=view.experts,
            expert_slots=view.expert_slots,
            warming=view.warming,
            lookahead=view.lookahead,
            expert_read_bytes=view.expert_read_bytes,
        )
        if view.scrub_fraction is not None:
            stats.scrub_fraction = view.scrub_fraction
        if now.engine is None:
            return stats
        _add_engine(stats, now.engine.stats())
        for generation in now.engine.generations():
            if not generation.finished:
                stats.generations.append(generation_message(generation))
        if now.phase is Phase.READY:
            stats.session_bytes = await self._counted_session_bytes()
            if with_heat:
                stats.expert_heat = await asyncio.to_thread(self._runtime.expert_heat)
        return stats

    async def _counted_session_bytes(self) -> int:
        if time.monotonic() - self._counted_at >= SESSION_BYTES_SECONDS:
            self._session_bytes = await asyncio.to_thread(self._runtime.session_bytes)
            self._counted_at = time.monotonic()
        return self._session_bytes


def state_of(now: Situation) -> admin_pb2.Stats.State:
    if now.phase is Phase.LOADING:
        return admin_pb2.Stats.STATE_LOADING
    if now.phase is Phase.DRAINING:
        return admin_pb2.Stats.STATE_DRAINING
    return admin_pb2.Stats.STATE_DEGRADED if now.degraded else admin_pb2.Stats.STATE_READY


def _add_engine(stats: admin_pb2.Stats, engine: EngineStats) -> None:
    uses = engine.expert_hits + engine.expert_loads
    stats.queued, stats.running = engine.queued, engine.running
    stats.decode_tokens_per_second = engine.decode_tokens_per_second
    stats.prefill_tokens_per_second = engine.prefill_tokens_per_second
    stats.expert_hit_ratio = engine.expert_hits / uses if uses else 0.0
    stats.expert_hits, stats.expert_loads = engine.expert_hits, engine.expert_loads
    stats.expert_demand_bytes = engine.expert_bytes


def device_message(drive: DriveView) -> admin_pb2.Device:
    counters = drive.counters
    return admin_pb2.Device(
        path=str(drive.path),
        read_bytes=counters.read_bytes,
        read_mib_per_second=drive.bytes_per_second / _MIB,
        latency_ms_p99=counters.latency_p99_us / 1e3,
        stripe=drive.stripe,
        state=admin_pb2.Device.STATE_DEGRADED if drive.degraded else admin_pb2.Device.STATE_OK,
        reads=counters.reads,
        retries=counters.retries,
        errors=counters.errors,
        checksum_errors=counters.checksum_errors,
        mirror_reads=counters.mirror_reads,
        last_error=drive.degraded,
        backend=counters.backend,
        direct=counters.direct,
        has_mirror=counters.mirror,
        note=counters.note,
        latency_ms_p50=counters.latency_p50_us / 1e3,
        busy_seconds=counters.busy_us / 1e6,
        cpu_seconds=counters.cpu_us / 1e6,
        mirror_path=str(drive.mirror or ""),
        mirror_error=drive.mirror_degraded,
    )
