"""What AdminService says about the drives of a running daemon, and the reload that follows a repair."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from google.protobuf import duration_pb2

from colibri.v1 import admin_service_pb2 as admin_pb2
from testkit.process import Process

SOON = 20.0
LAST = 1  # the stripe that a test damages: it lies on the loop device
Device = admin_pb2.Device


def stats_of(process: Process) -> admin_pb2.Stats:
    """One snapshot."""
    watching = process.admin.WatchStats(admin_pb2.WatchStatsRequest())
    try:
        snapshot: admin_pb2.Stats = next(iter(watching))
    finally:
        watching.cancel()
    return snapshot


def until(process: Process, wanted: Callable[[admin_pb2.Stats], bool]) -> admin_pb2.Stats:
    """The first snapshot that is as wanted; fails after some seconds."""
    interval = duration_pb2.Duration(nanos=100_000_000)
    watching = process.admin.WatchStats(admin_pb2.WatchStatsRequest(interval=interval))
    end = time.monotonic() + SOON
    try:
        for snapshot in watching:
            if wanted(snapshot):
                return snapshot  # type: ignore[no-any-return]
            assert time.monotonic() < end, snapshot
    finally:
        watching.cancel()
    raise AssertionError("the daemon ended the stream")


def device(stats: admin_pb2.Stats, stripe: int = LAST) -> admin_pb2.Device:
    (found,) = [device for device in stats.devices if device.stripe == stripe]
    return found


def is_degraded(stats: admin_pb2.Stats) -> bool:
    return bool(device(stats).state == Device.STATE_DEGRADED and stats.state == admin_pb2.Stats.STATE_DEGRADED)


def is_well(stats: admin_pb2.Stats) -> bool:
    return bool(device(stats).state == Device.STATE_OK and stats.state == admin_pb2.Stats.STATE_READY)


def reload(process: Process) -> None:
    """What `systemctl reload` does; waits until it is done."""
    before = process.log.read_text().count("reload: ")
    process.popen.send_signal(signal.SIGHUP)
    end = time.monotonic() + SOON
    while process.log.read_text().count("reload: ") == before:
        assert time.monotonic() < end, process.log.read_text()
        time.sleep(0.05)
