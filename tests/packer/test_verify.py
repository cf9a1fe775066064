"""verify reads everything, names every fault with file, tensor or expert and offset, and stops at none."""

import os
import random
import shutil
from pathlib import Path

import pytest

from colibri.core.container import ContainerError, open_container
from colibri.core.paths import FolderLock
from colibri.packer.progress import Silent
from colibri.packer.verify import total_bytes, verify
from testkit.checkpoints import write_td
from testkit.packing import copy_container, pack_folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("container")
    folders = [root / "a", root / "b"]
    pack_folder(write_td(root / "td"), folders)
    return folders


@pytest.fixture
def folders(original: list[Path], tmp_path: Path) -> list[Path]:
    return copy_container(original, tmp_path)


def faults(folders: list[Path]) -> list[str]:
    return verify(folders[0], folders[1:], Silent()).faults


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_container_in_order_has_no_faults(folders: list[Path]) -> None:
    verdict = verify(folders[0], folders[1:], Silent())
    assert verdict.faults == []
    assert verdict.checked_bytes == total_bytes(verdict.manifest) > 100_000


def test_progress_adds_up_to_what_was_announced(folders: list[Path]) -> None:
    class Sum(Silent):
        total = 0

        def advance(self, count: int) -> None:
            self.total += count

    progress = Sum()
    verdict = verify(folders[0], folders[1:], progress)
    assert progress.total == total_bytes(verdict.manifest)


@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_of_the_data_is_found(folders: list[Path], seed: int) -> None:
    source = random.Random(seed)
    with open_container(folders[0], folders[1:]) as container:
        first = min(tensor.codes.offset for tensor in container.manifest.dense)
    names = [(folders[0] / "dense.safetensors", first), (folders[0] / "stripe-000.colibri", 4096)]
    path, begin = [*names, (folders[1] / "stripe-001.colibri", 4096)][seed % 3]
    flip(path, source.randrange(begin, path.stat().st_size), source.randrange(8))
    found = faults(folders)
    assert len(found) == 1
    assert str(path) in found[0]
    assert "CRC-32C is" in found[0]


def test_every_fault_is_named(folders: list[Path]) -> None:
    with open_container(folders[0], folders[1:]) as container:
        manifest = container.manifest
        extents = container.extents(0)
    q = next(tensor for tensor in manifest.dense if tensor.name == "layers.0.q")
    flip(folders[0] / "dense.safetensors", q.codes.offset + 5)
    flip(folders[0] / "dense.safetensors", q.scales.offset)
    for expert in (2, 5):
        extent = extents[expert, 0]
        flip(folders[extent["stripe"]] / f"stripe-00{extent['stripe']}.colibri", int(extent["file_offset"]) + 77)
    flip(folders[0] / "tokenizer.json", 3)
    found = "\n".join(faults(folders))
    assert found.count("\n") == 4
    assert f"tensor layers.0.q, codes, {q.codes.bytes} bytes at offset {q.codes.offset}: CRC-32C is" in found
    assert f"tensor layers.0.q, scales, {q.scales.bytes} bytes at offset {q.scales.offset}: CRC-32C is" in found
    for expert in (2, 5):
        assert f"layer 1, expert {expert}: 12288 bytes at offset {extents[expert, 0]['file_offset']}: CRC-32C" in found
    assert "tokenizer.json: was changed" in found


def test_a_missing_stripe_does_not_hide_other_faults(folders: list[Path]) -> None:
    (folders[1] / "stripe-001.colibri").unlink()
    flip(folders[0] / "dense.safetensors", (folders[0] / "dense.safetensors").stat().st_size - 1)
    found = "\n".join(faults(folders))
    assert "stripe 1 of 2 is missing" in found
    assert "dense.safetensors: tensor" in found
    assert found.count("\n") == 1


def test_missing_tables_and_files_are_all_named(folders: list[Path]) -> None:
    for name in ("extents.crc32c", "dense.safetensors", "tokenizer.json"):
        (folders[0] / name).unlink()
    os.truncate(folders[1] / "stripe-001.colibri", 5000)
    found = "\n".join(faults(folders))
    for name in ("extents.crc32c", "dense.safetensors", "tokenizer.json", "stripe-001.colibri: is cut short"):
        assert name in found


def test_without_a_manifest_there_is_nothing_to_check_against(folders: list[Path]) -> None:
    flip(folders[0] / "manifest.json", 500)
    with pytest.raises(ContainerError, match=r"manifest\.json"):
        faults(folders)


def test_a_container_that_is_being_written_is_not_verified(folders: list[Path]) -> None:
    lock = FolderLock(folders[1], exclusive=True)
    with pytest.raises(ContainerError, match="is being written by another process"):
        faults(folders)
    lock.close()


def test_a_cut_stripe_is_one_fault_and_two_missing_ones_are_two(folders: list[Path]) -> None:
    os.truncate(folders[1] / "stripe-001.colibri", 5000)
    (found,) = faults(folders)
    assert "stripe-001.colibri: is cut short" in found
    (folders[0] / "stripe-000.colibri").unlink()
    (folders[1] / "stripe-001.colibri").unlink()
    missing = faults(folders)
    assert [text.split(":")[0] for text in missing] == [f"stripe {number} of 2 is missing" for number in (0, 1)]


# ---- a stripe that is not this container's, or not in its place: one fault, not one for each of its extents ----------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three stripes of equal weight."""
    root = tmp_path_factory.mktemp("three")
    folders = [root / name for name in "abc"]
    pack_folder(write_td(root / "td"), folders, weights=[1, 1, 1])
    return folders


def stripes_of(folders: list[Path]) -> list[Path]:
    return [folder / f"stripe-{number:03d}.colibri" for number, folder in enumerate(folders)]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stripe_of_another_container_is_one_fault(three: list[Path], tmp_path: Path, number: int) -> None:
    folders = copy_container(three, tmp_path / "ours")
    other = [tmp_path / "other" / name for name in "abc"]
    other[0].parent.mkdir()
    pack_folder(write_td(tmp_path / "td"), other, weights=[1, 1, 1])
    ours, foreign = stripes_of(folders)[number], stripes_of(other)[number]
    assert foreign.stat().st_size == ours.stat().st_size, "nothing but its header tells it apart"
    shutil.copyfile(foreign, ours)
    (found,) = faults(folders)
    assert str(ours) in found
    assert "belongs to container" in found


def test_stripes_whose_contents_are_swapped_are_one_fault_each(three: list[Path], tmp_path: Path) -> None:
    folders = copy_container(three, tmp_path)
    first, second = stripes_of(folders)[1:]
    kept = first.read_bytes()
    shutil.copyfile(second, first)
    second.write_bytes(kept)
    assert faults(folders) == [
        f"{first}: holds stripe 2 by its header: swapped with {second.name}?",
        f"{second}: holds stripe 1 by its header: swapped with {first.name}?",
    ]


def test_stripes_that_have_changed_their_folders_are_no_fault(three: list[Path], tmp_path: Path) -> None:
    folders = copy_container(three, tmp_path)
    first, second = stripes_of(folders)[1:]
    first.rename(folders[2] / first.name)
    second.rename(folders[1] / second.name)
    assert faults(folders) == []


@pytest.mark.parametrize("size", [0, 50, 4096, 20_000, -1])
def test_a_stripe_that_was_cut_anywhere_is_one_fault(three: list[Path], tmp_path: Path, size: int) -> None:
    folders = copy_container(three, tmp_path)
    path = stripes_of(folders)[2]
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    (found,) = faults(folders)
    assert str(path) in found
