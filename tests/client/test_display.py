"""What `colibri status` says of work, memory and drives."""

from __future__ import annotations

import pytest

from colibri.client.display import status_lines
from colibri.client.plain import plain
from colibri.v1 import admin_service_pb2

Device = admin_service_pb2.Device
Lookahead = admin_service_pb2.Lookahead
INFO = admin_service_pb2.GetServerInfoResponse(version="1.2.3", model="tiny")


def lines(stats: admin_service_pb2.Stats | None, **changes: object) -> dict[str, str]:
    info = admin_service_pb2.GetServerInfoResponse()
    info.CopyFrom(INFO)
    info.MergeFrom(admin_service_pb2.GetServerInfoResponse(**changes))  # type: ignore[arg-type]
    shown = status_lines("unix:/d.sock", "serving", info, stats)
    return {name: text.strip() for name, text in (line.split(":", 1) for line in shown.splitlines())}


def test_work_memory_and_experts() -> None:
    busy = admin_service_pb2.Stats(
        running=1,
        queued=2,
        decode_tokens_per_second=3.25,
        resident_bytes=3 << 30,
        planned_bytes=4 << 30,
        experts=256,
        expert_slots=32,
        expert_hits=3,
        expert_loads=1,
        expert_hit_ratio=0.75,
        session_bytes=5 << 20,
    )
    shown = lines(busy)
    assert shown["work"] == "1 running, 2 queued, 3.2 tok/s"
    assert shown["memory"] == "3.0 GiB in use, 4.0 GiB planned"
    assert shown["experts"] == "32 of 256 in memory, 75.0% of 4 uses found there"
    assert shown["sessions"] == "5.0 MiB on disk"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (Lookahead.STATE_OFF, "off"),
        (Lookahead.STATE_ON, "on"),
        (Lookahead.STATE_TRYING, "auto, being tried"),
        (Lookahead.STATE_WINNING, "auto, on since it won its last trial"),
        (Lookahead.STATE_LOSING, "auto, off since it did not win its last trial"),
    ],
)
def test_lookahead_is_told_with_its_switch_and_with_what_came_of_it(
    state: admin_service_pb2.Lookahead.State, words: str
) -> None:
    idle = admin_service_pb2.Stats(experts=8, expert_slots=4, lookahead=Lookahead(state=state))
    assert lines(idle)["lookahead"] == words
    used = Lookahead(state=state, predicted=8, right=6, read_bytes=5 << 20, wasted_bytes=1 << 20, saved_seconds=2.5)
    busy = admin_service_pb2.Stats(experts=8, expert_slots=4, lookahead=used)
    assert lines(busy)["lookahead"] == (
        f"{words}; 75.0% of 8 guesses right, 5.0 MiB read ahead, 1.0 MiB of them wasted, about 2.5 s of waiting saved"
    )
    assert plain(busy)["lookahead"]["state"] == Lookahead.State.Name(state)


def test_what_was_read_of_experts_is_told_whole_and_on_whose_behalf() -> None:
    stats = admin_service_pb2.Stats(expert_read_bytes=10 << 20, expert_demand_bytes=7 << 20)
    stats.lookahead.read_bytes = 2 << 20
    assert lines(stats)["expert reads"] == (
        "10.0 MiB: 7.0 MiB on demand, 2.0 MiB by lookahead, 1.0 MiB by warm-up and otherwise ahead"
    )
    stats.expert_read_bytes = 8 << 20  # some reads of lookahead are still under way
    assert lines(stats)["expert reads"] == "8.0 MiB: 7.0 MiB on demand, 2.0 MiB by lookahead"
    assert "expert reads" not in lines(admin_service_pb2.Stats())


def test_lookahead_is_not_told_where_nothing_is_to_be_read_or_by_an_older_daemon() -> None:
    resident = admin_service_pb2.Stats(experts=8, expert_slots=8, lookahead=Lookahead(state=Lookahead.STATE_TRYING))
    assert "lookahead" not in lines(resident)
    assert "lookahead" not in lines(admin_service_pb2.Stats(experts=8, expert_slots=4))


def test_every_drive_has_a_line_with_how_it_reads_and_what_is_wrong() -> None:
    well = Device(path="/a/stripe-000.colibri", backend="io_uring", direct=True, reads=7, read_bytes=5 << 20)
    well.state, well.read_mib_per_second, well.latency_ms_p99 = Device.STATE_OK, 300.0, 4.25
    bad = Device(path="/b/stripe-001.colibri", stripe=1, backend="threads", errors=2, mirror_reads=1)
    bad.state, bad.has_mirror = Device.STATE_DEGRADED, True
    bad.last_error, bad.note = "layer 1 expert 2: \x1b[31mtoo bad", "io_uring is refused"
    shown = lines(admin_service_pb2.Stats(devices=[well, bad]))
    assert shown["drive 0"] == "/a/stripe-000.colibri: ok, io_uring, O_DIRECT; 5.0 MiB read, 300.0 MiB/s, p99 4.2 ms"
    assert shown["drive 1"] == (
        "/b/stripe-001.colibri: degraded, threads, page cache, mirrored; 0 B read, 0.0 MiB/s, 2 errors, "
        "1 mirror reads; io_uring is refused; layer 1 expert 2: \\x1b[31mtoo bad"
    )


def test_a_bad_mirror_is_told_as_the_mirror_s() -> None:
    device = Device(
        path="/a/stripe-000.colibri", backend="threads", direct=True, has_mirror=True, state=Device.STATE_OK
    )
    device.mirror_path, device.mirror_error = "/b/mirror-000.colibri", "layer 1 expert 2: too bad"
    assert lines(admin_service_pb2.Stats(devices=[device]))["drive 0"] == (
        "/a/stripe-000.colibri: ok, threads, O_DIRECT, mirrored; 0 B read, 0.0 MiB/s; its mirror /b/mirror-000.colibri "
        "is degraded: layer 1 expert 2: too bad"
    )


def test_a_degraded_daemon_says_so_beside_its_state_and_in_full() -> None:
    shown = lines(None, degraded=["drive /b: too bad"])
    assert (shown["state"], shown["degraded"]) == ("serving, degraded", "drive /b: too bad")
    assert lines(None)["state"] == "serving"
    assert "work" not in lines(None), "an older daemon has no statistics"
