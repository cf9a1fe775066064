"""A mirrored container: two copies of every extent on two drives, and each can be lost."""

import os
import shutil
from pathlib import Path

import pytest

from colibri.core.container import Container, ContainerError, open_container
from colibri.core.container_files import StripeHeader
from colibri.core.core_options import COptions, ModelOptions
from colibri.packer import cli
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.export import export
from colibri.packer.layout import LayoutError
from colibri.packer.progress import Silent
from colibri.packer.verify import verify
from testkit.checkpoints import TQ_CONFIG, tq_tensors, write_checkpoint, write_tq
from testkit.container_damage import flip
from testkit.faulty_disk import CountingDisk, PowerCut, PowerCutDisk
from testkit.models import Tiny, make_tiny, prefill, same_bits, some_tokens
from testkit.models import opened as model_of
from testkit.packing import copy_container, files_of, pack_folder, plan_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


@pytest.fixture(scope="module")
def original(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("container")
    folders = [root / name for name in ("a", "b", "c")]
    pack_folder(source, folders, weights=[2, 1, 1], mirror=True)
    return folders


@pytest.fixture
def folders(original: list[Path], tmp_path: Path) -> list[Path]:
    return copy_container(original, tmp_path)


def opened(folders: list[Path]) -> Container:
    return open_container(folders[0], folders[1:])


def faults(folders: list[Path]) -> list[str]:
    return verify(folders[0], folders[1:], Silent()).faults


# ---- what a mirrored pack is ---------------------------------------------------------------------------------------


def test_the_mirror_of_a_stripe_lies_beside_the_next_one_and_equals_it_but_for_the_header(folders: list[Path]) -> None:
    for number in range(3):
        stripe = (folders[number] / f"stripe-00{number}.colibri").read_bytes()
        mirror = (folders[(number + 1) % 3] / f"mirror-00{number}.colibri").read_bytes()
        assert mirror[96:] == stripe[96:]
        assert [i for i in range(92) if mirror[i] != stripe[i]] == [20]
        header = StripeHeader.unpack(mirror[:4096])
        assert header.mirror
        assert header.stripe == number
    with opened(folders) as container:
        assert container.mirror_paths == [folders[(n + 1) % 3] / f"mirror-00{n}.colibri" for n in range(3)]
        assert container.warnings == []
    assert faults(folders) == []


def test_large_records_that_are_split_have_mirrors_too(tmp_path: Path) -> None:
    config = {**TQ_CONFIG, "moe_intermediate_size": 1600, "num_hidden_layers": 1}
    large = write_checkpoint(tmp_path / "large", config, tq_tensors(config))
    folders = [tmp_path / "a", tmp_path / "b"]
    manifest = pack_folder(large, folders, precision="experts=f32", mirror=True)
    assert len(manifest.expert_layers[0].striping.split.pieces) == 2
    assert faults(folders) == []
    (folders[1] / "stripe-001.colibri").unlink()
    with opened(folders) as container:
        assert container.stripe_paths[1] == folders[0] / "mirror-001.colibri"


def test_mirrors_change_the_layout_and_not_the_content(source: Path, original: list[Path], tmp_path: Path) -> None:
    plain = pack_folder(source, [tmp_path / name for name in "abc"], weights=[2, 1, 1])
    with opened(original) as container:
        assert container.content_id == plain.content_id
        assert [stripe.mirrored for stripe in container.manifest.layout.stripes] == [True] * 3
    plain_files = files_of(tmp_path / "b")
    mirrored = files_of(original[1])
    assert mirrored["stripe-001.colibri"] == plain_files["stripe-001.colibri"]


def test_one_drive_has_no_place_for_a_mirror(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpoint.open(source) as checkpoint, pytest.raises(LayoutError, match="a mirror needs a second drive"):
        plan_of(checkpoint, mirror=True)
    assert cli.main([str(source), "--out", str(tmp_path / "a"), "--mirror"]) == 2
    assert "a mirror needs a second drive" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_the_space_that_is_asked_for_counts_the_mirrors(source: Path) -> None:
    with Checkpoint.open(source) as checkpoint:
        plain = plan_of(checkpoint, weights=[3, 1])
        mirrored = plan_of(checkpoint, weights=[3, 1], mirror=True)
    sizes = [stripe.bytes for stripe in plain.manifest.layout.stripes]
    more = [mirrored.folder_bytes[i] - plain.folder_bytes[i] for i in (0, 1)]
    assert sizes[1] <= more[0] < sizes[1] + 4096  # and a few more letters in the manifest
    assert more[1] == sizes[0]


def test_a_mirror_on_the_file_system_of_its_stripe_is_warned_of(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert cli.main([str(source), "--out", str(a), "--stripe", str(b), "--mirror"]) == 0
    told = capsys.readouterr().err
    assert f"warning: {a} and {b} lie on one file system" in told
    assert f"warning: the mirror of stripe 0 in {b} lies on the file system of the stripe, in {a}" in told
    assert f"warning: the mirror of stripe 1 in {a} lies on the file system of the stripe, in {b}" in told


def test_after_a_power_cut_both_copies_are_made_whole(source: Path, tmp_path: Path) -> None:
    reference = [tmp_path / "x", tmp_path / "y"]
    operations = CountingDisk()
    pack_folder(source, reference, disk=operations, sync_bytes=40_000, mirror=True)
    for at in {*range(10, operations.operations, 23), *range(operations.operations - 16, operations.operations)}:
        (tmp_path / str(at)).mkdir()
        folders = [tmp_path / str(at) / "a", tmp_path / str(at) / "b"]
        with pytest.raises(PowerCut):
            pack_folder(source, folders, disk=PowerCutDisk(at), sync_bytes=40_000, mirror=True)
        pack_folder(source, folders, disk=CountingDisk(), mirror=True)
        assert [files_of(folder) for folder in folders] == [files_of(folder) for folder in reference], at


def test_a_mirror_that_changed_behind_the_journal_is_written_again(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(PowerCut):
        pack_folder(source, folders, disk=PowerCutDisk(110), sync_bytes=1, mirror=True)
    flip(folders[0] / "mirror-001.colibri.partial", 4096 + 7)
    pack_folder(source, folders, mirror=True)
    assert faults(folders) == []


# ---- what may be lost ----------------------------------------------------------------------------------------------


def test_a_missing_mirror_is_a_warning_that_names_drive_and_file(folders: list[Path]) -> None:
    path = folders[2] / "mirror-001.colibri"
    path.unlink()
    with opened(folders) as container:
        assert container.mirror_paths[1] is None
        assert container.warnings == [f"stripe 1 has no usable mirror, only one copy of it is left: {path}"]
    assert faults(folders) == [f"stripe 1 has no usable mirror, only one copy of it is left: {path}"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: flip(path, 30), "has a damaged header"),
        (lambda path: os.truncate(path, 8192), "is cut short"),
        (lambda path: os.truncate(path, 100), "is 100 bytes"),
        (lambda path: shutil.copy(path.parent / "stripe-002.colibri", path), "is a stripe by its header, and a mirror"),
    ],
)
def test_a_wrong_mirror_is_a_warning(folders: list[Path], damage: object, why: str) -> None:
    path = folders[2] / "mirror-001.colibri"
    damage(path)  # type: ignore[operator]
    with opened(folders) as container:
        assert container.mirror_paths[1] is None
        assert f"the mirror of stripe 1 is not used: {path}: " in container.warnings[0]
        assert why in container.warnings[0]


def test_a_mirror_of_another_pack_is_not_used(source: Path, folders: list[Path], tmp_path: Path) -> None:
    other = [tmp_path / name for name in "xyz"]
    pack_folder(source, other, weights=[2, 1, 1], mirror=True)
    shutil.copy(other[2] / "mirror-001.colibri", folders[2])
    with opened(folders) as container:
        assert container.mirror_paths[1] is None
        assert "(another pack of the same model)" in container.warnings[0]


def test_a_mirror_in_another_folder_is_used_and_told(folders: list[Path]) -> None:
    (folders[2] / "mirror-001.colibri").rename(folders[0] / "mirror-001.colibri")
    with opened(folders) as container:
        assert container.mirror_paths[1] == folders[0] / "mirror-001.colibri"
        assert "this mirror belongs beside stripe 2" in container.warnings[0]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_stripe_may_be_lost_while_its_mirror_is_good(folders: list[Path], lost: int) -> None:
    (folders[lost] / f"stripe-00{lost}.colibri").unlink()
    mirror = folders[(lost + 1) % 3] / f"mirror-00{lost}.colibri"
    with opened(folders) as container:
        assert container.stripe_paths[lost] == mirror
        assert container.mirror_paths[lost] is None
        assert container.warnings == [f"stripe {lost} is lost: its mirror {mirror} stands in for it"]
    assert faults(folders) == [f"stripe {lost} is lost: its mirror {mirror} stands in for it"]


def test_a_damaged_header_of_a_stripe_is_a_warning_while_its_mirror_is_good(folders: list[Path]) -> None:
    flip(folders[1] / "stripe-001.colibri", 40)
    with opened(folders) as container:
        assert container.stripe_paths[1] == folders[2] / "mirror-001.colibri"
        assert "stripe-001.colibri: has a damaged header" in container.warnings[0]


def test_a_whole_drive_may_be_lost(folders: list[Path], tmp_path: Path) -> None:
    """Left out, unmounted (an empty folder), or gone: stripe 1 and the mirror of stripe 0 are missing."""
    folders[1].rename(tmp_path / "elsewhere")
    with open_container(folders[0], [folders[2]]) as container:
        assert container.stripe_paths[1] == folders[2] / "mirror-001.colibri"
        assert container.mirror_paths[0] is None
    with opened(folders) as container:
        assert f"stripe folder {folders[1]} cannot be read: No such file" in container.warnings[0]
    folders[1].mkdir()
    with opened(folders) as container:
        assert any(f"{folders[1]} holds no stripe of this container" in text for text in container.warnings)


def test_two_lost_drives_are_too_many(folders: list[Path]) -> None:
    with pytest.raises(ContainerError, match="stripe 1 of 3 is missing"):
        open_container(folders[0])


def test_a_stripe_of_another_container_is_refused_though_the_mirror_is_good(
    source: Path, folders: list[Path], tmp_path: Path
) -> None:
    other = [tmp_path / name for name in "xyz"]
    pack_folder(source, other, weights=[2, 1, 1], mirror=True)
    shutil.copy(other[1] / "stripe-001.colibri", folders[1])
    with pytest.raises(ContainerError, match="another pack of the same model"):
        opened(folders)


def test_a_folder_that_cannot_be_read_is_refused_where_there_are_no_mirrors(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    pack_folder(source, folders)
    with pytest.raises(ContainerError, match=r"stripe folder .*c cannot be read"):
        open_container(folders[0], [folders[1], tmp_path / "c"])


# ---- who reads them ------------------------------------------------------------------------------------------------


def test_the_core_is_given_the_mirror_of_each_stripe(folders: list[Path]) -> None:
    (folders[0] / "mirror-002.colibri").unlink()
    with opened(folders) as container:
        options = COptions(container, ModelOptions(expert_slots=4, kv_pages=4))
        from colibri.core._core import ffi

        paths = [options.c.stripes[n].mirror_path for n in range(3)]
        assert [ffi.string(path).decode() for path in paths[:2]] == [str(path) for path in container.mirror_paths[:2]]
        assert paths[2] == ffi.NULL


def test_the_model_computes_the_same_from_mirrors(tmp_path: Path) -> None:
    """Every extent of one stripe file damaged, then the file gone: the other copy gives the same bits."""
    tiny = make_tiny("glm4_moe", tmp_path, precision="")
    folders = [tmp_path / name for name in "ab"]
    pack_folder(tiny.checkpoint, folders, mirror=True)
    tokens = some_tokens(30)
    with model_of(tiny) as model:
        expected = prefill(model, model.sequence(), tokens)
    both = Tiny(tiny.checkpoint, tuple(folders))
    stripe = folders[1] / "stripe-001.colibri"
    stripe.write_bytes(stripe.read_bytes()[:4096] + os.urandom(stripe.stat().st_size - 4096))
    with model_of(both, expert_slots=2, ring_slots=2) as model:
        assert same_bits(prefill(model, model.sequence(), tokens), expected)
        assert model.drive_stats()[1].mirror_reads > 0
    for lost in (stripe, folders[0] / "stripe-000.colibri"):
        lost.unlink()
        with model_of(both, expert_slots=2, ring_slots=2) as model:
            assert same_bits(prefill(model, model.sequence(), tokens), expected)


def test_verify_reads_both_copies(folders: list[Path]) -> None:
    mirror = folders[2] / "mirror-001.colibri"
    flip(mirror, 5000)
    (found,) = faults(folders)
    assert str(mirror) in found
    assert "layer 0, expert 1: 12288 bytes at offset 4096: CRC-32C is" in found
    verdict = verify(folders[0], folders[1:], Silent())
    stripes = sum(path.stat().st_size - 4096 for folder in folders for path in folder.glob("*-00*.colibri"))
    dense = sum(t.codes.bytes + t.scales.bytes + t.mins.bytes for t in verdict.manifest.dense)
    assert verdict.checked_bytes == stripes + dense


def test_export_reads_the_mirror_where_a_stripe_is_damaged(folders: list[Path], tmp_path: Path) -> None:
    with opened(folders) as container:
        export(container, tmp_path / "good", Silent())
    flip(folders[0] / "stripe-000.colibri", 5000)
    flip(folders[1] / "stripe-001.colibri", 5000)
    with opened(folders) as container:
        export(container, tmp_path / "rescued", Silent())
    for path in (tmp_path / "good").iterdir():
        assert path.read_bytes() == (tmp_path / "rescued" / path.name).read_bytes()
    flip(folders[2] / "mirror-001.colibri", 5000)
    with opened(folders) as container, pytest.raises(ContainerError) as caught:
        export(container, tmp_path / "lost", Silent())
    for path in (folders[1] / "stripe-001.colibri", folders[2] / "mirror-001.colibri"):
        assert f"{path}: layer 0, expert 1, offset 4096: CRC-32C is" in str(caught.value)


def test_plan_and_inspect_show_mirrors(
    source: Path, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(source), "--out", str(tmp_path / "p"), "--stripe", str(tmp_path / "q"), "--mirror"]
    assert cli.main(words) == 0
    assert "mirror" in capsys.readouterr().out.splitlines()[0]
    assert cli.main(["inspect", str(folders[0])]) == 0
    assert "beside stripe 2" in capsys.readouterr().out
    (folders[2] / "mirror-001.colibri").unlink()
    stripes = ["--stripe", str(folders[1]), "--stripe", str(folders[2])]
    for command in (["inspect", str(folders[0])], ["export", str(folders[0]), "--out", str(tmp_path / "out")]):
        assert cli.main([*command, *stripes]) == 0
        assert "warning: stripe 1 has no usable mirror" in capsys.readouterr().err
