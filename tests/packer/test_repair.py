"""After a repair every byte is what it was when it was packed; what cannot be proved is left alone and named."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from google.protobuf import json_format

from colibri.core.container import ContainerError, open_container
from colibri.core.container_files import pack_table
from colibri.core.identity import manifest_digest
from colibri.core.paths import FolderLock
from colibri.core.tensors import crc32c
from colibri.packer import cli
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk, DriveError
from colibri.packer.errors import CheckpointError, FolderError
from colibri.packer.progress import Silent
from colibri.packer.repair import repair
from colibri.packer.repair_stripes import Repairs
from colibri.packer.verify import verify
from colibri.v1 import manifest_pb2
from testkit.checkpoints import TD_CONFIG, td_tensors, write_checkpoint, write_td, write_tq
from testkit.faulty_disk import CountingDisk, PowerCut, PowerCutDisk
from testkit.models import Tiny, make_tiny, opened, prefill, same_bits, some_tokens
from testkit.packing import copy_container, pack_folder

Damage = Callable[[list[Path]], object]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_td(tmp_path_factory.mktemp("source") / "td")


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("plain")
    folders = [root / name for name in "abc"]
    pack_folder(source, folders, weights=[2, 1, 1])
    return folders


@pytest.fixture(scope="module")
def mirrored(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("mirrored")
    folders = [root / name for name in "abc"]
    pack_folder(source, folders, weights=[2, 1, 1], mirror=True)
    return folders


def raw(folders: list[Path]) -> list[dict[str, bytes]]:
    return [{path.name: path.read_bytes() for path in sorted(folder.iterdir())} for folder in folders]


def repaired(folders: list[Path], source: Path | None = None, disk: Disk | None = None) -> Repairs:
    if source is None:
        return repair(folders[0], folders[1:], disk=disk)
    with Checkpoint.open(source) as checkpoint:
        return repair(folders[0], folders[1:], checkpoint, disk=disk)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


# ---- extents -------------------------------------------------------------------------------------------------------


def test_a_container_in_order_is_read_and_left_alone(mirrored: list[Path], source: Path) -> None:
    class ReadOnly(Disk):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            raise AssertionError(f"{len(data)} bytes written at {offset} of {os.readlink(f'/proc/self/fd/{fd}')}")

    for checkpoint in (None, source):
        done = repaired(mirrored, checkpoint, ReadOnly())
        assert (done.extents, done.fixed, done.remains) == ([], [], [])
        assert done.checked_bytes == verify(mirrored[0], mirrored[1:], Silent()).checked_bytes


def test_a_damaged_extent_comes_from_its_mirror_and_a_damaged_mirror_from_its_stripe(
    mirrored: list[Path], tmp_path: Path
) -> None:
    folders = copy_container(mirrored, tmp_path)
    before = raw(folders)
    flip(folders[1] / "stripe-001.colibri", 4096 + 17)
    flip(folders[0] / "mirror-002.colibri", 4096 + 99)
    done = repaired(folders)
    assert raw(folders) == before
    assert done.remains == []
    assert {(item.path, item.offset, item.origin) for item in done.extents} == {
        (folders[1] / "stripe-001.colibri", 4096, "mirror"),
        (folders[0] / "mirror-002.colibri", 4096, "stripe"),
    }
    assert all(item.layer == 1 and item.bytes == 12288 for item in done.extents)


def test_what_no_mirror_holds_comes_from_the_checkpoint(plain: list[Path], source: Path, tmp_path: Path) -> None:
    folders = copy_container(plain, tmp_path)
    before = raw(folders)
    inodes = [(folder / f"stripe-00{n}.colibri").stat().st_ino for n, folder in enumerate(folders)]
    for number, folder in enumerate(folders):
        overwrite(folder / f"stripe-00{number}.colibri", 4096 + 12288 * (number % 2), os.urandom(200))
    done = repaired(folders, source)
    assert raw(folders) == before
    assert done.remains == []
    assert [item.origin for item in done.extents] == ["source"] * 3
    # In place: a daemon that has the file open must see it.
    assert [(folder / f"stripe-00{n}.colibri").stat().st_ino for n, folder in enumerate(folders)] == inodes


def test_split_records_are_rebuilt_extent_by_extent(tmp_path: Path) -> None:
    config = {**TD_CONFIG, "moe_intermediate_size": 1600, "num_hidden_layers": 2}
    source = write_checkpoint(tmp_path / "large", config, td_tensors(config))
    folders = [tmp_path / "a", tmp_path / "b"]
    manifest = pack_folder(source, folders, precision="experts=f32", mirror=True)
    assert len(manifest.expert_layers[0].striping.split.pieces) == 2
    before = raw(folders)
    bytes_1 = manifest.expert_layers[0].striping.split.pieces[1].bytes
    flip(folders[0] / "stripe-000.colibri", 5000)  # expert 0: its mirror is good
    flip(folders[1] / "stripe-001.colibri", 4096 + bytes_1 + 8)  # expert 1: both copies
    flip(folders[0] / "mirror-001.colibri", 4096 + bytes_1 + 9)
    done = repaired(folders, source)
    assert raw(folders) == before
    assert done.remains == []
    assert sorted((item.path.name, item.expert, item.origin) for item in done.extents) == [
        ("mirror-001.colibri", 1, "source"),
        ("stripe-000.colibri", 0, "mirror"),
        ("stripe-001.colibri", 1, "source"),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_to_any_file_is_undone(mirrored: list[Path], source: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folders = copy_container(mirrored, tmp_path)
    before = raw(folders)
    names = [p for folder in folders for p in folder.iterdir() if p.name not in ("LOCK", "manifest.json")]
    for path in chance.sample(names, 4):
        kind = chance.choice(["overwrite", "cut", "remove"])
        size = path.stat().st_size
        if kind == "overwrite":
            at = chance.randrange(size)
            overwrite(path, at, chance.randbytes(min(9000, size - at)))
        elif kind == "cut":
            os.truncate(path, chance.randrange(size))
        else:
            path.unlink()
    done = repaired(folders, source)
    assert done.remains == []
    assert raw(folders) == before
    assert verify(folders[0], folders[1:], Silent()).faults == []


def test_without_a_good_copy_it_is_named_and_left_alone(plain: list[Path], source: Path, tmp_path: Path) -> None:
    folders = copy_container(plain, tmp_path)
    flip(folders[2] / "stripe-002.colibri", 4096 + 3)
    before = raw(folders)
    done = repaired(folders)
    path = folders[2] / "stripe-002.colibri"
    (told,) = done.remains
    assert told.startswith(f"{path}: layer 1, expert ")
    assert "12288 bytes at offset 4096: CRC-32C is" in told
    assert "no good copy is left, and no checkpoint is given (--source)" in told
    assert raw(folders) == before
    other = write_checkpoint(tmp_path / "other", TD_CONFIG, td_tensors(seed=9))
    (told,) = repaired(folders, other).remains
    assert "the checkpoint given is not the one that was packed" in told
    assert raw(folders) == before
    with pytest.raises(CheckpointError, match="is another model than the one in the container"):
        repaired(folders, write_tq(tmp_path / "tq"))
    assert repaired(folders, source).remains == []


def test_a_record_that_passes_every_crc_and_is_not_the_one_that_was_packed(
    plain: list[Path], source: Path, tmp_path: Path
) -> None:
    """An extent and its CRC changed alike, in a table that is whole: only the record's SHA-256 tells."""
    folders = copy_container(plain, tmp_path)
    flip(folders[0] / "stripe-000.colibri", 4096 + 3)
    with open_container(folders[0], folders[1:]) as container:
        entries = bytearray((folders[0] / "extents.crc32c").read_bytes()[48:])
        extent = container.extents(0)[0, 0]
        uuid, manifest = container.manifest.layout.uuid, container.manifest
    data = (folders[0] / "stripe-000.colibri").read_bytes()
    begin, size = int(extent["file_offset"]), int(extent["bytes"])
    assert begin == 4096
    entries[:4] = crc32c(data[begin : begin + size]).to_bytes(4, "little")
    (folders[0] / "extents.crc32c").write_bytes(pack_table(UUID(uuid), 4, bytes(entries)))
    manifest.layout.extent_checksums.crc32c = crc32c(bytes(entries))
    manifest.manifest_sha256 = manifest_digest(manifest)
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    (folders[0] / "manifest.json").write_text(text)
    done = repaired(folders, source)
    (told,) = done.remains
    assert "passes its CRC-32C, and the record is not the one of records.sha256" in told
    assert "what would be written fails its CRC-32C too" in told


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


# ---- drives that fail while they are repaired ----------------------------------------------------------------------


class FaultyAt(Disk):
    """Writes to one offset of one file fail, or are lost without a word."""

    def __init__(self, path: Path, offset: int, code: int) -> None:
        self._path, self._offset, self._code = path, offset, code

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if (os.readlink(f"/proc/self/fd/{fd}"), offset) != (str(self._path), self._offset):
            return super().pwrite(fd, data, offset)
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return len(data)


@pytest.mark.parametrize(
    ("code", "why"),
    [(errno.EIO, "Input/output error"), (0, "the drive gives back something else: is it failing?")],
)
def test_a_sector_that_cannot_be_written_is_named_and_the_rest_is_repaired(
    mirrored: list[Path], tmp_path: Path, code: int, why: str
) -> None:
    folders = copy_container(mirrored, tmp_path)
    before = raw(folders)
    path = folders[0] / "stripe-000.colibri"
    for number in range(3):
        flip(path, 4096 + 12288 * number + 7)
    done = repaired(folders, disk=FaultyAt(path, 4096 + 12288, code))
    (told,) = done.remains
    assert f"{path}: layer 1, expert " in told
    assert "12288 bytes at offset 16384" in told
    assert why in told
    assert [item.offset for item in done.extents] == [4096, 4096 + 2 * 12288]
    assert len(repaired(folders).extents) == 1
    assert raw(folders) == before


def test_a_full_drive_ends_the_repair_which_can_be_repeated(mirrored: list[Path], tmp_path: Path) -> None:
    folders = copy_container(mirrored, tmp_path)
    before = raw(folders)
    path = folders[1] / "stripe-001.colibri"
    path.unlink()
    partial = path.with_name(path.name + ".partial")
    with pytest.raises(DriveError, match=rf"writing {partial}: No space left.*it resumes"):
        repaired(folders, disk=FaultyAt(partial, 4096 + 12288, errno.ENOSPC))
    assert not path.exists()
    assert repaired(folders).remains == []
    assert raw(folders) == before


def test_the_room_for_a_lost_stripe_is_asked_for_before_anything_is_written(
    mirrored: list[Path], tmp_path: Path
) -> None:
    class Tight(Disk):
        def free_bytes(self, folder: Path) -> int:  # noqa: ARG002
            return 8192

    folders = copy_container(mirrored, tmp_path)
    (folders[1] / "stripe-001.colibri").unlink()
    flip(folders[0] / "stripe-000.colibri", 5000)
    before = raw(folders)
    with pytest.raises(DriveError, match=rf"{folders[1]}: needs 0\.1 MiB more"):
        repaired(folders, disk=Tight())
    assert raw(folders) == before


# ---- beside others, and after a kill -------------------------------------------------------------------------------


def test_it_works_beside_readers_and_not_beside_writers_or_another_repair(mirrored: list[Path], tmp_path: Path) -> None:
    folders = copy_container(mirrored, tmp_path)
    flip(folders[1] / "stripe-001.colibri", 4096 + 17)
    with open_container(folders[0], folders[1:]):
        assert len(repaired(folders).extents) == 1
    lock = FolderLock(folders[1], exclusive=True)
    with pytest.raises(ContainerError, match="is being written by another process"):
        repaired(folders)
    lock.close()

    class Second(Disk):
        told = ""

        def free_bytes(self, folder: Path) -> int:
            with pytest.raises(ContainerError) as caught:
                repaired(folders)
            self.told = str(caught.value)
            return super().free_bytes(folder)

    (folders[1] / "stripe-001.colibri").unlink()
    disk = Second()
    repaired(folders, disk=disk)
    assert disk.told == f"{folders[0]} is being repaired by another process"


def test_after_a_power_cut_the_same_repair_goes_on(plain: list[Path], source: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> list[Path]:
        (tmp_path / name).mkdir()
        folders = copy_container(plain, tmp_path / name)
        (folders[1] / "stripe-001.colibri").unlink()
        flip(folders[0] / "stripe-000.colibri", 5000)
        flip(folders[0] / "dense.safetensors", 30_000)
        (folders[0] / "extents.crc32c").unlink()
        (folders[0] / "tokenizer.json").unlink()
        return folders

    counting = CountingDisk()
    folders = damaged("whole")
    assert repaired(folders, source, counting).remains == []
    before = raw(folders)
    assert before == raw(plain)
    for at in range(counting.operations):
        folders = damaged(str(at))
        with pytest.raises(PowerCut):
            repaired(folders, source, PowerCutDisk(at))
        assert repaired(folders, source).remains == []
        assert raw(folders) == before, f"power cut at operation {at}"
        shutil.rmtree(tmp_path / str(at))


def test_the_same_model_goes_on_with_the_same_logits(tmp_path: Path) -> None:
    """A read fails, a repair runs, and the model that was open all along computes what it did before."""
    tiny = make_tiny("glm4_moe", tmp_path, precision="", weights=(2, 1))
    tokens = some_tokens(40)
    with opened(tiny, expert_slots=1, ring_slots=2) as model:
        expected = prefill(model, model.sequence(), tokens)
        stripe = tiny.folders[0] / "stripe-000.colibri"
        overwrite(stripe, 4096, os.urandom(stripe.stat().st_size - 4096))
        with pytest.raises(Exception, match="stripe-000"):
            prefill(model, model.sequence(), tokens)
        assert repaired(list(tiny.folders), tiny.checkpoint).remains == []
        assert same_bits(prefill(model, model.sequence(), tokens), expected)
    with opened(Tiny(tiny.checkpoint, tiny.folders), expert_slots=2) as model:
        assert same_bits(prefill(model, model.sequence(), tokens), expected)


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command(mirrored: list[Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = copy_container(mirrored, tmp_path)
    words = ["repair", str(folders[0]), "--stripe", str(folders[1]), "--stripe", str(folders[2])]
    assert cli.main(words) == 0
    assert "in order: " in capsys.readouterr().out
    path = folders[1] / "stripe-001.colibri"
    flip(path, 4096)
    assert cli.main(words) == 0
    assert f"{path}: layer 1, expert " in (told := capsys.readouterr().out)
    assert "12288 bytes at offset 4096: rebuilt from its mirror\nin order: " in told
    flip(path, 4096)
    flip(folders[2] / "mirror-001.colibri", 4096)
    assert cli.main(words) == 1
    assert "2 faults remain: " in capsys.readouterr().out
    assert cli.main([*words, "--source", str(source), "--json"]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert told_json["ok"] is True
    assert told_json["remains"] == []
    assert {item["file"] for item in told_json["extents"]} == {str(path), str(folders[2] / "mirror-001.colibri")}
    assert {item["from"] for item in told_json["extents"]} == {"source"}
