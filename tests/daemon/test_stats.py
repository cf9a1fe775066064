"""WatchStats over a real socket: when snapshots come, what is in them, and what a request may ask for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from colibri.daemon.drives import Drives
from colibri.daemon.stats import RuntimeView
from colibri.v1 import admin_service_pb2 as admin_pb2
from testkit.drive_counters import Counters
from testkit.fake_model import FakeModel
from testkit.service import VOCAB, Daemon, blocked, daemon, first, refused, request, rest, run, until_ready

Stats, Device = admin_pb2.Stats, admin_pb2.Device
FILES = [Path("/a/stripe-000.colibri"), Path("/b/stripe-001.colibri")]


def watch(running: Daemon, seconds: float | None = None, **fields: Any) -> Any:
    asked = admin_pb2.WatchStatsRequest(**fields)
    if seconds is not None:
        asked.interval.FromNanoseconds(round(seconds * 1e9))
    return running.admin.WatchStats(asked)


async def once(running: Daemon, **fields: Any) -> admin_pb2.Stats:
    call = watch(running, **fields)
    stats: admin_pb2.Stats = await call.read()
    call.cancel()
    return stats


async def until(running: Daemon, wanted: Any) -> admin_pb2.Stats:
    """The first snapshot that is as wanted."""
    call = watch(running, 0.1)
    async with asyncio.timeout(20):
        while not wanted(stats := await call.read()):
            pass
    call.cancel()
    assert isinstance(stats, admin_pb2.Stats)
    return stats


def test_a_snapshot_comes_at_once_and_then_one_per_interval(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            began = time.monotonic()
            call = watch(running, 0.2)
            times = []
            for _ in range(4):
                await call.read()
                times.append(time.monotonic() - began)
            call.cancel()
            assert times[3] >= 0.6
            assert (await once(running)).state == Stats.STATE_READY

    run(work)


@pytest.mark.parametrize(("seconds", "nanos"), [(0, 0), (0, 99_000_000), (3601, 0), (-1, 0), (0, -1)])
def test_an_interval_out_of_range_is_refused_with_the_range(tmp_path: Path, seconds: int, nanos: int) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            call = watch(running, interval=Duration(seconds=seconds, nanos=nanos))
            refusal = await refused(call.read())
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert refusal.metadata == {"field": "interval", "limit": "0.1..3600"}

    run(work)


def test_it_answers_while_loading_and_says_how_far(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, wait=False, hold_loading=True) as running:
            await running.channel.channel_ready()
            stats = await until(running, lambda stats: stats.detail)
            assert (stats.state, stats.load_fraction) == (Stats.STATE_LOADING, 0.5)
            assert "3.00 of 6.00 GiB" in stats.detail
            running.runtime.loading.set()
            await until_ready(running)
            assert (await once(running)).state == Stats.STATE_READY

    run(work)


def test_what_runs_and_waits_is_counted_and_listed(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB, max_rows=1, item_seconds=0.005)
        async with daemon(tmp_path, model) as running:
            calls = [running.inference.Generate(request([5], max_tokens=40)) for _ in range(2)]
            names = [(await first(call, "started")).started.name for call in calls]
            stats = await until(running, lambda stats: stats.decode_tokens_per_second > 0)
            assert (stats.running, stats.queued) == (1, 1)
            assert {generation.name for generation in stats.generations} == set(names)
            for call in calls:
                await rest(call)
            stats = await once(running)
            assert (stats.running, stats.queued, list(stats.generations)) == (0, 0, [])
            assert stats.expert_hits > 0
            assert stats.expert_hit_ratio == stats.expert_hits / (stats.expert_hits + stats.expert_loads)
            assert stats.expert_demand_bytes > 0
            assert stats.resident_bytes > 1 << 20
            assert stats.detail == running.server.status

    run(work)


ILL = Counters(
    backend="io_uring",
    degraded=True,
    last_error="layer 1 expert 2: too bad",
    read_bytes=7 << 20,
    reads=70,
    retries=3,
    errors=5,
    checksum_errors=4,
    mirror_reads=2,
    latency_p50_us=1500,
    latency_p99_us=9000,
    busy_us=2_500_000,
    cpu_us=250_000,
    mirror=True,
    note="no registered buffers",
)


def test_the_drives_are_shown_each_with_its_numbers_and_its_state(tmp_path: Path) -> None:
    mirror = Path("/a/mirror-001.colibri")
    broken = f"layer 0 expert 7: 5 bytes at offset 0 of the mirror of stripe 1 ({mirror}): CRC-32C is 1"
    drives = Drives(FILES, mirrors=[None, mirror])
    drives.update([Counters(direct=False), ILL])
    drives.found_bad(1, broken)

    async def work() -> None:
        async with daemon(tmp_path) as running:
            running.runtime.view = RuntimeView(
                drives=drives.views(),
                remarks=tuple(drives.remarks()),
                doing=("reading hot experts ahead",),
                planned_bytes=99,
                experts=16,
                expert_slots=4,
                warming=True,
                scrub_fraction=0.25,
                expert_read_bytes=1 << 40,
                lookahead=admin_pb2.Lookahead(state=admin_pb2.Lookahead.STATE_LOSING, predicted=4, right=3),
            )
            stats = await until(running, lambda stats: stats.state == Stats.STATE_DEGRADED)
            well, bad = stats.devices
            assert well == Device(path=str(FILES[0]), state=Device.STATE_OK, backend="threads")
            assert bad == Device(
                path=str(FILES[1]),
                stripe=1,
                state=Device.STATE_DEGRADED,
                last_error=ILL.last_error,
                backend="io_uring",
                direct=True,
                has_mirror=True,
                note=ILL.note,
                read_bytes=7 << 20,
                reads=70,
                retries=3,
                errors=5,
                checksum_errors=4,
                mirror_reads=2,
                latency_ms_p50=1.5,
                latency_ms_p99=9.0,
                busy_seconds=2.5,
                cpu_seconds=0.25,
                mirror_path=str(mirror),
                mirror_error=broken,
            )
            assert list(stats.degraded) == [
                "drive /b: layer 1 expert 2: too bad",
                f"drive /a (mirror of stripe 1): {broken}",
            ]
            assert (stats.planned_bytes, stats.experts, stats.expert_slots, stats.warming) == (99, 16, 4, True)
            assert (stats.scrub_fraction, stats.expert_read_bytes) == (0.25, 1 << 40)
            assert stats.lookahead == running.runtime.view.lookahead
            for words in ("reading hot experts ahead", "degraded: drive /b: layer 1 expert 2: too bad"):
                assert words in stats.detail
            running.runtime.view = RuntimeView()
            stats = await until(running, lambda stats: stats.state == Stats.STATE_READY)
            assert not stats.HasField("scrub_fraction")
            assert not stats.HasField("lookahead")

    run(work)


def test_expert_heat_is_sent_to_those_who_ask(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            running.runtime.heat = bytes([0, 255, 7])
            assert (await once(running)).expert_heat == b""
            assert (await once(running, expert_heat=True)).expert_heat == bytes([0, 255, 7])

    run(work)


def test_session_bytes_are_those_of_the_state_folder(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            await running.generate(tokens=list(range(100)), session=name)
            assert running.runtime._store is not None
            running.runtime._store.flush()
            stats = await once(running)
            logs = sum(path.stat().st_size for path in (tmp_path / "state").glob("sessions/*/*/*.*"))
            pages = sum(path.stat().st_size for path in (tmp_path / "state").glob("pages/*/*"))
            assert stats.session_bytes == logs + pages > pages > 0
            assert not stats.HasField("session_quota_bytes"), "none is configured"

    run(work)


def test_draining_ends_the_stream_behind_a_last_snapshot(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)
        async with daemon(tmp_path, model) as running:
            gate = blocked(model)
            call = running.inference.Generate(request([5]))
            await first(call, "started")
            watching = watch(running, 3600)
            assert (await watching.read()).state == Stats.STATE_READY
            quick = watch(running, 0.1)
            running.server.stop()
            async with asyncio.timeout(20):
                while (await quick.read()).state != Stats.STATE_DRAINING:
                    pass
            gate.set()
            for stream in (watching, quick):
                snapshots: Any = await rest(stream)
                assert snapshots[-1].state == Stats.STATE_DRAINING

    run(work)


def test_it_is_among_the_capabilities(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            info = await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            assert "AdminService.WatchStats" in info.capabilities

    run(work)


def test_a_reload_is_told_to_the_service_manager_and_its_failure_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colibri.daemon.errors import StorageUnavailableError

    async def work() -> None:
        async with daemon(tmp_path, wait=False, hold_loading=True) as running:
            sent: list[str] = []
            monkeypatch.setattr(running.server._notifier, "_send", lambda text, _=0.0: sent.append(text))
            running.server.reload()
            running.runtime.loading.set()
            await until_ready(running)
            assert running.runtime.reloads == 0
            running.runtime.reload_error = StorageUnavailableError("stripe 1 is gone")
            for reloads in (1, 2):
                running.server.reload()
                async with asyncio.timeout(10):
                    while running.runtime.reloads < reloads or running.server._reloading is None:
                        await asyncio.sleep(0.01)
                    await running.server._reloading
            said = [text.split("=")[0] for text in sent if text.startswith(("RELOADING=1\nMONOTONIC_USEC=", "READY"))]
            assert said == ["READY", "RELOADING", "READY", "RELOADING", "READY"]
            assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
                "reload: stripe 1 is gone"
            ] * 2

    run(work)
