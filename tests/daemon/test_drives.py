"""The state of drives: degraded and healed once each in the journal, speeds, known bad places."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from colibri.daemon.drives import MAX_PLACES, Drives
from testkit.drive_counters import Counters

FILES = [Path("/a/stripe-000.colibri"), Path("/b/stripe-001.colibri")]


def bad(expert: int = 5, offset: int = 8192) -> str:
    return f"layer 3 expert {expert}: 4096 bytes at offset {offset} of stripe 1 ({FILES[1]}) fail their checksum"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    found = list(caplog.records)
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_before_the_core_is_looked_at_there_is_nothing_to_see() -> None:
    drives = Drives(FILES)
    assert drives.views() == []
    assert drives.remarks() == []


def test_speed_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    drives = Drives(FILES, clock)
    for second in range(20):
        clock.now = 100.0 + second
        drives.update([Counters(read_bytes=second * 1000), Counters(read_bytes=min(second, 10) * 1000)])
    assert [view.bytes_per_second for view in drives.views()] == [1000.0, 0.0]
    assert [str(view) for view in drives.views()][1] == "stripe 1 (/b/stripe-001.colibri)"


def test_a_degraded_drive_is_one_error_line_however_often_it_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    drives = Drives(FILES)
    for errors in range(1, 50):
        worse = Counters(degraded=True, errors=errors, last_error=bad(expert=errors))
        drives.update([Counters(), worse])
    (line,) = lines(caplog)
    assert (line.levelname, line.getMessage()) == ("ERROR", f"drive /b is degraded: {bad(expert=1)}")
    fields = {key: value for key, value in vars(line).items() if key.startswith("COLIBRI_")}
    assert fields == {
        "COLIBRI_EVENT": "drive-degraded",
        "COLIBRI_STRIPE": "1",
        "COLIBRI_DRIVE": "/b",
        "COLIBRI_FILE": str(FILES[1]),
        "COLIBRI_OFFSET": "8192",
        "COLIBRI_LAYER": "3",
        "COLIBRI_EXPERT": "1",
    }
    assert drives.remarks() == [f"drive /b: {bad(expert=49)} (and 48 more places)"]
    assert [view.degraded for view in drives.views()] == ["", f"{bad(expert=49)} (and 48 more places)"]


def test_a_drive_heals_when_its_places_are_good_and_the_core_has_reopened_it(caplog: pytest.LogCaptureFixture) -> None:
    drives = Drives(FILES)
    drives.update([Counters(), Counters(degraded=True, last_error=bad())])
    lines(caplog)
    assert drives.bad_places() == [(1, bad(), False)]
    drives.healed(1)
    assert lines(caplog) == []
    assert drives.remarks(), "the core still says so"
    drives.update([Counters(), Counters(degraded=False)])
    (line,) = lines(caplog)
    assert (line.levelname, line.getMessage()) == ("INFO", "drive /b is well again")
    assert vars(line)["COLIBRI_EVENT"] == "drive-healed"
    assert drives.remarks() == []


def test_a_reopened_drive_stays_degraded_while_a_place_is_known_to_be_bad() -> None:
    drives = Drives(FILES)
    drives.update([Counters(), Counters(degraded=True, last_error=bad())])
    drives.update([Counters(), Counters()])
    assert drives.remarks() == [f"drive /b: {bad()}"]


def test_what_a_scrub_finds_degrades_a_drive_too(caplog: pytest.LogCaptureFixture) -> None:
    drives = Drives(FILES)
    drives.found_bad(1, bad(expert=1))
    drives.found_bad(1, bad(expert=2))
    drives.found_bad(1, bad(expert=2))
    assert len(lines(caplog)) == 1
    assert drives.remarks() == [f"drive /b: {bad(expert=1)} (and 1 more place)"]
    drives.update([Counters(), Counters()])
    drives.healed(1)
    assert drives.remarks() == []
    assert drives.bad_places() == []


def test_the_newest_error_of_the_core_is_named_with_the_number_of_the_others() -> None:
    drives = Drives(FILES)
    for expert in range(3):
        drives.update([Counters(), Counters(degraded=True, last_error=bad(expert=expert), errors=expert + 1)])
    assert drives.remarks() == [f"drive /b: {bad(expert=2)} (and 2 more places)"]
    assert drives.views()[1].degraded == f"{bad(expert=2)} (and 2 more places)"


def test_the_places_that_are_remembered_are_bounded() -> None:
    drives = Drives(FILES)
    for expert in range(MAX_PLACES + 7):
        drives.found_bad(1, bad(expert=expert))
    assert len(drives.bad_places()) == MAX_PLACES
    assert drives.remarks()[0].endswith(f"(and {MAX_PLACES + 6} more places)")


def test_an_error_without_a_place_names_the_drive_s_own_file(caplog: pytest.LogCaptureFixture) -> None:
    drives = Drives(FILES)
    drives.update([Counters(degraded=True), Counters()])
    (line,) = lines(caplog)
    assert (vars(line)["COLIBRI_FILE"], vars(line)["COLIBRI_DRIVE"]) == (str(FILES[0]), "/a")


# ---- a mirror's own state --------------------------------------------------------------------------------------------

MIRRORS = [Path("/b/mirror-000.colibri"), Path("/a/mirror-001.colibri")]


def bad_mirror(expert: int = 5) -> str:
    return f"layer 3 expert {expert}: 4096 bytes at offset 8192 of the mirror of stripe 1 ({MIRRORS[1]}): CRC-32C is 1"


def test_a_bad_mirror_is_named_and_its_stripe_s_drive_stays_well(caplog: pytest.LogCaptureFixture) -> None:
    drives = Drives(FILES, mirrors=MIRRORS)
    drives.update([Counters(mirror=True), Counters(mirror=True)])
    drives.found_bad(1, bad_mirror())
    (line,) = lines(caplog)
    assert line.getMessage() == f"drive /a (mirror of stripe 1) is degraded: {bad_mirror()}"
    assert (vars(line)["COLIBRI_FILE"], vars(line)["COLIBRI_DRIVE"]) == (str(MIRRORS[1]), "/a")
    assert [(view.degraded, view.mirror, view.mirror_degraded) for view in drives.views()] == [
        ("", MIRRORS[0], ""),
        ("", MIRRORS[1], bad_mirror()),
    ]
    assert drives.remarks() == [f"drive /a (mirror of stripe 1): {bad_mirror()}"]
    drives.healed(1, mirror=True)
    assert drives.remarks() == []
    (line,) = lines(caplog)
    assert line.getMessage() == "drive /a (mirror of stripe 1) is well again"
    assert (vars(line)["COLIBRI_FILE"], vars(line)["COLIBRI_EVENT"]) == (str(MIRRORS[1]), "drive-healed")


def test_the_same_place_of_both_copies_is_two_places_that_heal_each_for_itself() -> None:
    drives = Drives(FILES, mirrors=MIRRORS)
    drives.found_bad(1, bad())
    drives.found_bad(1, bad_mirror())
    assert drives.bad_places() == [(1, bad(), False), (1, bad_mirror(), True)]
    drives.healed(1)
    assert drives.bad_places() == [(1, bad_mirror(), True)]
    drives.healed(1, mirror=True)
    assert drives.bad_places() == []


# ---- what the core says late, or again -------------------------------------------------------------------------------


def test_counters_from_before_a_healing_bring_nothing_back() -> None:
    drives = Drives(FILES)
    ill = Counters(degraded=True, checksum_errors=2, last_error=bad())
    drives.update([Counters(), ill])
    drives.healed(1)
    drives.update([Counters(), ill])  # taken before the stripe was opened anew
    drives.update([Counters(), Counters(checksum_errors=2)])
    assert drives.remarks() == []
    assert drives.bad_places() == []


def test_a_place_that_goes_bad_again_after_a_healing_is_noted_again() -> None:
    drives = Drives(FILES)
    drives.update([Counters(), Counters(degraded=True, checksum_errors=2, last_error=bad())])
    drives.healed(1)
    drives.update([Counters(), Counters(checksum_errors=2)])
    drives.update([Counters(), Counters(degraded=True, checksum_errors=4, last_error=bad())])
    drives.update([Counters(), Counters(checksum_errors=4)])
    assert drives.bad_places() == [(1, bad(), False)]


def test_a_stripe_that_the_core_goes_on_to_distrust_is_still_to_be_tried() -> None:
    drives = Drives(FILES)
    ill = Counters(degraded=True, checksum_errors=2, last_error=bad())
    drives.update([Counters(), ill])
    drives.healed(1)
    drives.update([Counters(), ill])  # it could not be opened anew
    assert drives.remarks() == [f"drive /b: {bad()}"]
    assert drives.bad_places() == [(1, bad(), False)]


def test_an_error_beyond_the_remembered_places_is_counted_once_however_often_it_is_looked_at() -> None:
    drives = Drives(FILES)
    for expert in range(MAX_PLACES):
        drives.found_bad(1, bad(expert=expert))
    for _ in range(5):
        drives.update([Counters(), Counters(degraded=True, errors=1, last_error=bad(expert=MAX_PLACES))])
    drives.update([Counters(), Counters(errors=1)])
    assert drives.remarks()[0].endswith(f"(and {MAX_PLACES} more places)")
