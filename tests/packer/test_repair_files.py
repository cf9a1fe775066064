"""A repair of whole files: lost stripes, damaged headers, tables, dense weights, bundled files; and what is refused."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from colibri.core.container import ContainerError
from colibri.packer.errors import FolderError
from colibri.packer.progress import Silent
from colibri.packer.repair import repair
from colibri.packer.verify import verify
from colibri.v1 import manifest_pb2
from testkit.container_damage import flip, overwrite, raw, repaired
from testkit.faulty_disk import PowerCut, PowerCutDisk
from testkit.packing import copy_container, pack_folder

Damage = Callable[[list[Path]], object]


@pytest.fixture
def source(td: Path) -> Path:
    return td


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_stripe_is_made_anew_on_a_new_drive(plain: list[Path], source: Path, tmp_path: Path, lost: int) -> None:
    folders = copy_container(plain, tmp_path)
    before = raw(folders)
    path = folders[lost] / f"stripe-00{lost}.colibri"
    if lost:
        folders[lost].rename(tmp_path / "dead")
        folders[lost].mkdir()
    else:
        path.unlink()
    done = repaired(folders, source)
    assert done.remains == []
    assert done.extents == []
    assert [text.startswith(f"{path}: was missing, made anew; ") for text in done.fixed] == [True]
    assert raw(folders) == before


def test_a_whole_drive_of_a_mirrored_container_needs_no_checkpoint(mirrored: list[Path], tmp_path: Path) -> None:
    folders = copy_container(mirrored, tmp_path)
    before = raw(folders)
    folders[1].rename(tmp_path / "dead")
    new = tmp_path / "new"
    new.mkdir()
    done = repair(folders[0], [new, folders[2]])
    assert done.remains == []
    assert raw([folders[0], new, folders[2]]) == before


def test_a_lost_stripe_without_a_folder_is_named(mirrored: list[Path], tmp_path: Path) -> None:
    folders = copy_container(mirrored, tmp_path)
    flip(folders[2] / "stripe-002.colibri", 4096 + 3)
    done = repair(folders[0], [folders[2]])
    assert [item.origin for item in done.extents] == ["mirror"]
    assert done.remains == [
        "stripe 1 is lost, and no folder for it is given: an empty one, with --stripe",
        "the mirror of stripe 0 is lost, and no folder for it is given: an empty one, with --stripe",
    ]


def test_a_repair_that_cannot_finish_a_file_leaves_it_unnamed(plain: list[Path], source: Path, tmp_path: Path) -> None:
    folders = copy_container(plain, tmp_path)
    before = raw(folders)
    (folders[1] / "stripe-001.colibri").unlink()
    done = repaired(folders)
    assert any("stripe-001.colibri.partial is not whole yet" in text for text in done.remains)
    assert not (folders[1] / "stripe-001.colibri").exists()
    assert repaired(folders, source).remains == []
    assert raw(folders) == before


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: overwrite(f[1] / "stripe-001.colibri", 0, bytes(4096)), id="header"),
        pytest.param(lambda f: flip(f[1] / "stripe-001.colibri", 25), id="uuid in the header"),
        pytest.param(lambda f: os.truncate(f[1] / "stripe-001.colibri", 4096 + 12288 + 5), id="cut"),
        pytest.param(lambda f: os.truncate(f[1] / "stripe-001.colibri", 0), id="empty"),
        pytest.param(lambda f: os.truncate(f[1] / "stripe-001.colibri", 1 << 20), id="too long"),
        pytest.param(lambda f: (f[0] / "extents.crc32c").unlink(), id="extent table"),
        pytest.param(lambda f: flip(f[0] / "records.sha256", 60), id="record table"),
        pytest.param(lambda f: [p.unlink() for p in (f[0] / "extents.crc32c", f[0] / "records.sha256")], id="tables"),
        pytest.param(lambda f: (f[0] / "tokenizer.json").write_text("{}"), id="bundled"),
        pytest.param(lambda f: (f[0] / "config.json").unlink(), id="config"),
        pytest.param(lambda f: (f[0] / "dense.safetensors").unlink(), id="dense"),
        pytest.param(lambda f: os.truncate(f[0] / "dense.safetensors", 9000), id="dense cut"),
        pytest.param(lambda f: overwrite(f[0] / "dense.safetensors", 3, b"xxxxxxx"), id="dense header"),
        pytest.param(lambda f: overwrite(f[0] / "dense.safetensors", 20000, bytes(9000)), id="dense data"),
    ],
)
def test_any_file_is_set_right(plain: list[Path], source: Path, tmp_path: Path, damage: Damage) -> None:
    folders = copy_container(plain, tmp_path)
    before = raw(folders)
    damage(folders)
    assert verify(folders[0], folders[1:], Silent()).faults != []
    done = repaired(folders, source)
    assert done.remains == []
    assert done.fixed != []
    assert raw(folders) == before


def test_both_tables_and_a_record_are_rebuilt_from_the_checkpoint(
    plain: list[Path], source: Path, tmp_path: Path
) -> None:
    folders = copy_container(plain, tmp_path)
    before = raw(folders)
    for name in ("extents.crc32c", "records.sha256"):
        (folders[0] / name).unlink()
    flip(folders[0] / "stripe-000.colibri", 4096 + 12288 + 3)
    done = repaired(folders)
    assert [text.split(" is lost")[0] for text in done.remains] == [
        str(folders[0] / name) for name in ("extents.crc32c", "records.sha256")
    ]
    assert repaired(folders, source).remains == []
    assert raw(folders) == before


def test_what_no_checkpoint_gives_is_named(plain: list[Path], tmp_path: Path) -> None:
    folders = copy_container(plain, tmp_path)
    (folders[0] / "tokenizer.json").unlink()
    manifest = json_format.Parse((folders[0] / "manifest.json").read_text(), manifest_pb2.Manifest())
    tensor = next(t for t in manifest.dense if t.name == "layers.0.q")
    flip(folders[0] / "dense.safetensors", tensor.codes.offset)
    done = repaired(folders)
    assert (
        f"{folders[0] / 'tokenizer.json'} is missing or was changed: no checkpoint is given (--source)" in done.remains
    )
    dense = folders[0] / "dense.safetensors"
    assert f"{dense}: tensor layers.0.q is damaged: no checkpoint is given (--source)" in done.remains


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_files_of_another_container_are_never_written_over(plain: list[Path], source: Path, tmp_path: Path) -> None:
    folders = copy_container(plain, tmp_path)
    other = [tmp_path / name for name in "xyz"]
    pack_folder(source, other, weights=[2, 1, 1])
    for name, at in (("stripe-001.colibri", 1), ("dense.safetensors", 0)):
        mine = (folders[at] / name).read_bytes()
        shutil.copy(other[at] / name, folders[at] / name)
        with pytest.raises(ContainerError, match="belongs to container"):
            repaired(folders, source)
        assert (folders[at] / name).read_bytes() == (other[at] / name).read_bytes()
        (folders[at] / name).write_bytes(mine)


def test_a_file_that_shows_nothing_of_this_container_is_not_written_over(
    plain: list[Path], source: Path, tmp_path: Path
) -> None:
    folders = copy_container(plain, tmp_path)
    path = folders[1] / "stripe-001.colibri"
    path.write_bytes(os.urandom(path.stat().st_size))
    before = path.read_bytes()
    with pytest.raises(ContainerError, match="none of its data is of this container: to have it made anew, remove it"):
        repaired(folders, source)
    assert path.read_bytes() == before


def test_an_unfinished_pack_in_the_new_folder_is_not_written_over(
    plain: list[Path], source: Path, tmp_path: Path
) -> None:
    folders = copy_container(plain, tmp_path)
    (folders[1] / "stripe-001.colibri").unlink()
    with pytest.raises(PowerCut):
        pack_folder(source, [tmp_path / "p", tmp_path / "q"], disk=PowerCutDisk(60), sync_bytes=1)
    shutil.copy(tmp_path / "q" / "stripe-001.colibri.partial", folders[1])
    with pytest.raises(FolderError, match=r"stripe-001\.colibri\.partial is of container .*: remove it"):
        repaired(folders, source)


def test_a_folder_too_many_and_a_damaged_manifest_are_refused(plain: list[Path], source: Path, tmp_path: Path) -> None:
    folders = copy_container(plain, tmp_path)
    (tmp_path / "extra").mkdir()
    with pytest.raises(FolderError, match="extra holds no stripe of this container, and no further stripe is lost"):
        repaired([*folders, tmp_path / "extra"], source)
    flip(folders[0] / "manifest.json", 700)
    with pytest.raises(ContainerError, match=r"manifest\.json"):
        repaired(folders, source)
