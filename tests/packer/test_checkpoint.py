"""Opening and reading a checkpoint: the index, the shards, the descriptors. Field reports A01 to A05, A21 to A23."""

import json
import os
import random
import resource
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError, CorruptCheckpointError
from colibri.packer.families import resolve
from colibri.packer.model_source import ModelSource
from testkit.checkpoints import (
    INDEX,
    TQ_CONFIG,
    shard_name,
    split,
    tq_tensors,
    write_checkpoint,
    write_index,
    write_tq,
)

SHARD_1, SHARD_2 = shard_name(0, 2), shard_name(1, 2)
DOWN_0 = "model.layers.0.mlp.experts.0.down_proj.weight"


@pytest.fixture
def tq(tmp_path: Path) -> Path:
    return write_tq(tmp_path / "tq")


def weight_map(folder: Path) -> dict[str, str]:
    content: dict[str, dict[str, str]] = json.loads((folder / INDEX).read_text())
    return content["weight_map"]


def contents(folder: Path) -> dict[str, bytes]:
    with Checkpoint.open(folder) as checkpoint:
        return {name: bytes(checkpoint.read(name)) for name in checkpoint.tensors}


def resolved(folder: Path) -> ModelSource:
    with Checkpoint.open(folder) as checkpoint:
        return resolve(checkpoint)


def expected() -> dict[str, bytes]:
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tq_tensors().items()}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught, Checkpoint.open(folder) as checkpoint:
        resolve(checkpoint)
    return str(caught.value)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_tensor_is_read_as_it_was_written(tq: Path) -> None:
    assert contents(tq) == expected()


def test_a_single_file_needs_no_index_and_any_name_will_do(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TQ_CONFIG, tq_tensors(), shards=1)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert contents(folder) == expected()


def test_bundled_files_are_those_that_are_there(tq: Path) -> None:
    with Checkpoint.open(tq) as checkpoint:
        names = {path.name for path in checkpoint.bundled}
        assert checkpoint.read_file(tq / "config.json") == (tq / "config.json").read_bytes()
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


class TestA01ShardOfAnyName:
    def test_a_tensor_in_a_shard_not_called_model(self, tq: Path) -> None:
        plain = resolved(tq)
        holder = weight_map(tq)[DOWN_0]
        rest = load_file(tq / holder)
        save_file({DOWN_0: rest.pop(DOWN_0)}, tq / "extra.safetensors")
        save_file(rest, tq / holder)
        write_index(tq, {**weight_map(tq), DOWN_0: "extra.safetensors"})
        assert contents(tq) == expected()
        assert resolved(tq) == plain


class TestA02ShardAbsent:
    def test_missing_shard_is_named_with_the_number_of_its_tensors(self, tq: Path) -> None:
        held = len(load_file(tq / SHARD_2))
        (tq / SHARD_2).unlink()
        assert f"{SHARD_2!r} with {held} tensors" in refusal(tq)

    def test_renamed_shard_counts_as_missing(self, tq: Path) -> None:
        (tq / SHARD_2).rename(tq / "model-2.safetensors")
        assert SHARD_2 in refusal(tq)

    def test_index_that_places_a_tensor_in_the_wrong_shard(self, tq: Path) -> None:
        places = weight_map(tq)
        right = places[DOWN_0]
        wrong = SHARD_1 if right == SHARD_2 else SHARD_2
        write_index(tq, {**places, DOWN_0: wrong})
        text = refusal(tq)
        assert DOWN_0 in text
        assert wrong in text
        assert f"it is in {right}" in text

    def test_index_that_lists_a_tensor_of_no_shard(self, tq: Path) -> None:
        write_index(tq, {**weight_map(tq), "model.ghost.weight": SHARD_1})
        assert "'model.ghost.weight'" in refusal(tq)


class TestA03Copies:
    def put_stale_copy(self, folder: Path) -> str:
        """Adds another DOWN_0 to the shard that the index does not name for it; returns the right shard's name."""
        right = weight_map(folder)[DOWN_0]
        wrong = SHARD_1 if right == SHARD_2 else SHARD_2
        tensors = load_file(folder / wrong)
        save_file({**tensors, DOWN_0: torch.zeros(64, 96, dtype=torch.bfloat16)}, folder / wrong)
        return right

    def test_the_index_decides_and_the_copy_is_counted(self, tq: Path) -> None:
        right = self.put_stale_copy(tq)
        assert contents(tq) == expected()
        with Checkpoint.open(tq) as checkpoint:
            assert checkpoint.ignored_copies == 1
            assert checkpoint.tensors[DOWN_0].file.name == right
            assert any("1 copy of a tensor" in warning for warning in checkpoint.warnings)

    def test_without_index_it_is_refused(self, tq: Path) -> None:
        self.put_stale_copy(tq)
        (tq / INDEX).unlink()
        text = refusal(tq)
        assert INDEX in text
        assert DOWN_0 in text

    def test_a_needed_tensor_that_the_index_leaves_out_is_refused(self, tq: Path) -> None:
        places = weight_map(tq)
        holder = places.pop(DOWN_0)
        write_index(tq, places)
        text = refusal(tq)
        assert DOWN_0 in text
        assert holder in text
        assert "index does not list it" in text

    def test_an_unneeded_one_gives_a_named_warning(self, tq: Path) -> None:
        save_file({**load_file(tq / SHARD_1), "model.extra": torch.ones(3)}, tq / SHARD_1)
        assert any("'model.extra'" in warning for warning in resolved(tq).warnings)

    def test_the_order_of_the_folder_does_not_matter(self, tq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put_stale_copy(tq)
        plain = resolved(tq)
        listed = Path.iterdir

        def shuffled(path: Path) -> Iterator[Path]:
            entries = list(listed(path))
            random.Random(5).shuffle(entries)
            return iter(entries)

        monkeypatch.setattr(Path, "iterdir", shuffled)
        assert resolved(tq) == plain

    def test_two_sets_of_weights_are_refused(self, tq: Path) -> None:
        save_file(tq_tensors(seed=9), tq / "model.safetensors")
        assert "two sets of weights" in refusal(tq)

    def test_a_file_that_the_index_does_not_name_is_reported(self, tq: Path) -> None:
        save_file(tq_tensors(seed=9), tq / "consolidated.safetensors")
        assert contents(tq) == expected()
        assert any("consolidated.safetensors" in warning for warning in resolved(tq).warnings)


class TestA04Truncated:
    @pytest.mark.parametrize("lost", ["1", "4096", "data", "half header", "all"])
    def test_a_cut_shard_is_refused_before_packing(self, tq: Path, lost: str) -> None:
        path = tq / SHARD_2
        raw = path.read_bytes()
        header = 8 + struct.unpack("<Q", raw[:8])[0]
        keep = {
            "1": len(raw) - 1,
            "4096": len(raw) - 4096,
            "data": header,
            "half header": header // 2,
            "all": 0,
        }[lost]
        path.write_bytes(raw[:keep])
        text = refusal(tq)
        assert SHARD_2 in text
        assert str(keep) in text

    def test_a_shard_cut_after_opening_names_file_offset_wanted_and_got(self, tq: Path) -> None:
        with Checkpoint.open(tq) as checkpoint:
            last = max(checkpoint.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset))
            os.truncate(last.file, last.offset + 10)
            with pytest.raises(CorruptCheckpointError) as caught:
                checkpoint.read(last.name)
        text = str(caught.value)
        assert last.file.name in text
        assert f"wanted {last.bytes} bytes at offset {last.offset}, got 10" in text

    def test_a_shard_replaced_between_two_reads_is_noticed(self, tq: Path) -> None:
        with Checkpoint.open(tq, max_open_files=1) as checkpoint:
            first, second = (
                next(t for t in checkpoint.tensors.values() if t.file == file) for file in checkpoint.files
            )
            checkpoint.read(first.name)
            checkpoint.read(second.name)
            save_file(tq_tensors(seed=4), first.file)
            with pytest.raises(CorruptCheckpointError, match="changed while it was being packed"):
                checkpoint.read(first.name)


def pad_header(path: Path, length: int) -> None:
    raw = path.read_bytes()
    (old,) = struct.unpack("<Q", raw[:8])
    assert length >= old
    path.write_bytes(struct.pack("<Q", length) + raw[8 : 8 + old].ljust(length) + raw[8 + old :])


class TestA05HeaderLength:
    @pytest.mark.parametrize("delta", [-8, -1, 0, 1, 8])
    @pytest.mark.parametrize("piece", [16384, 100_000])
    def test_any_length_around_the_size_of_a_piece_works(self, tmp_path: Path, piece: int, delta: int) -> None:
        folder = write_checkpoint(tmp_path, TQ_CONFIG, tq_tensors(), shards=1)
        pad_header(folder / "model.safetensors", piece + delta)
        with Checkpoint.open(folder, piece_bytes=piece) as checkpoint:
            assert {name: bytes(checkpoint.read(name)) for name in checkpoint.tensors} == expected()

    def test_trailing_bytes_are_refused(self, tq: Path) -> None:
        with (tq / SHARD_1).open("ab") as file:
            file.write(b"\0")
        text = refusal(tq)
        assert SHARD_1 in text
        assert "1 bytes behind the last tensor" in text

    def test_a_git_lfs_pointer_has_its_own_message(self, tq: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
        (tq / SHARD_1).write_bytes(pointer)
        text = refusal(tq)
        assert "Git LFS pointer" in text
        assert SHARD_1 in text


class TestA21LargeTensors:
    @pytest.mark.parametrize("piece", [1, 7, 96, 4096])
    def test_pieces_of_any_size_give_the_same_bytes(self, tmp_path: Path, piece: int) -> None:
        tensors = {"small": torch.arange(48, dtype=torch.int16).view(torch.bfloat16)}
        folder = write_checkpoint(tmp_path, TQ_CONFIG, tensors, shards=1)
        with Checkpoint.open(folder, piece_bytes=piece) as checkpoint:
            assert bytes(checkpoint.read("small")) == tensors["small"].view(torch.uint8).numpy().tobytes()

    def test_rows_beyond_four_gigabytes_of_a_sparse_file(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        rows, cols = 1_200_000, 1024  # 2.46 GB in bf16: more than one read(2) moves
        size = rows * cols * 2
        header = json.dumps({"big": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [0, size]}}).encode()
        path = tmp_path / "model.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size)
            file.seek(8 + len(header) + size - 2)
            file.write(b"\x80\x3f")
        with Checkpoint.open(tmp_path) as checkpoint:
            tail = checkpoint.read("big", slice(rows - 1, rows))
        assert bytes(tail) == bytes(2 * cols - 2) + b"\x80\x3f"

    def test_a_signal_during_a_read_loses_nothing(self, tq: Path) -> None:
        ticks = []
        before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            with Checkpoint.open(tq, piece_bytes=64) as checkpoint:
                read = {name: bytes(checkpoint.read(name)) for name in checkpoint.tensors}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert read == expected()
        assert ticks

    def test_short_reads_are_continued(self, tq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = os.preadv

        def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            return whole(descriptor, [buffers[0][: max(1, buffers[0].nbytes // 3)]], offset)

        monkeypatch.setattr(os, "preadv", short)
        assert contents(tq) == expected()


class TestA22Links:
    def blobs(self, tq: Path) -> Path:
        """A snapshot folder of relative links into ../../blobs, as the hub's cache has it."""
        root = tq.parent / "cache"
        snapshot = root / "snapshots" / "abc"
        (root / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for number, path in enumerate(sorted(tq.iterdir())):
            path.rename(root / "blobs" / str(number))
            (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
        return snapshot

    def test_relative_links_work_from_any_directory(self, tq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = self.blobs(tq)
        monkeypatch.chdir(snapshot.parent)
        with Checkpoint.open(Path("abc"), max_open_files=1) as checkpoint:
            monkeypatch.chdir("/")
            assert {name: bytes(checkpoint.read(name)) for name in checkpoint.tensors} == expected()

    @pytest.mark.parametrize("name", [SHARD_2, "config.json", "tokenizer.json", INDEX])
    def test_a_dangling_link_is_named_with_its_target(self, tq: Path, name: str) -> None:
        snapshot = self.blobs(tq)
        target = os.readlink(snapshot / name)
        (snapshot / target).unlink()
        text = refusal(snapshot)
        assert name in text
        assert repr(target) in text


class TestA23ManyShards:
    def test_300_shards_with_few_descriptors(self, tmp_path: Path) -> None:
        tensors = {f"tensor.{number}": torch.full((3,), float(number)) for number in range(300)}
        folder = write_checkpoint(tmp_path, TQ_CONFIG, tensors, shards=300)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            read = contents(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(split(tensors, 300)) == 300
        assert read == {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    def test_threads_share_few_descriptors(self, tmp_path: Path) -> None:
        tensors = {f"tensor.{number}": torch.full((5000,), float(number)) for number in range(12)}
        folder = write_checkpoint(tmp_path, TQ_CONFIG, tensors, shards=6)
        before = descriptors()
        with Checkpoint.open(folder, piece_bytes=1000, max_open_files=1) as checkpoint, ThreadPoolExecutor(4) as pool:
            names = sorted(tensors) * 10
            for name, data in zip(names, pool.map(lambda name: bytes(checkpoint.read(name)), names), strict=True):
                assert data == tensors[name].numpy().tobytes()
            assert descriptors() <= before + 4  # one for each thread, whatever the limit
        assert descriptors() == before

    def test_twenty_rounds_leave_no_descriptor(self, tq: Path) -> None:
        contents(tq)
        before = descriptors()
        for _ in range(20):
            contents(tq)
        assert descriptors() == before

    def test_a_failed_open_leaves_no_descriptor(self, tq: Path) -> None:
        (tq / SHARD_2).write_bytes(b"")
        before = descriptors()
        for _ in range(20):
            with pytest.raises(CheckpointError):
                Checkpoint.open(tq)
        assert descriptors() == before

    def test_reading_after_close_is_an_error(self, tq: Path) -> None:
        with Checkpoint.open(tq) as checkpoint:
            pass
        with pytest.raises(ValueError, match="read after close"):
            checkpoint.read(DOWN_0)


class TestIndexText:
    @pytest.mark.parametrize(
        "place", ["../x.safetensors", "/x.safetensors", "a\\b.safetensors", "", ".", "a//b", "\ud800", 7]
    )
    def test_a_shard_outside_the_folder_is_refused(self, tq: Path, place: object) -> None:
        places: dict[str, object] = {**weight_map(tq), DOWN_0: place}
        (tq / INDEX).write_text(json.dumps({"weight_map": places}))
        assert DOWN_0 in refusal(tq)

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": 3}', "{}"])
    def test_an_index_that_is_none_is_refused(self, tq: Path, text: str) -> None:
        (tq / INDEX).write_text(text)
        assert INDEX in refusal(tq)

    def test_a_tensor_listed_twice_is_refused(self, tq: Path) -> None:
        (tq / INDEX).write_text(f'{{"weight_map": {{"a": "{SHARD_1}", "a": "{SHARD_2}"}}}}')
        assert "'a' occurs twice" in refusal(tq)

    def test_shards_in_a_folder_below_with_long_counters(self, tq: Path) -> None:
        (tq / "part").mkdir()
        moved = "part/model-000002-of-000002.safetensors"
        (tq / SHARD_2).rename(tq / moved)
        write_index(tq, {name: moved if shard == SHARD_2 else shard for name, shard in weight_map(tq).items()})
        assert contents(tq) == expected()


class TestFolder:
    def test_no_folder(self, tmp_path: Path) -> None:
        assert "not a folder" in refusal(tmp_path / "nothing")

    def test_no_config(self, tq: Path) -> None:
        (tq / "config.json").unlink()
        assert "config.json" in refusal(tq)

    def test_no_weights(self, tq: Path) -> None:
        for path in [*tq.glob("*.safetensors"), tq / INDEX]:
            path.unlink()
        assert "no .safetensors file" in refusal(tq)

    def test_a_named_pipe_is_refused_without_waiting(self, tq: Path) -> None:
        (tq / SHARD_1).unlink()
        os.mkfifo(tq / SHARD_1)
        assert "not a regular file" in refusal(tq)


class TestReadInto:
    def test_a_range_of_elements(self, tq: Path) -> None:
        with Checkpoint.open(tq) as checkpoint:
            buffer = bytearray(10)
            checkpoint.read_into(DOWN_0, buffer, start_element=7, n_elements=5)
            assert bytes(buffer) == expected()[DOWN_0][14:24]

    @pytest.mark.parametrize(("start", "count", "size"), [(-1, 2, 4), (0, 64 * 96 + 1, 4), (0, 2, 5), (64 * 96, 1, 2)])
    def test_ranges_and_buffers_that_do_not_fit(self, tq: Path, start: int, count: int, size: int) -> None:
        with Checkpoint.open(tq) as checkpoint, pytest.raises(ValueError, match="down_proj"):
            checkpoint.read_into(DOWN_0, bytearray(size), start_element=start, n_elements=count)

    def test_rows(self, tq: Path) -> None:
        with Checkpoint.open(tq) as checkpoint:
            assert bytes(checkpoint.read(DOWN_0, slice(3, 5))) == expected()[DOWN_0][3 * 192 : 5 * 192]
            assert checkpoint.read(DOWN_0, slice(5, 5)).nbytes == 0
