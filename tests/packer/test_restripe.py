"""A moved container is what a fresh pack onto the new drives would be, whatever interrupts the move."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri.core.container import ContainerError, open_container
from colibri.core.paths import FolderLock
from colibri.packer import cli
from colibri.packer.disk import Disk, DriveError
from colibri.packer.errors import FolderError
from colibri.packer.journal import JournalError
from colibri.packer.progress import Silent
from colibri.packer.verify import verify
from testkit.checkpoints import write_td, write_tq
from testkit.faulty_disk import CountingDisk, FailingDisk, PowerCut, PowerCutDisk
from testkit.models import Tiny, make_tiny, opened, prefill, same_bits, some_tokens
from testkit.packing import copy_container, files_of, move_folder, pack_folder

HELPERS = Path(__file__).parent.parent / "helpers"
SYNC_BYTES = 40_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_td(tmp_path_factory.mktemp("source") / "td")


@pytest.fixture(scope="module")
def original(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A container on two drives; not to be changed."""
    root = tmp_path_factory.mktemp("container")
    folders = [root / "a", root / "b"]
    pack_folder(source, folders, weights=[2, 1])
    return folders


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """A fresh mirrored pack on two equal drives."""
    root = tmp_path_factory.mktemp("reference")
    pack_folder(source, [root / "a", root / "b"], mirror=True)
    return [files_of(root / "a"), files_of(root / "b")]


def moved(folders: list[Path]) -> list[dict[str, bytes]]:
    assert verify(folders[0], folders[1:], Silent()).faults == []
    return [files_of(folder) for folder in folders]


def raw(folders: list[Path]) -> list[dict[str, bytes]]:
    return [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]


# ---- what a move makes ---------------------------------------------------------------------------------------------


def test_a_moved_container_is_what_a_fresh_pack_there_would_be(
    original: list[Path], reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    folders, before = [tmp_path / "a", tmp_path / "b"], raw(original)
    manifest = move_folder(original, folders, mirror=True)
    assert moved(folders) == reference
    assert raw(original) == before
    with open_container(original[0], original[1:]) as old:
        assert manifest.content_id == old.content_id
        assert manifest.layout.uuid != old.manifest.layout.uuid


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    mirror=st.booleans(),
    min_extent=st.sampled_from([4096, 8192, 131072]),
)
def test_any_layout_holds_the_same_records(
    original: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    weights: list[int],
    mirror: bool,
    min_extent: int,
) -> None:
    root = tmp_path_factory.mktemp("moved")
    folders = [root / str(number) for number in range(len(weights))]
    mirror = mirror and len(weights) > 1
    manifest = move_folder(original, folders, weights=weights, mirror=mirror, min_extent_bytes=min_extent)
    assert verify(folders[0], folders[1:], Silent()).faults == []
    with open_container(original[0], original[1:]) as old, open_container(folders[0], folders[1:]) as new:
        assert new.content_id == old.content_id
        assert new.record_digests == old.record_digests
    assert [stripe.weight for stripe in manifest.layout.stripes] == weights
    assert manifest.layout.min_extent_bytes == min_extent
    back = [root / "back0", root / "back1"]
    move_folder(folders, back, weights=[2, 1], min_extent_bytes=131072)
    assert [files_of(folder) for folder in back] == [files_of(folder) for folder in original]


def test_the_logits_are_the_same_bytes(tmp_path: Path) -> None:
    tiny = make_tiny("glm4_moe", tmp_path, precision="", weights=(2, 1))
    folders = [tmp_path / name for name in "xyz"]
    move_folder(tiny.folders, folders, weights=[1, 3, 1], min_extent_bytes=4096)
    with opened(tiny) as model:
        expected = prefill(model, model.sequence(), some_tokens(40))
    with opened(Tiny(tiny.checkpoint, tuple(folders)), expert_slots=2) as model:
        assert same_bits(prefill(model, model.sequence(), some_tokens(40)), expected)


# ---- killed, cut off, full -----------------------------------------------------------------------------------------


def test_killed_anywhere_the_same_command_resumes_to_the_same_bytes(
    original: list[Path], reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    words = [sys.executable, "-P", "-m", "testkit.pack_until_killed", str(original[0]), str(tmp_path), "17"]
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    driver = subprocess.run(
        [*words, "move", str(original[1])], env=environment, capture_output=True, text=True, check=False
    )
    assert (driver.returncode, driver.stdout.strip()) == (0, ""), driver.stderr
    moves = sorted(tmp_path.iterdir())
    assert len(moves) > 30
    for base in moves:
        assert [files_of(base / "a"), files_of(base / "b")] == reference, base.name


def test_after_a_power_cut_only_what_was_synced_counts(
    original: list[Path], reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    operations = CountingDisk()
    move_folder(original, [tmp_path / "x", tmp_path / "y"], disk=operations, sync_bytes=SYNC_BYTES, mirror=True)
    last = operations.operations
    for at in {*range(5, last, 29), *range(last - 12, last)}:
        base = tmp_path / str(at)
        base.mkdir()
        folders = [base / "a", base / "b"]
        with pytest.raises(PowerCut):
            move_folder(original, folders, disk=PowerCutDisk(at), sync_bytes=SYNC_BYTES, mirror=True)
        move_folder(original, folders, disk=CountingDisk(), mirror=True)
        assert [files_of(folder) for folder in folders] == reference, f"power cut at operation {at}"


@pytest.mark.parametrize(("name", "at"), [("write", 9), ("write", 40), ("fsync", 4), ("close", 2)])
def test_a_full_drive_leaves_nothing_that_looks_done(
    original: list[Path], reference: list[dict[str, bytes]], tmp_path: Path, name: str, at: int
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError, match="it resumes"):
        move_folder(original, folders, disk=FailingDisk(name, at, errno.ENOSPC), sync_bytes=SYNC_BYTES, mirror=True)
    with pytest.raises(ContainerError, match=r"holds no manifest\.json"):
        open_container(folders[0], folders[1:])
    move_folder(original, folders, mirror=True)
    assert moved(folders) == reference


def test_the_space_is_asked_for_before_the_first_byte(original: list[Path], tmp_path: Path) -> None:
    class Tight(Disk):
        def free_bytes(self, folder: Path) -> int:  # noqa: ARG002
            return 1 << 20

    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError, match=f"{tmp_path}/a and {tmp_path}/b: needs"):
        move_folder(original, folders, disk=Tight())
    assert not any(folder.exists() for folder in folders)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_damaged_is_named_and_never_moved(original: list[Path], tmp_path: Path) -> None:
    old = copy_container(original, tmp_path)
    with open(old[1] / "stripe-001.colibri", "r+b") as file:
        file.seek(4096 + 9)
        file.write(b"\xff\xff\xff")
    target = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ContainerError, match=r"stripe-001\.colibri: layer 1, expert \d, offset 4096: CRC-32C is"):
        move_folder(old, target)
    with pytest.raises(ContainerError, match=r"holds no manifest\.json"):
        open_container(target[0], target[1:])


def test_a_damaged_dense_tensor_is_named(original: list[Path], tmp_path: Path) -> None:
    old = copy_container(original, tmp_path)
    with open(old[0] / "dense.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ContainerError, match=r"dense\.safetensors: tensor .*CRC-32C is .*colibri-pack repair"):
        move_folder(old, [tmp_path / "a"])


def test_a_mirror_gives_what_a_stripe_has_lost(source: Path, original: list[Path], tmp_path: Path) -> None:
    old = [tmp_path / "m", tmp_path / "n"]
    pack_folder(source, old, mirror=True)
    with open(old[0] / "stripe-000.colibri", "r+b") as file:
        file.seek(4096)
        file.write(bytes(8192))
    (old[1] / "stripe-001.colibri").unlink()
    target = [tmp_path / "a", tmp_path / "b"]
    move_folder(old, target, weights=[2, 1])
    assert moved(target) == [files_of(folder) for folder in original]


def test_the_container_s_own_folders_and_folders_in_use_are_refused(original: list[Path], tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="holds the container that is to be moved"):
        move_folder(original, [tmp_path / "a", original[1]])
    for own in original:  # it would go with the old container
        with pytest.raises(FolderError, match=r"lies inside .*, which holds the container that is to be moved"):
            move_folder(original, [tmp_path / "a", own / "new"])
        assert not (own / "new").exists()
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    lock = FolderLock(tmp_path / "a", exclusive=False)
    with pytest.raises(FolderError, match="is in use"):
        move_folder(original, [tmp_path / "a"])
    lock.close()


def test_a_container_that_is_served_can_be_moved_and_one_that_is_written_cannot(
    original: list[Path], tmp_path: Path
) -> None:
    with open_container(original[0], original[1:]):
        move_folder(original, [tmp_path / "a"])
    lock = FolderLock(original[0], exclusive=True)
    with pytest.raises(ContainerError, match="is being written by another process"):
        move_folder(original, [tmp_path / "b"])
    lock.close()


def test_a_finished_move_is_recognised_and_another_one_refused(original: list[Path], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    first = move_folder(original, folders)
    before = moved(folders)
    assert move_folder(original, folders) == first
    with pytest.raises(FolderError, match="a finished container of another model or with another layout"):
        move_folder(original, folders, weights=[3, 1])
    other = [tmp_path / "other"]
    pack_folder(write_tq(tmp_path / "tq"), other)
    with pytest.raises(FolderError, match="a finished container of another model or with another layout"):
        move_folder(other, folders)
    assert moved(folders) == before


def test_an_unfinished_move_takes_no_other_layout(original: list[Path], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(PowerCut):
        move_folder(original, folders, disk=PowerCutDisk(80), sync_bytes=1)
    with pytest.raises(JournalError, match="with other options"):
        move_folder(original, folders, weights=[3, 1])
    move_folder(original, folders)


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_moves_and_says_what_to_do_with_the_old_one(
    original: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["restripe", str(original[0]), "--stripe", str(original[1])]
    target = ["--to", f"{tmp_path}/a:3", "--to", f"{tmp_path}/b", "--mirror", "--min-extent", "4KiB"]
    assert cli.main([*words, *target]) == 0
    told = capsys.readouterr()
    assert f"The container in {original[0]} is as it was; it is no longer needed." in told.out
    assert "lie on one file system" in told.err
    assert "moving: 1" in told.err
    with open_container(tmp_path / "a", [tmp_path / "b"]) as container:
        layout = container.manifest.layout
        assert [(stripe.weight, stripe.mirrored) for stripe in layout.stripes] == [(3, True), (1, True)]
        assert layout.min_extent_bytes == 4096
    assert cli.main([*words, "--to", f"{tmp_path}/c", "--mirror"]) == 2
    assert "a mirror needs a second drive" in capsys.readouterr().err


def test_mirrors_are_kept_unless_they_are_left_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_folder(source, [tmp_path / "m", tmp_path / "n"], mirror=True)
    words = ["restripe", str(tmp_path / "m"), "--stripe", str(tmp_path / "n"), "--json", "--to"]

    def mirrored() -> list[bool]:
        return [stripe.get("mirrored", False) for stripe in json.loads(capsys.readouterr().out)["layout"]["stripes"]]

    assert cli.main([*words, f"{tmp_path}/a", "--to", f"{tmp_path}/b"]) == 0
    assert mirrored() == [True, True]
    assert cli.main([*words, f"{tmp_path}/c", "--to", f"{tmp_path}/d", "--no-mirror"]) == 0
    assert mirrored() == [False, False]
    assert cli.main([*words, f"{tmp_path}/e"]) == 2
    assert "the container has mirrors" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
    assert cli.main([*words, f"{tmp_path}/e", "--no-mirror"]) == 0
