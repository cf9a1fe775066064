"""The care of drives over a real container: the scrub's pace, its position, its findings, and drives that heal."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from colibri.core.container import Container, open_container
from colibri.core.errors import StorageError
from colibri.daemon.drive_care import IDLE_SECONDS, PASS_SECONDS, POLL_SECONDS, RETRY_SECONDS, DriveCare
from colibri.daemon.drives import Drives
from colibri.daemon.scrub_file import SCRUB_FILE, ScrubFile
from testkit.damage import Extent, copy_of, extents
from testkit.drive_counters import Counters
from testkit.models import Tiny, packed

RATE = 1e6


@dataclass
class Scene:
    """A container with its drives, a clock that the test moves, and care that the test drives step by step."""

    folder: Path
    container: Container
    places: dict[tuple[int, int], list[Extent]]
    drives: Drives = field(init=False)
    time: float = 2e9
    busy: bool = False
    reopened: int = 0
    reopen_error: StorageError | None = None

    def __post_init__(self) -> None:
        self.drives = Drives(self.container.stripe_paths, lambda: self.time, self.container.mirror_paths)
        self.counters()

    def counters(self, **of_all: object) -> None:
        self.drives.update([Counters(**of_all) for _ in self.container.stripe_paths])  # type: ignore[arg-type]

    def care(self, rate: float = RATE) -> DriveCare:
        uuid = self.container.manifest.layout.uuid
        file = ScrubFile(self.folder, uuid, len(self.container.stripe_paths))
        clock = lambda: self.time  # noqa: E731
        return DriveCare(self.container, self.drives, file, rate, lambda: self.busy, self.reopen, clock, clock)

    def reopen(self) -> None:
        self.reopened += 1
        if self.reopen_error is not None:
            raise self.reopen_error

    @property
    def total_bytes(self) -> int:
        return sum(extent.bytes for record in self.places.values() for extent in record)

    def pass_over(self, care: DriveCare) -> float:
        """Runs a pass to its end; how long it took by the clock."""
        self.time += IDLE_SECONDS + PASS_SECONDS
        began = self.time
        self.time += care.once()
        assert care.fraction is not None
        while care.fraction is not None:
            self.time += care.once()
        return self.time - began


@pytest.fixture
def scene(tiny: Tiny, tmp_path: Path) -> Scene:
    copy = copy_of(tiny, tmp_path / "drives")
    container = open_container(copy.folders[0], copy.folders[1:])
    return Scene(tmp_path, container, extents(copy))


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_pass_reads_everything_at_the_rate_and_the_next_comes_a_week_later(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    care = scene.care()
    took = scene.pass_over(care)
    assert took == pytest.approx(scene.total_bytes / RATE, abs=2 * POLL_SECONDS)
    assert "0 extents are bad" in caplog.text
    assert scene.drives.remarks() == []
    scene.time += PASS_SECONDS - took - 100
    assert care.once() == POLL_SECONDS
    assert care.fraction is None
    scene.time += 200
    care.once()
    assert care.fraction is not None


def test_it_waits_for_idleness_and_pauses_as_soon_as_something_runs(scene: Scene) -> None:
    care = scene.care()
    scene.time += IDLE_SECONDS - 1
    care.once()
    assert care.fraction is None
    scene.time += 2
    care.once()
    before = care.fraction
    assert before is not None
    assert before > 0
    scene.busy = True
    for _ in range(5):
        assert care.once() == POLL_SECONDS
        scene.time += POLL_SECONDS
    assert care.fraction == before
    scene.busy = False
    care.once()
    assert care.fraction == before, "busy a moment ago"
    scene.time += IDLE_SECONDS + 1
    care.once()
    assert care.fraction is not None
    assert care.fraction > before


def test_off_is_off(scene: Scene) -> None:
    care = scene.care(rate=0)
    for _ in range(20):
        scene.time += PASS_SECONDS
        assert care.once() == POLL_SECONDS
    assert care.fraction is None
    assert not (scene.folder / SCRUB_FILE).exists()


def test_a_restart_goes_on_where_it_was(scene: Scene) -> None:
    care = scene.care()
    scene.time += IDLE_SECONDS
    for _ in range(5):
        scene.time += care.once()
    reached = care.fraction
    assert reached is not None
    assert 0 < reached < 1
    care._save()
    again = scene.care()
    scene.time += IDLE_SECONDS
    again.once()
    assert again.fraction is not None
    assert again.fraction > reached
    again.once()
    while again.fraction is not None:
        scene.time += again.once()


def test_what_it_finds_degrades_the_drive_and_outlives_a_restart_until_it_is_repaired(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    (layer, expert), record = list(scene.places.items())[-3]
    bad = record[-1]
    bad.flip()
    care = scene.care()
    scene.pass_over(care)
    (remark,) = scene.drives.remarks()
    for words in (f"layer {layer} expert {expert}: ", f"at offset {bad.offset} of stripe", str(bad.path), "CRC-32C"):
        assert words in remark
    (line,) = [r for r in caplog.records if r.getMessage().startswith("scrub: layer")]
    assert vars(line)["COLIBRI_OFFSET"] == str(bad.offset)
    assert vars(line)["COLIBRI_FILE"] == str(bad.path)
    care._save()

    scene.drives = Drives(scene.container.stripe_paths)
    scene.counters()
    again = scene.care(rate=0)
    again.start()
    try:
        assert scene.drives.remarks() == [remark]
        time.sleep(0.1)
        assert scene.drives.remarks() == [remark], "read again, and still bad"
        bad.flip()
        scene.time += RETRY_SECONDS
        until = time.monotonic() + 20
        while scene.drives.remarks():
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        again.close()
    assert scene.reopened == 1
    assert json.loads((scene.folder / SCRUB_FILE).read_text())["bad"] == []


def test_a_degraded_drive_is_tried_every_minute_and_reopened_only_once_its_place_is_good(scene: Scene) -> None:
    (layer, expert), record = next(iter(scene.places.items()))
    bad = record[0]
    stripe = scene.container.stripe_paths.index(bad.path)
    text = (
        f"layer {layer} expert {expert}: {bad.bytes} bytes at offset {bad.offset} of stripe {stripe} ({bad.path}) fail"
    )
    bad.flip()
    ill = [Counters() for _ in scene.container.stripe_paths]
    ill[stripe] = Counters(degraded=True, last_error=text)
    scene.drives.update(ill)
    care = scene.care(rate=0)
    for _ in range(3):
        care.once()
        scene.time += RETRY_SECONDS
    assert scene.reopened == 0
    bad.flip()
    care.once()
    assert scene.reopened == 1
    scene.counters()
    assert scene.drives.remarks() == []
    scene.time += RETRY_SECONDS
    care.once()
    assert scene.reopened == 1, "nothing is left to try"


def test_a_reload_tries_at_once(scene: Scene) -> None:
    scene.drives.found_bad(0, "something without a place")
    care = scene.care(rate=0)
    care.once()
    assert scene.reopened == 1
    scene.drives.found_bad(0, "something without a place")
    care.once()
    assert scene.reopened == 1
    care.retry_now()
    care.once()
    assert scene.reopened == 2


def test_a_stripe_that_cannot_be_reopened_is_a_warning(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.reopen_error = StorageError("stripe 1: open failed")
    scene.drives.found_bad(0, "something without a place")
    scene.care(rate=0).once()
    assert messages(caplog, logging.WARNING) == ["a stripe cannot be opened again: stripe 1: open failed"]


def test_a_dead_drive_does_not_flood_the_journal(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for record in scene.places.values():
        record[0].flip()
    care = scene.care()
    scene.pass_over(care)
    errors = messages(caplog, logging.ERROR)
    assert len([line for line in errors if line.startswith("scrub: ")]) == 16
    assert len([line for line in errors if "is degraded" in line]) == len({r[0].path for r in scene.places.values()})


@pytest.mark.parametrize("spoil", ["[", "{}", '{"version": 9}', "other layout", "no such stripe"])
def test_a_position_that_is_not_this_layout_s_is_told_and_a_new_beginning(
    scene: Scene, caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    care = scene.care()
    scene.pass_over(care)
    path = scene.folder / SCRUB_FILE
    good = json.loads(path.read_text())
    if spoil == "other layout":
        spoil = json.dumps(good | {"layout": "0" * 32})
    elif spoil == "no such stripe":
        spoil = json.dumps(good | {"bad": [[7, "x"]]})
    path.write_text(spoil)
    caplog.set_level(logging.INFO)
    again = scene.care()
    assert len([line for line in messages(caplog, logging.INFO) if "scrubbing begins anew" in line]) == 1
    assert messages(caplog, logging.WARNING) == []
    scene.time += IDLE_SECONDS
    again.once()
    assert again.fraction is not None


def test_a_thread_that_fails_says_so(scene: Scene) -> None:
    care = scene.care()

    def broken() -> bool:
        raise RuntimeError("who knows")

    care._busy = broken
    care.start()
    care._thread.join(10)
    assert "who knows" in care.failure
    care.close()
    assert all(thread.name != "drives" for thread in threading.enumerate())


@pytest.fixture
def mirrored(tiny: Tiny, tmp_path: Path) -> Scene:
    copy = packed(tiny.checkpoint, tmp_path / "mirrored", "all=f32", [1, 1], mirror=True)
    return Scene(tmp_path, open_container(copy.folders[0], copy.folders[1:]), extents(copy))


def test_a_finding_in_a_mirror_degrades_the_mirror_and_not_the_stripe_beside_which_it_was_found(
    mirrored: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    (layer, expert), record = next(iter(mirrored.places.items()))
    stripe = mirrored.container.stripe_paths.index(record[0].path)
    path = mirrored.container.mirror_paths[stripe]
    assert path is not None
    bad = Extent(path, record[0].offset, record[0].bytes)
    bad.flip()
    care = mirrored.care()
    mirrored.pass_over(care)
    (remark,) = mirrored.drives.remarks()
    place = f"layer {layer} expert {expert}: {bad.bytes} bytes at offset {bad.offset}"
    assert remark.startswith(
        f"drive {path.parent} (mirror of stripe {stripe}): {place} of the mirror of stripe {stripe} ({path}): CRC-32C"
    )
    assert [view.degraded for view in mirrored.drives.views()] == ["", ""]
    (line,) = [r for r in caplog.records if r.getMessage().startswith("scrub: layer")]
    assert (vars(line)["COLIBRI_FILE"], vars(line)["COLIBRI_DRIVE"]) == (str(path), str(path.parent))

    care._save()
    mirrored.drives = Drives(mirrored.container.stripe_paths, mirrors=mirrored.container.mirror_paths)
    mirrored.counters()
    again = mirrored.care(rate=0)
    for number, text in again._state.bad:
        mirrored.drives.found_bad(number, text)
    assert mirrored.drives.remarks() == [remark], "it outlives a restart"
    again.once()
    assert mirrored.drives.remarks() == [remark], "read again, and still bad"
    bad.flip()
    again.retry_now()
    again.once()
    assert mirrored.drives.remarks() == []


def test_a_bad_mirror_does_not_keep_its_healed_stripe_degraded(mirrored: Scene) -> None:
    record = next(iter(mirrored.places.values()))
    stripe = mirrored.container.stripe_paths.index(record[0].path)
    path = mirrored.container.mirror_paths[stripe]
    assert path is not None
    both = record[0], Extent(path, record[0].offset, record[0].bytes)
    for copy in both:
        copy.flip()
    care = mirrored.care()
    mirrored.pass_over(care)
    assert len(mirrored.drives.remarks()) == 2
    both[0].flip()
    care.retry_now()
    care.once()
    (remark,) = mirrored.drives.remarks()
    assert f"(mirror of stripe {stripe})" in remark
