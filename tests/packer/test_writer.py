"""A pack is complete or not there: the same bytes whatever interrupts it, and nothing foreign is touched."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from colibri.core.container import ContainerError, open_container
from colibri.core.paths import FolderLock
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk, DriveError
from colibri.packer.errors import CheckpointError, FolderError
from colibri.packer.journal import JournalError
from colibri.packer.progress import Silent
from colibri.packer.verify import verify
from testkit.checkpoints import TQ_CONFIG, tq_tensors, write_checkpoint, write_td, write_tq
from testkit.faulty_disk import CountingDisk, FailingDisk, PowerCut, PowerCutDisk, RoomyDisk
from testkit.packing import files_of, pack_folder, plan_of

HELPERS = Path(__file__).parent.parent / "helpers"
SYNC_BYTES = 40_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of an undisturbed pack onto two drives."""
    root = tmp_path_factory.mktemp("reference")
    pack_folder(source, [root / "a", root / "b"])
    return [files_of(root / "a"), files_of(root / "b")]


def packed(folders: list[Path]) -> list[dict[str, bytes]]:
    assert verify(folders[0], folders[1:], Silent()).faults == []
    return [files_of(folder) for folder in folders]


def unfinished(folders: list[Path]) -> None:
    """Nothing may look like a container, and no file have its final name but LOCK and the journal."""
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert {name for name in names if not name.endswith(".partial")} <= {"LOCK", "pack.journal"}
    with pytest.raises(ContainerError, match=r"holds no manifest\.json"):
        open_container(folders[0], folders[1:])


# ---- the same bytes ------------------------------------------------------------------------------------------------


def test_two_packs_differ_in_uuid_and_time_only(
    source: Path, reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    first = pack_folder(source, folders, workers=1, sync_bytes=1)
    assert packed(folders) == reference
    shutil.rmtree(folders[0])
    shutil.rmtree(folders[1])
    second = pack_folder(source, folders, workers=5)
    assert packed(folders) == reference
    assert first.layout.uuid != second.layout.uuid
    assert first.content_id == second.content_id


def test_the_content_id_does_not_depend_on_drives_but_on_formats(source: Path, tmp_path: Path) -> None:
    one = pack_folder(source, [tmp_path / "one"])
    three = pack_folder(source, [tmp_path / name for name in ("a", "b", "c")], weights=[5, 1, 3])
    other = pack_folder(source, [tmp_path / "other"], precision="experts=int8")
    assert one.content_id == three.content_id
    assert one.content_id != other.content_id


def test_large_records_are_split_and_small_ones_whole(source: Path, tmp_path: Path) -> None:
    config = {**TQ_CONFIG, "moe_intermediate_size": 1600, "num_hidden_layers": 1}
    large = write_checkpoint(tmp_path / "large", config, tq_tensors(config))
    folders = [tmp_path / "a", tmp_path / "b"]
    split = pack_folder(large, folders, precision="experts=f32", weights=[2, 1])
    assert [piece.stripe for piece in split.expert_layers[0].striping.split.pieces] == [0, 1]
    assert verify(folders[0], folders[1:], Silent()).faults == []
    whole = pack_folder(source, [tmp_path / "c", tmp_path / "d"])
    assert list(whole.expert_layers[0].striping.whole.pattern) == [0, 1]


def test_the_size_of_a_read_or_write_changes_nothing(
    source: Path, reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    """A21: whatever one system call moves, here seven bytes, all of it arrives."""

    class Short(Disk):
        piece_bytes = 1031

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return super().pwrite(fd, data[:1021], offset)

    folders = [tmp_path / "a", tmp_path / "b"]
    from colibri.packer.writer import pack

    with Checkpoint.open(source, piece_bytes=7) as checkpoint:
        pack(checkpoint, plan_of(checkpoint, weights=[1, 1]), folders, disk=Short())
    assert packed(folders) == reference


# ---- killed, cut off, full -----------------------------------------------------------------------------------------


def test_killed_anywhere_the_same_command_resumes_to_the_same_bytes(
    source: Path, reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "testkit.pack_until_killed", str(source), str(tmp_path), "9"]
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    driver = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (driver.returncode, driver.stdout.strip()) == (0, ""), driver.stderr
    packs = sorted(tmp_path.iterdir())
    assert len(packs) > 30
    for base in packs:
        assert [files_of(base / "a"), files_of(base / "b")] == reference, base.name


def test_a_killed_command_line_resumes(source: Path, reference: list[dict[str, bytes]], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    command = [sys.executable, "-P", "-m", "colibri.packer.cli", str(source), "--out", str(folders[0])]
    command += ["--stripe", str(folders[1])]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while child.poll() is None and not (folders[0] / "pack.journal").exists():
        pass
    child.kill()
    child.wait()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert packed(folders) == reference


def test_after_a_power_cut_only_what_was_synced_counts(
    source: Path, reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    operations = CountingDisk()
    pack_folder(source, [tmp_path / "x", tmp_path / "y"], disk=operations, sync_bytes=SYNC_BYTES)
    for at in {*range(0, operations.operations, 9), *range(operations.operations - 20, operations.operations)}:
        base = tmp_path / str(at)
        base.mkdir()
        folders = [base / "a", base / "b"]
        with pytest.raises(PowerCut):
            pack_folder(source, folders, disk=PowerCutDisk(at), sync_bytes=SYNC_BYTES)
        pack_folder(source, folders, disk=CountingDisk())
        assert [files_of(folder) for folder in folders] == reference, f"power cut at operation {at}"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(("name", "at"), [("write", 9), ("write", 40), ("fsync", 4), ("close", 0), ("close", 3)])
def test_an_error_of_the_system_names_the_drive_and_leaves_nothing_that_looks_done(
    source: Path, reference: list[dict[str, bytes]], tmp_path: Path, name: str, at: int, code: int
) -> None:
    """A20, also where a quota speaks up at fsync or close only."""
    folders = [tmp_path / "a", tmp_path / "b"]
    disk = FailingDisk(name, at, code)
    with pytest.raises(DriveError, match=str(tmp_path)) as caught:
        pack_folder(source, folders, disk=disk, sync_bytes=SYNC_BYTES)
    assert disk.hit
    assert os.strerror(code) in str(caught.value)
    assert ("it resumes" in str(caught.value)) == (code != errno.EIO)
    unfinished(folders)
    pack_folder(source, folders)
    assert packed(folders) == reference


def test_a_full_drive_is_refused_before_the_first_byte(source: Path, small_drive: Path, tmp_path: Path) -> None:
    """A20: two stripes, one on a file system of 64 KiB."""
    folders = [tmp_path / "a", small_drive / "b"]
    with pytest.raises(DriveError, match=rf"{small_drive}/b: needs \d+\.\d MiB more, the file system has 0\.0 MiB"):
        pack_folder(source, folders, precision="experts=f32")
    assert not any(folder.exists() for folder in folders)


def test_a_drive_that_fills_up_while_writing_can_be_freed_and_resumed(
    source: Path, small_drive: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", small_drive / "b"]
    with pytest.raises(DriveError, match=rf"writing {small_drive}/b/stripe-001.colibri.partial: No space left"):
        pack_folder(source, folders, precision="experts=f32", disk=RoomyDisk(), sync_bytes=SYNC_BYTES)
    unfinished(folders)
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_drive)], check=True)
    pack_folder(source, folders, precision="experts=f32", disk=RoomyDisk())
    pack_folder(source, [tmp_path / "c", tmp_path / "d"], precision="experts=f32")
    assert packed(folders) == packed([tmp_path / "c", tmp_path / "d"])


def test_stripes_on_one_file_system_are_added_up(source: Path, tmp_path: Path) -> None:
    class Tight(Disk):
        def free_bytes(self, folder: Path) -> int:  # noqa: ARG002
            return 2 << 20

    pack_folder(source, [tmp_path / "one"], disk=Tight())
    with pytest.raises(DriveError, match=f"{tmp_path}/a and {tmp_path}/b: needs"):
        pack_folder(source, [tmp_path / "a", tmp_path / "b"], disk=Tight())


def test_data_that_changed_behind_the_journal_is_written_again(
    source: Path, reference: list[dict[str, bytes]], tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError):
        pack_folder(source, folders, disk=FailingDisk("write", 55, errno.EIO), sync_bytes=SYNC_BYTES)
    lines = (folders[0] / "pack.journal").read_text().splitlines()
    assert sum(len(json.loads(line[9:])["records"]) for line in lines[1:]) >= 2
    with open(folders[1] / "stripe-001.colibri.partial", "r+b") as stripe:
        stripe.seek(4096 + 100)
        stripe.write(b"\xff\x00\xff")
    pack_folder(source, folders)
    assert packed(folders) == reference


def test_a_torn_journal_line_is_dropped(source: Path, reference: list[dict[str, bytes]], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError):
        pack_folder(source, folders, disk=FailingDisk("write", 55, errno.EIO), sync_bytes=SYNC_BYTES)
    journal = folders[0] / "pack.journal"
    journal.write_bytes(journal.read_bytes()[:-30])
    pack_folder(source, folders)
    assert packed(folders) == reference


# ---- what a pack must not touch ------------------------------------------------------------------------------------


@pytest.fixture
def stopped(source: Path, tmp_path: Path) -> list[Path]:
    """The folders of a pack that stopped half-way."""
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError):
        pack_folder(source, folders, disk=FailingDisk("write", 55, errno.EIO), sync_bytes=SYNC_BYTES)
    return folders


def test_other_options_are_refused_in_a_stopped_pack(source: Path, stopped: list[Path]) -> None:
    for other in ({"precision": "experts=int8"}, {"weights": [2, 1]}, {"group_size": 32}):
        with pytest.raises(
            JournalError, match=r"unfinished pack of another source or with other options.*pack\.journal"
        ):
            pack_folder(source, stopped, **other)


def test_a_source_that_changed_is_refused_in_a_stopped_pack(source: Path, stopped: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy" / "tq")
    shard = copy / "model-00001-of-00002.safetensors"
    os.utime(shard, ns=(1, 1))
    with pytest.raises(JournalError, match="or the source changed"):
        pack_folder(copy, stopped)


def test_a_missing_drive_is_named(source: Path, reference: list[dict[str, bytes]], stopped: list[Path]) -> None:
    away = stopped[1].with_name("away")
    stopped[1].rename(away)
    with pytest.raises(DriveError, match=r"b/stripe-001.colibri.partial is gone.*is the drive mounted"):
        pack_folder(source, stopped)
    assert not stopped[1].exists()
    away.rename(stopped[1])
    pack_folder(source, stopped)
    assert packed(stopped) == reference


def test_a_drive_of_another_pack_is_named(source: Path, stopped: list[Path], tmp_path: Path) -> None:
    other = [tmp_path / "c", tmp_path / "d"]
    with pytest.raises(DriveError):
        pack_folder(source, other, disk=FailingDisk("write", 55, errno.EIO), sync_bytes=SYNC_BYTES)
    with pytest.raises(
        FolderError, match=r"d/stripe-001.colibri.partial is stripe 1 of container .* wanted is stripe 1"
    ):
        pack_folder(source, [stopped[0], other[1]])


def test_the_parent_of_a_folder_must_exist(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=f"making {tmp_path}/drive/b: {tmp_path}/drive: No such file.*mounted"):
        pack_folder(source, [tmp_path / "a", tmp_path / "drive" / "b"])


def test_folders_that_hold_other_things_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tokenizer.json").write_text("mine")
    with pytest.raises(FolderError, match=r"a holds tokenizer\.json"):
        pack_folder(source, [tmp_path / "a"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "stripe-001.colibri").write_text("mine")
    with pytest.raises(FolderError, match=r"b holds stripe-001\.colibri"):
        pack_folder(source, [tmp_path / "c", tmp_path / "b"])
    with pytest.raises(FolderError, match="holds the checkpoint"):
        pack_folder(source, [source])
    with pytest.raises(FolderError, match=r"lies inside .*, which holds the checkpoint"):
        pack_folder(source, [tmp_path / "d", source / "sub"])
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(FolderError, match=r"lies inside .*, which holds the checkpoint"):
        pack_folder(source, [tmp_path / "link" / "sub"])
    assert not (source / "sub").exists()
    with pytest.raises(FolderError, match="is given twice"):
        pack_folder(source, [tmp_path / "d", tmp_path / "d"])
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "mine"
    assert (tmp_path / "b" / "stripe-001.colibri").read_text() == "mine"


def test_a_finished_pack_is_recognised_and_another_one_refused(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    first = pack_folder(source, folders)
    before = [files_of(folder) for folder in folders]
    assert pack_folder(source, folders) == first
    with pytest.raises(FolderError, match="a finished container of another source or with other options"):
        pack_folder(source, folders, precision="head=f32")
    with pytest.raises(FolderError, match="a finished container of another source"):
        pack_folder(write_td(tmp_path / "td"), folders)
    assert [files_of(folder) for folder in folders] == before


def test_a_source_that_was_written_over_since_is_not_called_packed(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy" / "tq")
    pack_folder(copy, [tmp_path / "a"])
    before = files_of(tmp_path / "a")
    shard = copy / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, (time.time() + 2, time.time() + 2))
    with pytest.raises(FolderError, match=r"model-00002-of-00002\.safetensors was changed after .*a was packed"):
        pack_folder(copy, [tmp_path / "a"])
    assert files_of(tmp_path / "a") == before


def test_a_pack_stopped_before_its_first_data_takes_no_stripe_of_another(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError):
        pack_folder(source, folders, disk=FailingDisk("write", 5, errno.EIO))
    assert pack_journal_units(folders[0]) == 0
    other = [tmp_path / "c", tmp_path / "d"]
    pack_folder(source, other, precision="experts=int8")
    before = [files_of(folder) for folder in other]
    with pytest.raises(FolderError, match=r"d/stripe-001\.colibri is of another container"):
        pack_folder(source, [folders[0], other[1]])
    assert [files_of(folder) for folder in other] == before
    unfinished = [tmp_path / "e", tmp_path / "f"]
    with pytest.raises(DriveError):
        pack_folder(source, unfinished, disk=FailingDisk("write", 55, errno.EIO), sync_bytes=SYNC_BYTES)
    stripe = (unfinished[1] / "stripe-001.colibri.partial").read_bytes()
    with pytest.raises(FolderError, match=r"f/stripe-001\.colibri\.partial is of the unfinished container"):
        pack_folder(source, [folders[0], unfinished[1]])
    assert (unfinished[1] / "stripe-001.colibri.partial").read_bytes() == stripe
    pack_folder(source, folders)


def pack_journal_units(folder: Path) -> int:
    """Lines of the journal behind the first."""
    return (folder / "pack.journal").read_bytes().count(b"\n") - 1


def test_a_folder_in_use_is_refused(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for index in (0, 1):
        folders[index].mkdir(exist_ok=True)
        lock = FolderLock(folders[index], exclusive=False)
        with pytest.raises(FolderError, match=f"{folders[index]} is in use"):
            pack_folder(source, folders)
        lock.close()
    pack_folder(source, folders)
    with open_container(folders[0], folders[1:]), pytest.raises(FolderError, match="is in use"):
        pack_folder(source, folders)


# ---- A13: numbers that are not -------------------------------------------------------------------------------------


def bent(tmp_path: Path, name: str, change: "torch.Tensor") -> Path:
    tensors = tq_tensors()
    assert tensors[name].shape == change.shape
    tensors[name] = change
    return write_checkpoint(tmp_path / "bent", TQ_CONFIG, tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("model.layers.1.mlp.experts.2.down_proj.weight", "layers.1.experts.2.down"),
        ("model.layers.0.self_attn.q_proj.weight", "layers.0.q"),
        ("model.layers.0.mlp.gate.weight", "layers.0.router"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_place(tmp_path: Path, name: str, label: str, value: float) -> None:
    weight = tq_tensors()[name].clone()
    weight[3, 17] = value
    with pytest.raises(CheckpointError, match=rf"{name}: NaN or infinity in {label} at row 3, column 17"):
        pack_folder(bent(tmp_path, name, weight), [tmp_path / "out"])
    unfinished([tmp_path / "out"])


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("model.layers.1.mlp.experts.2.down_proj.weight", "layers.1.experts.2.down"),
        ("model.layers.0.self_attn.q_proj.weight", "layers.0.q"),
    ],
)
def test_numbers_beyond_the_format_are_refused_by_place(tmp_path: Path, name: str, label: str) -> None:
    weight = tq_tensors()[name].clone()
    weight[3, 17] = 3e38
    with pytest.raises(
        CheckpointError, match=rf"{name}: {label}, counted from row 0: row 3, .* beyond the range of f16"
    ):
        pack_folder(bent(tmp_path, name, weight), [tmp_path / "out"])
    unfinished([tmp_path / "out"])


def test_an_all_zero_expert_is_legal_and_reported(tmp_path: Path) -> None:
    tensors = tq_tensors()
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.1.mlp.experts.2.{matrix}.weight"].zero_()
    manifest = pack_folder(write_checkpoint(tmp_path / "zero", TQ_CONFIG, tensors), [tmp_path / "out"])
    report = {report.tensor_class: report for report in manifest.report}
    assert report["experts"].zero_experts == 1
    assert 0.05 < report["experts"].relative_rms < 0.1


def test_a_group_of_zeros_stays_zero(tmp_path: Path) -> None:
    from colibri.packer.export import export

    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    weight = tq_tensors()[name].clone()
    weight[5] = 0
    pack_folder(bent(tmp_path, name, weight), [tmp_path / "out"])
    with open_container(tmp_path / "out") as container:
        export(container, tmp_path / "back", Silent())
    from safetensors.numpy import load_file

    back = load_file(tmp_path / "back" / "model-00001-of-00001.safetensors")[name]
    assert np.all(back[5] == 0)
    assert np.all(np.isfinite(back))


# ---- size ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Peak of a process that packs 317 MiB, most of it one tensor; the files are sparse."""
    config = {**TQ_CONFIG, "vocab_size": 2_600_000, "tie_word_embeddings": True, "num_hidden_layers": 1}
    tensors = tq_tensors({**TQ_CONFIG, "num_hidden_layers": 1})
    del tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"] = torch.zeros(1, 64, dtype=torch.bfloat16)
    folder = write_checkpoint(tmp_path / "large", config, tensors, shards=1, tokenizer=False)
    grow_tensor(folder / "model.safetensors", "model.embed_tokens.weight", 2_600_000)
    code = (
        "import sys; from colibri.packer.cli import main; code = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-P", "-c", code, str(folder), "--out", str(tmp_path / "out"), "--precision"]
    done = subprocess.run([*command, "embedding=bf16"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Not ru_maxrss: exec lets a child inherit the peak of its parent.
    peak = int(done.stderr.splitlines()[-1]) << 10
    assert (tmp_path / "out" / "dense.safetensors").stat().st_size > 317 << 20
    assert peak < 200 << 20


def grow_tensor(path: Path, name: str, rows: int) -> None:
    """Give a one-file checkpoint's tensor [1, n] more rows, as a hole at the end of the file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    begin, end = header[name]["data_offsets"]
    row = end - begin
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - row for offset in entry["data_offsets"]]
    kept = body[:begin] + body[end:]
    header[name]["shape"][0] = rows
    header[name]["data_offsets"] = [len(kept), len(kept) + row * rows]
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + kept)
        file.truncate(8 + len(text) + len(kept) + row * rows)


def test_what_readers_would_refuse_is_refused_before_the_work(tmp_path: Path) -> None:
    folder = write_tq(tmp_path / "tq")
    (folder / "merges.txt").touch()
    os.truncate(folder / "merges.txt", (256 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"merges\.txt is 268435457 bytes, readers take 268435456"):
        pack_folder(folder, [tmp_path / "out"])
    (folder / "merges.txt").unlink()
    with (
        mock.patch("colibri.core.container_check.RECORD_LIMIT", 7),
        pytest.raises(CheckpointError, match=r"cannot be packed: expert_layers\[1\]: more than 7 experts"),
    ):
        pack_folder(folder, [tmp_path / "out"])
    assert not (tmp_path / "out").exists()
