"""Weights: given, those of the pack that is gone on with, measured where that makes sense, or equal."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from colibri.packer import cli, weights
from colibri.packer.arguments import Drive
from colibri.packer.bandwidth import FILE_BYTES, DriveRate, measure, weights_of
from colibri.packer.disk import Disk, DriveError
from colibri.packer.errors import FolderError
from colibri.packer.weights import choose_weights
from testkit.checkpoints import write_tq
from testkit.faulty_disk import PowerCut, PowerCutDisk
from testkit.packing import move_folder, pack_folder

MB = 1_000_000


def rates(*together: float) -> list[DriveRate]:
    return [DriveRate(Path(f"/drive{number}"), rate, rate) for number, rate in enumerate(together)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


@pytest.fixture
def two_drives(tmp_path: Path) -> Iterator[list[Path]]:
    """Folders on two file systems; only root can mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(folders[1])], check=True)
    try:
        yield folders
    finally:
        subprocess.run(["umount", "-l", str(folders[1])], check=True)  # a pack that was cut off holds its files open


# ---- what rates become ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((3000.0,), [100]),
        ((3000.0, 2940.0, 3060.0), [100, 100, 100]),
        ((300.0, 200.0, 100.0), [100, 68, 32]),
        ((5.0, 5000.0), [1, 100]),
    ],
)
def test_weights_are_in_proportion_and_rounded(measured: tuple[float, ...], expected: list[int]) -> None:
    assert weights_of(rates(*measured)) == expected


def test_rounding_costs_little_of_what_the_drives_could_read() -> None:
    """Whatever the rates, the drives finish within 10 % of the time that exact shares would take."""
    for first in range(100, 1000, 7):
        for second in (1000, 613, 250):
            measured = (1000.0, float(first), float(second))
            chosen = weights_of(rates(*measured))
            seconds = max(weight / sum(chosen) / rate for weight, rate in zip(chosen, measured, strict=True))
            assert 1 / sum(measured) / seconds > 0.9


def test_small_differences_between_two_measurements_change_nothing() -> None:
    for noise in (0.97, 1.0, 1.03):
        assert weights_of(rates(1000.0, 1000.0 * noise, 752.0 * noise)) == [100, 100, 75]


# ---- measuring -----------------------------------------------------------------------------------------------------


class FakeDrives:
    """Two drives of given rates, which halve while both are read if they share a bus; notes what was asked."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._rates: dict[tuple[int, int], float] = {}
        self.asked: list[int] = []
        self.sizes: set[int] = set()

    def __call__(self, path: str, request_bytes: int, size_bytes: int) -> float:
        status = os.stat(path)
        assert status.st_nlink == 0, "the file has no name while it is measured"
        assert 0 < request_bytes <= size_bytes <= status.st_size
        assert size_bytes % 4096 == 0
        file = (status.st_dev, status.st_ino)
        if file not in self._rates:
            self._rates[file] = 100.0 * MB if self._rates else 400.0 * MB
        rate = self._rates[file]
        self.asked.append(status.st_dev)
        self.sizes.add(status.st_size)
        busy = threading.current_thread().name.startswith("probe")
        return rate / 2 if busy and self._shared and rate > 200 * MB else rate


@pytest.mark.parametrize(("shared", "expected"), [(False, [100, 24]), (True, [100, 51])])
def test_drives_take_turns_and_then_read_at_once(two_drives: list[Path], shared: bool, expected: list[int]) -> None:
    probe = FakeDrives(shared)
    found = measure(two_drives, probe=probe)
    assert [rate.alone for rate in found] == [400.0 * MB, 100.0 * MB]
    assert weights_of(found) == expected
    here, there = (folder.stat().st_dev for folder in two_drives)
    assert probe.asked[:8] == [here, there] * 4
    assert sorted(probe.asked[8:]) == sorted([here, there] * 3)
    assert max(probe.sizes) == FILE_BYTES
    assert min(probe.sizes) <= 12 << 20  # a quarter of what is free on the small one
    assert [list(folder.iterdir()) for folder in two_drives] == [[], []]


def test_folders_on_one_file_system_share_its_rate(two_drives: list[Path]) -> None:
    (two_drives[0] / "x").mkdir()
    (two_drives[0] / "y").mkdir()
    found = measure([two_drives[0] / "x", two_drives[1], two_drives[0] / "y"], probe=FakeDrives(False))
    assert [rate.together for rate in found] == [200.0 * MB, 100.0 * MB, 200.0 * MB]
    assert weights_of(found) == [100, 51, 100]


def test_the_engine_s_own_reader_measures_real_drives(two_drives: list[Path]) -> None:
    found = measure(two_drives)
    assert all(rate.alone > MB and rate.together > MB for rate in found)
    assert [list(folder.iterdir()) for folder in two_drives] == [[], []]


def test_nothing_is_left_behind_when_measuring_fails(two_drives: list[Path]) -> None:
    def failing(path: str, request_bytes: int, size_bytes: int) -> float:  # noqa: ARG001
        raise OSError(5, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DriveError, match=rf"measuring the drive of {two_drives[0]}: Input/output error"):
        measure(two_drives, probe=failing)
    assert [list(folder.iterdir()) for folder in two_drives] == [[], []]
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_left_behind_by_a_kill(two_drives: list[Path]) -> None:
    def killing(path: str, request_bytes: int, size_bytes: int) -> float:  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    pid = os.fork()
    if pid == 0:
        measure(two_drives, probe=killing)
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert [list(folder.iterdir()) for folder in two_drives] == [[], []]


def test_a_drive_without_room_is_named(two_drives: list[Path]) -> None:
    class Full(Disk):
        def free_bytes(self, folder: Path) -> int:
            return 0 if folder == two_drives[1] else super().free_bytes(folder)

    with pytest.raises(DriveError, match=f"{two_drives[1]}: too little room to measure"):
        measure(two_drives, disk=Full(), probe=FakeDrives(False))


# ---- when they are measured ----------------------------------------------------------------------------------------


def never(folders: Sequence[Path]) -> list[DriveRate]:
    raise AssertionError(f"{folders} must not be measured")


def fixed(*together: float) -> weights.Measure:
    def measured(folders: Sequence[Path]) -> list[DriveRate]:
        return [DriveRate(folder, rate, rate) for folder, rate in zip(folders, together, strict=True)]

    return measured


def test_given_weights_are_taken_and_the_rest_are_1(tmp_path: Path) -> None:
    drives = [Drive(tmp_path), Drive(tmp_path, 7)]
    assert choose_weights(drives, never).values == [1, 7]


def test_one_file_system_gives_equal_weights(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert choose_weights([Drive(tmp_path), Drive(tmp_path / "b")], never).values == [1, 1]
    assert choose_weights([Drive(tmp_path)], never).values == [1]


def test_several_file_systems_are_measured(two_drives: list[Path]) -> None:
    chosen = choose_weights([Drive(folder) for folder in two_drives], fixed(500.0, 250.0))
    assert chosen.values == [100, 51]
    assert chosen.notes() == [
        f"{two_drives[0]}: 500 B/s alone, 500 B/s with all drives reading: weight 100",
        f"{two_drives[1]}: 250 B/s alone, 250 B/s with all drives reading: weight 51",
    ]


def test_folders_that_hold_something_are_refused_before_they_are_measured(two_drives: list[Path]) -> None:
    (two_drives[0] / "mine").write_text("")
    with pytest.raises(FolderError, match="here holds mine"):
        choose_weights([Drive(folder) for folder in two_drives], never)


@pytest.mark.parametrize("cut", [40, 90])
def test_a_resumed_pack_keeps_the_weights_that_it_began_with(source: Path, two_drives: list[Path], cut: int) -> None:
    with pytest.raises(PowerCut):
        pack_folder(source, two_drives, weights=[100, 62], disk=PowerCutDisk(cut), sync_bytes=1)
    drives = [Drive(folder) for folder in two_drives]
    assert choose_weights(drives, never).values == [100, 62]
    pack_folder(source, two_drives, weights=[100, 62])
    assert choose_weights(drives, never).values == [100, 62]


def test_a_pack_is_measured_once_and_prints_what_was_found(
    source: Path, two_drives: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colibri.packer.weights.choose_weights.__defaults__", (fixed(3e9, 1e9),))
    words = [str(source), "--out", str(two_drives[0]), "--stripe", str(two_drives[1]), "--json"]
    assert cli.main(words) == 0
    told = capsys.readouterr()
    assert f"{two_drives[1]}: 953.7 MiB/s alone, 953.7 MiB/s with all drives reading: weight 32" in told.err
    packed = json.loads(told.out)
    assert [stripe["weight"] for stripe in packed["layout"]["stripes"]] == [100, 32]
    assert [rate["alone"] for rate in packed["drive_rates"]] == [3_000_000_000, 1_000_000_000]
    assert packed["drive_warnings"] == []
    monkeypatch.setattr("colibri.packer.weights.choose_weights.__defaults__", (never,))
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == packed["layout"]


def test_a_move_is_measured_too(
    source: Path,
    two_drives: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack_folder(source, [tmp_path / "old"])
    monkeypatch.setattr("colibri.packer.weights.choose_weights.__defaults__", (fixed(1e9, 3e9),))
    words = ["restripe", str(tmp_path / "old"), "--to", str(two_drives[0]), "--to", str(two_drives[1]), "--json"]
    assert cli.main(words) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert [stripe["weight"] for stripe in layout["stripes"]] == [32, 100]
    move_folder([tmp_path / "old"], [tmp_path / "x", tmp_path / "y"], weights=[32, 100])


def test_plan_measures_nothing_and_says_so(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colibri.packer.weights.choose_weights.__defaults__", (never,))
    words = ["plan", str(source), "--out", str(tmp_path / "a"), "--stripe", str(tmp_path / "b")]
    assert cli.main(words) == 0
    assert "No weights are given: where the folders lie on different file systems" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_unknown"] is True
    assert cli.main([*words[:-1], f"{tmp_path}/b:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_unknown"] is False
    assert list(tmp_path.iterdir()) == []
