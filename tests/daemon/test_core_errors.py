"""What the core's errors become: the reason, the code and the place that a caller learns."""

from __future__ import annotations

import pytest

from colibri.core.errors import CorruptError, NonFiniteError, StorageError
from colibri.daemon import errors
from colibri.daemon.core_errors import daemon_error, fault_place

FILE = "/drives (fast): at offset 7/a/stripe-001.colibri"
READ = f"layer 3 expert 5: reading stripe 1 ({FILE}) at offset 8192 failed: Input/output error (errno 5)"
CHECKSUM = f"layer 3 expert 5: 4096 bytes at offset 8192 of stripe 1 ({FILE}) fail their checksum"
ENDS = f"layer 3 expert 5: stripe 1 ({FILE}) ends at offset 8192, inside an extent of 4096 bytes at 4096"
PLACE = {
    "layer": "3",
    "expert": "5",
    "stripe": "1",
    "drive": "/drives (fast): at offset 7/a",
    "file": FILE,
    "offset": "8192",
}


@pytest.mark.parametrize(
    ("error", "reason", "more"),
    [
        (CorruptError(CHECKSUM), "EXPERT_CHECKSUM", {}),
        (CorruptError(ENDS), "EXPERT_UNREADABLE", {}),
        (StorageError(READ), "EXPERT_UNREADABLE", {"errno": "5"}),
    ],
)
def test_an_expert_that_is_lost_is_data_loss_with_its_place(
    error: Exception, reason: str, more: dict[str, str]
) -> None:
    made = daemon_error(error)
    assert (made.reason, made.code, made.retry_seconds) == (reason, "DATA_LOSS", None)
    assert made.message == str(error)
    assert made.metadata == PLACE | more


def test_an_error_that_is_written_down_comes_back_as_what_it_was() -> None:
    made = daemon_error(StorageError(READ))
    again = errors.error_of_reason(made.reason, made.message, made.metadata)
    assert (type(again), again.message, again.metadata) == (type(made), made.message, made.metadata)


def test_a_drive_s_error_without_an_expert_may_be_tried_again() -> None:
    made = daemon_error(StorageError("opening failed"))
    assert (made.reason, made.code) == ("STORAGE_UNAVAILABLE", "UNAVAILABLE")


def test_all_else_is_the_engine_s_fault_and_a_daemon_error_stays_itself() -> None:
    assert daemon_error(NonFiniteError("logits of row 0")).reason == "ENGINE_FAILED"
    itself = errors.QueueFullError("full")
    assert daemon_error(itself) is itself


def test_a_text_that_names_nothing_gives_no_place() -> None:
    place = fault_place("the unknown")
    assert place.metadata() == {}
    assert place.drive is None
