"""Bytes that are wrong or missing: the error names drive, offset, layer and expert, and only who needed them fails."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from colibri.core.container import Container, open_container
from colibri.core.core import Model, Row
from colibri.core.errors import CorruptError, InvalidError, NonFiniteError, StorageError
from colibri.core.tensors import crc32c
from colibri.v1 import manifest_pb2
from testkit.models import GREEDY, OPTIONS, Tiny, decode, make_tiny, opened, prefill, run, same_bits, some_tokens

TOKENS = some_tokens(40)
LAYER_INDEX, EXPERT = 1, 3  # of the expert layers: layer 2 of the model


@pytest.fixture
def own(tmp_path: Path, tiny_int4: Tiny) -> Tiny:
    """A copy of tiny_int4 that a test may damage."""
    folders = []
    for number, folder in enumerate(tiny_int4.folders):
        folders.append(tmp_path / f"drive{number}")
        folders[-1].mkdir()
        for file in folder.iterdir():
            (folders[-1] / file.name).write_bytes(file.read_bytes())
    return Tiny(tiny_int4.checkpoint, tuple(folders))


@contextmanager
def container_of(tiny: Tiny) -> Iterator[Container]:
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        yield container


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def extent_of(container: Container, layer_index: int, expert: int) -> tuple[Path, int, int]:
    """File, offset and stripe number of the first extent of an expert."""
    extent = container.extents(layer_index)[expert, 0]
    return container.stripe_paths[int(extent["stripe"])], int(extent["file_offset"]), int(extent["stripe"])


def who_needs_it(model: Model, words: str) -> list[int]:
    """First tokens whose step fails with a CorruptError that contains `words`; no other error may come."""
    needing = []
    for token in range(60):
        seq = model.sequence()
        row = Row(seq, token, GREEDY)
        model.step([row], [])
        if row.error is not None:
            assert isinstance(row.error, CorruptError)
            assert words in str(row.error)
            assert seq.length == 0
            needing.append(token)
        seq.close()
    return needing


def test_a_corrupt_record_fails_only_the_rows_that_route_to_it(own: Tiny) -> None:
    with opened(own, kv_pages=60) as model:
        expected = [decode(model, model.sequence(), [token])[0] for token in range(60)]
    with container_of(own) as container:
        path, offset, stripe = extent_of(container, LAYER_INDEX, EXPERT)
    flip_byte(path, offset + 777)
    words = f"layer 2 expert {EXPERT}: "
    with opened(own, expert_slots=64) as model:  # room for every expert
        needing = who_needs_it(model, words)
        assert 0 < len(needing) < 60
    with opened(own, expert_slots=2, ring_slots=2) as model:
        assert who_needs_it(model, words) == needing
        for start in range(0, 60, 4):
            rows = [Row(model.sequence(), token, GREEDY, True) for token in range(start, start + 4)]
            model.step(rows, [])
            for row in rows:
                if row.token in needing:
                    assert isinstance(row.error, CorruptError)
                    assert f"at offset {offset} of stripe {stripe} ({path}) fail their checksum" in str(row.error)
                    assert row.seq.length == 0
                else:
                    assert row.error is None
                    assert row.logits is not None
                    assert same_bits(row.logits, expected[row.token])
                row.seq.close()
        assert model.stats().checksum_errors >= len(needing)
        assert model.stats().kv_pages_free == OPTIONS.kv_pages


def test_a_prefill_over_a_corrupt_record_fails_and_another_one_runs(own: Tiny) -> None:
    with container_of(own) as container:
        path, offset, _ = extent_of(container, LAYER_INDEX, EXPERT)
    flip_byte(path, offset)
    with opened(own) as model:
        needing = who_needs_it(model, "layer 2")
        fine = next(token for token in range(60) if token not in needing)
        bad, good = model.sequence(), model.sequence()
        cursors = [model.prefill(bad, [needing[0]], GREEDY), model.prefill(good, [fine], GREEDY)]
        model.step([], cursors)
        assert isinstance(cursors[0].error, CorruptError)
        assert (bad.length, good.length) == (0, 1)
        assert cursors[1].done
        cursors[0].close()
        prefill(model, bad, [fine])


def test_a_repaired_record_is_read_again_without_reopening(own: Tiny) -> None:
    with opened(own) as model:
        expected = prefill(model, model.sequence(), TOKENS)
    with container_of(own) as container:
        path, offset, _ = extent_of(container, LAYER_INDEX, EXPERT)
    flip_byte(path, offset)
    with opened(own, expert_slots=16) as model:
        with pytest.raises(CorruptError):
            run(model, cursor := model.prefill(model.sequence(), TOKENS, GREEDY))
        cursor.close()
        flip_byte(path, offset)
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)


def test_a_stripe_that_is_cut_off_while_it_is_open_is_named(own: Tiny) -> None:
    with opened(own) as model:
        with container_of(own) as container:
            path, offset, stripe = extent_of(container, LAYER_INDEX, EXPERT)
        os.truncate(path, offset + 4096)
        cursor = model.prefill(model.sequence(), TOKENS, GREEDY)
        model.step([], [cursor])
        assert isinstance(cursor.error, CorruptError)
        assert f"stripe {stripe} ({path}) ends at offset {offset + 4096}" in str(cursor.error)
        assert model.stats().read_errors > 0


def test_a_hole_in_a_stripe_is_found(own: Tiny) -> None:
    with container_of(own) as container:
        path, offset, _ = extent_of(container, LAYER_INDEX, EXPERT)
    size = path.stat().st_size
    os.truncate(path, offset)
    os.truncate(path, size)
    with opened(own) as model, pytest.raises(CorruptError, match=r"layer 2 expert .* fail their checksum"):
        prefill(model, model.sequence(), TOKENS)


@contextmanager
def refused(container: Container, kind: type[Exception], words: str) -> Iterator[None]:
    """After what the block does, the model is not opened."""
    yield
    with pytest.raises(kind, match=words):
        Model(container, OPTIONS)


# The container has been checked by open_container; what changes after that is the core's to find.


def test_a_stripe_that_is_too_short_is_named(own: Tiny) -> None:
    with container_of(own) as container, refused(container, CorruptError, r"stripe 1 .* the file has \d+ bytes"):
        os.truncate(container.stripe_paths[1], container.stripe_paths[1].stat().st_size - 4096)


@pytest.mark.parametrize(
    ("offset", "words"),
    [(3, "magic"), (8, "fails its checksum"), (13, "fails its checksum"), (30, "fails its checksum")],
)
def test_a_damaged_header_is_named(own: Tiny, offset: int, words: str) -> None:
    with container_of(own) as container, refused(container, CorruptError, f"stripe 1 .*{words}"):
        flip_byte(container.stripe_paths[1], offset)


def test_swapped_stripes_are_named(own: Tiny) -> None:
    with container_of(own) as container, refused(container, CorruptError, "the file is stripe 1 of 2, expected 0 of 2"):
        for path, stripe in zip(reversed(container.stripe_paths), container.manifest.layout.stripes, strict=True):
            with path.open("r+b") as file:  # long enough, so that the number is what is wrong
                file.truncate(max(stripe.bytes, path.stat().st_size))
        container.stripe_paths.reverse()


def test_a_missing_stripe_is_named(own: Tiny) -> None:
    with container_of(own) as container, refused(container, StorageError, "stripe 1 .*open failed: No such file"):
        container.stripe_paths[1].unlink()


def dense_tensor(container: Container, name: str) -> manifest_pb2.DenseTensor:
    (tensor,) = (tensor for tensor in container.manifest.dense if tensor.name == name)
    return tensor


@pytest.mark.parametrize(("name", "kind"), [("layers.1.k", "codes"), ("layers.1.k", "scales"), ("final_norm", "codes")])
def test_a_corrupt_dense_tensor_is_named(own: Tiny, name: str, kind: str) -> None:
    with container_of(own) as container:
        offset = getattr(dense_tensor(container, name), kind).offset
        flip_byte(container.dense_path, offset)
        with Model(container, OPTIONS) as model:
            with pytest.raises(CorruptError, match=rf"tensor {name}: {kind} \(\d+ bytes at offset {offset}\) fail"):
                model.load()
            with pytest.raises(InvalidError, match="loaded already"):
                model.load()
            with pytest.raises(InvalidError, match="not loaded"):
                model.step([], [])


def test_a_dense_file_that_is_cut_off_is_named(own: Tiny) -> None:
    with container_of(own) as container, Model(container, OPTIONS) as model:
        os.truncate(container.dense_path, dense_tensor(container, "layers.2.o").codes.offset + 5)
        with pytest.raises(CorruptError, match=r"dense.safetensors ends at offset \d+, inside tensor"):
            model.load()


def test_progress_of_loading_reaches_the_total(own: Tiny) -> None:
    with container_of(own) as container, Model(container, OPTIONS) as model:
        model.load()
        stats = model.stats()
        blobs = [(t.codes.bytes, t.scales.bytes, t.mins.bytes) for t in container.manifest.dense]
        assert stats.load_bytes_done == stats.load_bytes_total == sum(map(sum, blobs))


def poison(container: Container, name: str, first: int, count: int) -> None:
    """Make NaN of `count` f32 values of a dense tensor from the one numbered `first`, with a checksum that fits."""
    tensor = dense_tensor(container, name)
    with container.dense_path.open("r+b") as file:
        file.seek(tensor.codes.offset)
        values = np.frombuffer(file.read(tensor.codes.bytes), "<f4").copy()
        values[first : first + count] = np.nan
        file.seek(tensor.codes.offset)
        file.write(values.tobytes())
    tensor.codes.crc32c = crc32c(values)


def test_what_is_not_a_number_fails_only_its_own_row(tmp_path: Path) -> None:
    tiny = make_tiny("olmoe", tmp_path)
    with opened(tiny) as model:
        expected = decode(model, model.sequence(), [6])[0]
    with container_of(tiny) as container:
        poison(container, "embedding", 5 * 60, 60)
        with Model(container, OPTIONS) as model:
            model.load()
            rows = [Row(model.sequence(), token, GREEDY, True) for token in (5, 6)]
            model.step(rows, [])
            assert isinstance(rows[0].error, NonFiniteError)
            assert "layer 0: the router's logits at position 0" in str(rows[0].error)
            assert rows[0].seq.length == 0
            assert rows[1].error is None
            assert rows[1].logits is not None
            assert same_bits(rows[1].logits, expected)
            with pytest.raises(NonFiniteError, match="layer 0: the router's logits at position 2"):
                run(model, model.prefill(model.sequence(), [6, 6, 5, 6], GREEDY))


def test_logits_that_are_not_numbers_are_reported(tmp_path: Path) -> None:
    tiny = make_tiny("olmoe", tmp_path)
    with container_of(tiny) as container:
        poison(container, "head", 7, 1)
        with Model(container, OPTIONS) as model:
            model.load()
            seq = model.sequence()
            row = Row(seq, 6, GREEDY)
            model.step([row], [])
            assert isinstance(row.error, NonFiniteError)
            assert "the logits after position 0" in str(row.error)
            with pytest.raises(NonFiniteError, match="the logits after position 2"):
                run(model, model.prefill(seq, [6, 6, 6], GREEDY))
            assert seq.length == 0
