"""What the log says of experts that fail: each one named, none of them a flood."""

from __future__ import annotations

import logging

import pytest

from colibri.core.errors import CorruptError, NonFiniteError, StorageError
from colibri.daemon.fault_log import MAX_KNOWN, FaultLog

BAD = "layer 3 expert 5: 4096 bytes at offset 8192 of stripe 1 (/drive/experts.clbr) fail their checksum"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    caplog.clear()
    return found


def test_a_failed_expert_is_an_error_with_all_that_the_core_says(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    FaultLog(60, clock).failed("generations/g", CorruptError(BAD))
    assert logged(caplog) == [f"generations/g failed: {BAD}"]


def test_each_expert_is_logged_once_a_period_with_what_was_held_back(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = FaultLog(60, clock)
    faults.failed("a", CorruptError(BAD))
    for _ in range(7):
        clock.now += 1
        faults.failed("b", StorageError("layer 3 expert 5: reading stripe 1 (/drive/x) at offset 9 failed: EIO"))
    faults.failed("c", CorruptError(BAD.replace("expert 5", "expert 51")))
    assert [line.split(":")[0] for line in logged(caplog)] == ["a failed", "c failed"]
    clock.now += 60
    faults.failed("d", CorruptError(BAD))
    assert logged(caplog) == [f"d failed: {BAD} (7 more since it was last logged)"]
    clock.now += 60
    faults.failed("e", CorruptError(BAD))
    assert logged(caplog) == [f"e failed: {BAD}"]


def test_other_failures_are_logged_by_their_text(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog(60, clock)
    for _ in range(2):
        faults.failed("a", NonFiniteError("logits of row 0"))
    faults.failed("a", RuntimeError("another"))
    assert logged(caplog) == ["a failed: logits of row 0", "a failed: another"]


def test_what_it_remembers_is_bounded(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog(60, clock)
    for number in range(MAX_KNOWN + 1):
        faults.failed("a", RuntimeError(f"number {number}"))
    logged(caplog)
    faults.failed("a", RuntimeError(f"number {MAX_KNOWN}"))
    faults.failed("a", RuntimeError("number 0"))
    assert logged(caplog) == ["a failed: number 0"]
