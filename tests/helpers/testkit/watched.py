"""What AdminService says about the drives of a running daemon."""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf import duration_pb2

from colibri.v1 import admin_service_pb2 as admin_pb2
from testkit.process import Process

SOON = 20.0


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
