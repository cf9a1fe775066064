"""After a repair every byte is what it was when it was packed; what cannot be proved is left alone and named."""

import errno
import json
import os
import random
import re
import shutil
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
from colibri.packer.disk import Disk, DriveError
from colibri.packer.errors import CheckpointError
from colibri.packer.progress import Silent
from colibri.packer.repair import repair
from colibri.packer.verify import verify
from testkit.checkpoints import TD_CONFIG, td_tensors, write_checkpoint, write_tq
from testkit.container_damage import flip, overwrite, raw, repaired
from testkit.faulty_disk import CountingDisk, PowerCut, PowerCutDisk
from testkit.models import Tiny, make_tiny, opened, prefill, same_bits, some_tokens
from testkit.packing import copy_container, pack_folder


@pytest.fixture
def source(td: Path) -> Path:
    return td


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


@pytest.mark.parametrize(("value", "why"), [(3e38, "beyond the range of f16"), (float("nan"), "NaN or infinity")])
def test_an_expert_that_the_checkpoint_does_not_give_is_named_and_the_others_are_repaired(
    plain: list[Path], tmp_path: Path, value: float, why: str
) -> None:
    folders = copy_container(plain, tmp_path)
    path = folders[2] / "stripe-002.colibri"
    flip(path, 4096 + 3)
    flip(path, 4096 + 12288 + 3)
    first, second = (re.search(r"layer (\d+), expert (\d+)", told) for told in repaired(folders).remains)
    assert first is not None
    assert second is not None
    assert first[0] != second[0]
    tensors = td_tensors()
    name = f"model.layers.{first[1]}.mlp.experts.{first[2]}.gate_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][1, 2] = value
    (told,) = repaired(folders, write_checkpoint(tmp_path / "bent", TD_CONFIG, tensors)).remains
    assert f"{path}: {first[0]}" in told
    assert f"the checkpoint does not give it: {name}: " in told
    assert why in told


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


# ---- single experts ------------------------------------------------------------------------------------------------


def test_only_the_experts_that_are_named_are_looked_at(
    mirrored: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = copy_container(mirrored, tmp_path)
    before = raw(folders)
    path = folders[0] / "stripe-000.colibri"
    for number in (0, 1):
        flip(path, 4096 + 12288 * number + 7)
    with open_container(folders[0], folders[1:]) as container:
        table = container.extents(0)
    first, second = (next(e for e in range(8) if table[e, 0]["stripe"] == 0 and table[e, 0]["file_offset"] == at)
                     for at in (4096, 16384))  # fmt: skip
    done = repair(folders[0], folders[1:], only=[(1, first)])
    assert [item.expert for item in done.extents] == [first]
    assert (done.checked_bytes, done.remains) == (2 * 12288, [])
    words = ["repair", str(folders[0]), "--stripe", str(folders[1]), "--stripe", str(folders[2])]
    assert cli.main([*words, "--only", f"1:{second}", "--only", f"1:{first}"]) == 0
    assert "in order: 48.0 KiB checked, 1 repair" in capsys.readouterr().out
    assert raw(folders) == before
    assert cli.main([*words, "--only", "1:8"]) == 1
    assert "layer 1, expert 8: the container has no such expert" in capsys.readouterr().err
    (folders[2] / "mirror-001.colibri").unlink()
    assert cli.main([*words, "--only", "1:0"]) == 1
    assert "more than single experts is damaged: repair all of it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "--only", "1"])
    assert "'1' is not LAYER:EXPERT, two numbers" in capsys.readouterr().err


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
