"""A container is opened only when all its parts belong together; what does not is named by file, field, offset."""

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from colibri.core.container import Container, ContainerError, canonical_encoding, content_id, open_container
from colibri.core.container_files import ALIGN, StripeHeader
from colibri.core.identity import manifest_digest
from colibri.core.paths import FolderLock
from colibri.core.striping import EXTENT
from colibri.core.tensors import crc32c
from colibri.v1 import manifest_pb2
from testkit.checkpoints import write_tq
from testkit.packing import copy_container, pack_folder
from testkit.wording import paths_named_twice

Change = Callable[[manifest_pb2.Manifest], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A container over three stripes; not to be changed."""
    root = tmp_path_factory.mktemp("container")
    folders = [root / name for name in ("a", "b", "c")]
    pack_folder(write_tq(root / "tq"), folders, weights=[2, 1, 1])
    return folders


@pytest.fixture
def folders(original: list[Path], tmp_path: Path) -> list[Path]:
    return copy_container(original, tmp_path)


def opened(folders: list[Path]) -> Container:
    return open_container(folders[0], folders[1:])


def refused(folders: list[Path], match: str) -> None:
    with pytest.raises(ContainerError, match=match) as refusal:
        opened(folders)
    assert paths_named_twice(str(refusal.value)) == []


def rewrite(folders: list[Path], change: Change, *, sign: bool = True) -> None:
    """Change the manifest as a forger would, digest included."""
    path = folders[0] / "manifest.json"
    manifest = json_format.Parse(path.read_text(), manifest_pb2.Manifest())
    change(manifest)
    if sign:
        manifest.manifest_sha256 = manifest_digest(manifest)
    path.write_text(json_format.MessageToJson(manifest, preserving_proto_field_name=True))


# ---- what an open container says -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[1, 2], [2, 1]])
def test_stripes_are_found_in_any_order(folders: list[Path], order: list[int]) -> None:
    with open_container(folders[0], [folders[i] for i in order]) as container:
        assert container.stripe_paths == [folder / f"stripe-00{i}.colibri" for i, folder in enumerate(folders)]


def test_extents_lead_to_the_bytes_of_every_record(folders: list[Path]) -> None:
    with opened(folders) as container:
        record = 0
        for index, layer in enumerate(container.manifest.expert_layers):
            table = container.extents(index)
            assert table.dtype == EXTENT
            assert table.dtype.itemsize == 32
            assert table.shape == (layer.experts, container.extents_per_record(index))
            assert container.first_record(index) == record
            for row in table:
                data = b""
                for extent in row:
                    with open(container.stripe_paths[extent["stripe"]], "rb") as file:
                        file.seek(int(extent["file_offset"]))
                        piece = file.read(int(extent["bytes"]))
                    assert extent["record_offset"] == len(data)
                    assert crc32c(piece) == extent["crc32c"]
                    data += piece
                assert len(data) == layer.record_bytes
                assert hashlib.sha256(data).digest() == container.record_digests[record]
                record += 1


def test_a_moved_container_opens(folders: list[Path], tmp_path: Path) -> None:
    moved = [folder.rename(tmp_path / f"moved{index}") for index, folder in enumerate(folders)]
    opened(moved).close()


def test_the_canonical_encoding_is_as_documented() -> None:
    message = manifest_pb2.DenseTensor(role=manifest_pb2.TENSOR_ROLE_Q, layer=-1, name="é", rows=3)
    message.format.asymmetric = True
    assert canonical_encoding(message) == bytes.fromhex(
        "01000000 0b00000000000000"  # role
        "02000000 ffffffffffffffff"  # layer
        "03000000 0200000000000000 c3a9"  # name
        "05000000 0c00000000000000 03000000 0100000000000000"  # format: asymmetric
        "06000000 0300000000000000"  # rows
    )
    rope = manifest_pb2.RopeTable(inv_freq=[1.0, 0.5])
    assert canonical_encoding(rope) == bytes.fromhex("03000000 0200000000000000 000000000000f03f 000000000000e03f")


def test_the_content_id_sees_what_the_model_is_and_nothing_else(folders: list[Path]) -> None:
    with opened(folders) as container:
        manifest, digests = container.manifest, container.record_digests
    said = manifest.content_id
    assert content_id(manifest, digests) == said

    def after(change: Change) -> str:
        other = manifest_pb2.Manifest()
        other.CopyFrom(manifest)
        change(other)
        return content_id(other, digests)

    def of_the_layout(m: manifest_pb2.Manifest) -> None:
        m.layout.uuid = "another"
        m.layout.stripes[0].weight = 77
        m.dense[0].codes.offset += 64
        m.dense[0].source_names.append("another")
        m.expert_layers[0].striping.Clear()
        m.warnings.append("another")
        next(file for file in m.files if file.name == "config.json").sha256 = "00" * 32

    assert after(of_the_layout) == said
    changes: list[Change] = [
        lambda m: setattr(m.spec, "norm_eps", 1e-5),
        lambda m: setattr(m.dense[0], "sha256", "00" * 32),
        lambda m: setattr(m.dense[3], "cols", 1),
        lambda m: setattr(m.expert_layers[1].parts[2], "offset", 64),
        lambda m: setattr(next(f for f in m.files if f.name == "tokenizer.json"), "sha256", "00" * 32),
        lambda m: m.dense.pop(),
    ]
    assert len({said, *map(after, changes)}) == 1 + len(changes)
    assert content_id(manifest, digests[::-1]) != said


# ---- locks ---------------------------------------------------------------------------------------------------------


def test_readers_share_and_keep_writers_out(folders: list[Path]) -> None:
    with opened(folders), opened(folders):
        for folder in folders:
            with pytest.raises(BlockingIOError):
                FolderLock(folder, exclusive=True)
    for folder in folders:
        lock = FolderLock(folder, exclusive=True)
        refused(folders, rf"{folder} is being written by another process")
        lock.close()
    opened(folders).close()


def test_a_refused_container_is_not_left_locked(folders: list[Path]) -> None:
    (folders[2] / "stripe-002.colibri").unlink()
    refused(folders, "stripe 2 of 3 is missing")
    FolderLock(folders[0], exclusive=True).close()


# ---- stripes (C16) -------------------------------------------------------------------------------------------------


def test_a_missing_stripe_is_named(folders: list[Path]) -> None:
    refused(folders[:1], r"stripes 1, 2 of 3 are missing: no usable stripe-001\.colibri, stripe-002\.colibri in")
    refused(folders[:2], r"stripe 2 of 3 is missing: no usable stripe-002\.colibri in the folders given \(")


def test_a_stripe_of_another_pack_is_refused(folders: list[Path], original: list[Path], tmp_path: Path) -> None:
    other = [tmp_path / f"other{i}" for i in range(3)]
    pack_folder(original[0].parent / "tq", other, weights=[2, 1, 1])
    shutil.copy(other[1] / "stripe-001.colibri", folders[1])
    refused(folders, r"1/stripe-001\.colibri: belongs to container .* \(another pack of the same model\), not to ")


def test_a_stripe_of_other_content_is_refused(folders: list[Path]) -> None:
    path = folders[1] / "stripe-001.colibri"
    data = path.read_bytes()
    header = StripeHeader.unpack(data[:ALIGN])
    forged = StripeHeader(header.stripe, header.stripes, header.uuid, "00" * 32, header.file_bytes)
    path.write_bytes(forged.pack() + data[ALIGN:])
    refused(folders, r"stripe-001\.colibri: has content_id 0000")


def test_swapped_stripes_are_named(folders: list[Path]) -> None:
    one, two = folders[1] / "stripe-001.colibri", folders[2] / "stripe-002.colibri"
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    two.write_bytes(first)
    refused(folders, r"1/stripe-001\.colibri: holds stripe 2 by its header: swapped with stripe-002\.colibri\?")


@pytest.mark.parametrize("cut", [1, 4096, 40_000])
def test_a_cut_stripe_is_named(folders: list[Path], cut: int) -> None:
    path = folders[1] / "stripe-001.colibri"
    size = path.stat().st_size
    os.truncate(path, max(0, size - cut))
    left = max(0, size - cut)
    short = rf"is cut short: stripe 1 is {left} bytes" if left >= ALIGN else rf"is {left} bytes, a stripe file has at"
    refused(folders, rf"stripe-001\.colibri: {short}")


def test_a_stripe_with_bytes_behind_its_end_is_named(folders: list[Path]) -> None:
    path = folders[1] / "stripe-001.colibri"
    path.write_bytes(path.read_bytes() + b"\0")
    refused(folders, r"stripe-001\.colibri: stripe 1 is \d+ bytes, its header says")


def test_a_folder_too_many_is_named(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    refused([*folders, tmp_path / "extra"], "extra holds no stripe of this container")
    refused([*folders, folders[1]], "is given twice")


def test_two_stripes_in_a_folder_are_refused(folders: list[Path]) -> None:
    shutil.copy(folders[2] / "stripe-002.colibri", folders[1])
    refused(folders, r"1 holds more than one stripe file: stripe-001\.colibri, stripe-002\.colibri")


def test_stripe_0_belongs_beside_the_manifest(folders: list[Path]) -> None:
    temporary = (folders[0] / "stripe-000.colibri").rename(folders[0] / "x")
    (folders[1] / "stripe-001.colibri").rename(folders[0] / "stripe-001.colibri")
    temporary.rename(folders[1] / "stripe-000.colibri")
    refused(folders, "stripe 0 belongs beside the manifest")


# ---- folders (C20) -------------------------------------------------------------------------------------------------


def test_the_first_component_that_fails_is_named(folders: list[Path], tmp_path: Path) -> None:
    refused(
        [folders[0], tmp_path / "no" / "such" / "x", folders[2]], rf"no/such/x cannot be read: {tmp_path}/no: No such"
    )
    (tmp_path / "file").touch()
    refused([folders[0], tmp_path / "file" / "x", folders[2]], rf"{tmp_path}/file: is no folder")


def test_a_path_that_fails_itself_is_said_once(folders: list[Path], tmp_path: Path) -> None:
    missing = tmp_path / "no"
    refused([folders[0], missing], f"^stripe folder {missing} cannot be read: No such file or directory; is the drive")
    refused([folders[0], folders[1], folders[1]], f"^stripe folder {folders[1]} is given twice$")
    twin = folders[1] / "twin"
    twin.symlink_to(folders[1])
    refused([*folders[:2], twin], f"^stripe folder {twin} is the same folder as {folders[1]}$")
    (folders[0] / "extents.crc32c").unlink()
    refused(folders, f"^{folders[0]}/extents.crc32c cannot be opened: No such file or directory")


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["dense.safetensors", "extents.crc32c", "records.sha256", "tokenizer.json", "stripe-000.colibri"]
)
def test_a_missing_file_is_named(folders: list[Path], name: str) -> None:
    (folders[0] / name).unlink()
    refused(folders, name)


@pytest.mark.parametrize("name", ["dense.safetensors", "extents.crc32c", "records.sha256", "tokenizer.json"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_the_wrong_length_is_named(folders: list[Path], name: str, change: int) -> None:
    path = folders[0] / name
    data = path.read_bytes()
    path.write_bytes(data + b"\0" if change > 0 else data[:change])
    refused(folders, rf"{name}: ")


def test_a_folder_in_place_of_a_file_is_named(folders: list[Path]) -> None:
    (folders[0] / "tokenizer.json").unlink()
    (folders[0] / "tokenizer.json").mkdir()
    refused(folders, r"tokenizer\.json: is no regular file")


def test_no_manifest_means_no_container(folders: list[Path]) -> None:
    (folders[0] / "manifest.json").unlink()
    refused(folders, r"0 holds no manifest\.json: no container, or one whose packing has not finished")


def test_tables_of_another_pack_are_refused(folders: list[Path], original: list[Path], tmp_path: Path) -> None:
    other = [tmp_path / f"other{i}" for i in range(3)]
    pack_folder(original[0].parent / "tq", other, weights=[2, 1, 1])
    for name in ("extents.crc32c", "records.sha256", "dense.safetensors"):
        kept = (folders[0] / name).read_bytes()
        shutil.copy(other[0] / name, folders[0])
        refused(folders, rf"{name}: belongs to container")
        (folders[0] / name).write_bytes(kept)


# ---- the manifest --------------------------------------------------------------------------------------------------


def test_an_unknown_feature_is_refused_by_name(folders: list[Path]) -> None:
    rewrite(folders, lambda m: m.required_features.extend(["sparse_attention", "mtp"]))
    refused(folders, r"manifest\.json: required_features: this build does not know sparse_attention, mtp")


@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
def test_another_version_is_refused_before_anything_else(folders: list[Path], version: int) -> None:
    rewrite(folders, lambda m: setattr(m, "format_version", version), sign=False)
    refused(folders, r"format_version is .*; this build reads version 1")


def test_an_unknown_field_is_refused(folders: list[Path]) -> None:
    path = folders[0] / "manifest.json"
    path.write_text(path.read_text().replace('"spec": {', '"spec": { "mirror": true,', 1))
    refused(folders, r"does not follow the manifest's schema: .*mirror")


def test_a_changed_manifest_is_refused(folders: list[Path]) -> None:
    rewrite(folders, lambda m: m.warnings.append("x"), sign=False)
    refused(folders, "was changed after it was written: manifest_sha256")
    rewrite(folders, lambda m: m.ClearField("manifest_sha256"), sign=False)
    refused(folders, "has no manifest_sha256")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not valid JSON"),
        ("[]", "holds JSON that is no object"),
        ("{" * 100_000, "is not valid JSON"),
        ('{"a":' * 100_000, "is not valid JSON"),
        ('{"format_version": 1, "format_version": 1}', "stands twice"),
        ('{"format_version": NaN}', "NaN is no JSON"),
        ('{"format_version": true}', "format_version is True"),
        ('{"format_version": 1, "required_features": 7}', "required_features is no list"),
        ('{"format_version": 1, "required_features": [["x"]]}', "this build does not know"),
        ('{"format_version": 1, "layout": {"uuid": 7}}', "does not follow the manifest's schema"),
        ("\x00", "is not valid JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(folders: list[Path], text: str, match: str) -> None:
    (folders[0] / "manifest.json").write_text(text)
    refused(folders, rf"manifest\.json: .*{match}")


def test_a_huge_manifest_is_not_read(folders: list[Path]) -> None:
    os.truncate(folders[0] / "manifest.json", (16 << 20) + 1)
    refused(folders, r"is 16777217 bytes, more than")


def _name_file(name: str) -> Change:
    return lambda m: setattr(m.files[0], "name", name)


CONTRADICTIONS: list[tuple[Change, str]] = [
    (lambda m: setattr(m, "content_id", "0" * 64), "content_id is 0000.* give [0-9a-f]{64}"),
    (lambda m: setattr(m, "content_id", "A" * 64), "content_id is not 64 lower-case hex digits"),
    (lambda m: setattr(m.layout, "uuid", "x"), r"layout\.uuid 'x' is no UUID"),
    (lambda m: setattr(m.layout, "uuid", m.layout.uuid.upper()), "is no UUID"),
    (lambda m: setattr(m.layout.stripes[1], "number", 2), r"layout\.stripes\[1\]\.number is 2"),
    (lambda m: setattr(m.layout.stripes[1], "weight", 0), r"layout\.stripes\[1\]\.weight is 0"),
    (lambda m: setattr(m.layout.stripes[1], "bytes", 4097), r"layout\.stripes\[1\]\.bytes is 4097"),
    (lambda m: setattr(m.layout.stripes[1], "bytes", 2**63), r"layout\.stripes\[1\]\.bytes is"),
    (lambda m: m.layout.ClearField("stripes"), r"layout\.stripes: 0 stripes"),
    (lambda m: setattr(m.layout, "min_extent_bytes", 5), r"layout\.min_extent_bytes is 5"),
    (lambda m: setattr(m.layout.extent_checksums, "bytes", 4), r"layout\.extent_checksums is 4 bytes"),
    (lambda m: setattr(m.layout.record_digests, "offset", 0), r"layout\.record_digests is 256 bytes at offset 0"),
    (lambda m: setattr(m.layout.record_digests, "crc32c", 0), r"records\.sha256: is not the table of this manifest"),
    (lambda m: m.spec.ClearField("layers"), "spec has no layers"),
    (lambda m: setattr(m.dense[2], "role", 0), r"dense\[2\]\.role is 0"),
    (lambda m: setattr(m.dense[2], "role", 999), r"dense\[2\]\.role is 999"),
    (lambda m: setattr(m.dense[2], "layer", 7), r"dense\[2\]\.layer is 7"),
    (lambda m: setattr(m.dense[2], "name", "x"), r"dense\[2\]\.name is 'x', its role and layer make it 'final_norm'"),
    (lambda m: m.dense.append(m.dense[2]), "final_norm stands twice"),
    (lambda m: setattr(m.dense[0], "rows", 2**50), r"dense\[0\] \(embedding\): shape \[1125899906842624, 64\]"),
    (lambda m: setattr(m.dense[0], "rows", 0), r"dense\[0\] \(embedding\): shape \[0, 64\]"),
    (lambda m: setattr(m.dense[0], "rows", 127), r"dense\[0\] \(embedding\)\.codes\.bytes is 8192"),
    (lambda m: setattr(m.dense[0].format, "group_size", 7), r"dense\[0\] \(embedding\)\.format"),
    (lambda m: setattr(m.dense[0].format, "codes", 9), r"dense\[0\] \(embedding\)\.format"),
    (lambda m: setattr(m.dense[0].format, "asymmetric", True), r"dense\[0\] \(embedding\)\.format"),
    (lambda m: setattr(m.dense[0].codes, "offset", 2**62), r"dense\[0\] \(embedding\)\.codes\.offset"),
    (lambda m: setattr(m.dense[0].codes, "offset", 4096), r"dense\.safetensors: tensor embedding\.codes"),
    (lambda m: setattr(m.dense[0], "sha256", "x"), r"dense\[0\] \(embedding\)\.sha256"),
    (lambda m: setattr(m.dense[2], "rows", 2), r"dense\[2\] \(final_norm\): a vector is \[1, n\]"),
    (lambda m: m.dense.pop(), r"content_id is"),
    (
        lambda m: m.expert_layers.pop(),
        r"expert_layers are of layers \[0\], the spec's MoE layers are \[0, 1\]",
    ),
    (lambda m: setattr(m.expert_layers[1], "experts", 5), r"expert_layers\[1\]\.experts is 5, the spec says 4"),
    (lambda m: setattr(m.expert_layers[1], "record_bytes", 4097), r"expert_layers\[1\]\.record_bytes is 4097"),
    (lambda m: setattr(m.expert_layers[1], "record_bytes", 4096), r"expert_layers\[1\]\.record_bytes is 4096"),
    (lambda m: m.expert_layers[1].parts.pop(), r"expert_layers\[1\]\.parts are not gate, up and down"),
    (lambda m: setattr(m.expert_layers[1].parts[1], "offset", 64), r"expert_layers\[1\]\.parts\[1\]\.offset is 64"),
    (lambda m: setattr(m.expert_layers[1].parts[1], "bytes", 5), r"expert_layers\[1\]\.parts\[1\]\.bytes is 5"),
    (lambda m: setattr(m.expert_layers[1].parts[1], "rows", 95), r"expert_layers\[1\]\.parts\[1\]: shape \[95, 64\]"),
    (lambda m: m.expert_layers[1].ClearField("striping"), r"expert_layers\[1\]\.striping has no rule"),
    (lambda m: m.expert_layers[1].striping.whole.ClearField("pattern"), r"striping\.whole\.pattern has 0 entries"),
    (lambda m: m.expert_layers[1].striping.whole.pattern.append(3), r"whole\.pattern names stripe 3 of 3"),
    (lambda m: m.expert_layers[1].striping.whole.base.append(4096), r"whole\.base has 4 entries for 3 stripes"),
    (
        lambda m: m.expert_layers[1].striping.whole.base.__setitem__(1, 100),
        r"whole\.base: 100 is not a multiple of 4096",
    ),
    (
        lambda m: m.expert_layers[1].striping.whole.base.__setitem__(1, 4096),
        r"expert_layers\[[01]\]\.striping: offset 4096 of stripe 1 lies inside expert_layers\[[01]\]",
    ),
    (
        lambda m: m.expert_layers[1].striping.whole.base.__setitem__(1, 1 << 30),
        r"expert_layers\[1\]\.striping: ends at \d+ in stripe 1, which has \d+ bytes",
    ),
    (
        lambda m: m.expert_layers[1].striping.split.pieces.add(stripe=0, base=4096, bytes=4096),
        r"split\.pieces make 4096 bytes, the record has 12288",
    ),
    (
        lambda m: m.expert_layers[1].striping.split.pieces.add(stripe=9, base=4096, bytes=12288),
        r"split\.pieces\[0\]\.stripe is 9 of 3",
    ),
    (
        lambda m: m.expert_layers[1].striping.split.pieces.add(stripe=0, base=4096, bytes=5),
        r"split\.pieces\[0\]\.bytes is 5",
    ),
    (_name_file("../x"), r"files\[0\]\.name '\.\./x' is not the plain name"),
    (_name_file("a/b"), "is not the plain name"),
    (_name_file("manifest.json"), "is not the plain name"),
    (_name_file(".hidden"), "is not the plain name"),
    (_name_file(""), "is not the plain name"),
    (lambda m: setattr(m.files[0], "name", m.files[1].name), "stands twice"),
    (lambda m: setattr(m.files[0], "bytes", 2**40), r"files\[0\]\.bytes is 1099511627776, more than"),
    (lambda m: setattr(m.files[0], "sha256", "x"), r"files\[0\]\.sha256"),
]


@pytest.mark.parametrize(("change", "match"), CONTRADICTIONS, ids=[match for _, match in CONTRADICTIONS])
def test_a_forged_manifest_is_refused_by_field(folders: list[Path], change: Change, match: str) -> None:
    rewrite(folders, change)
    refused(folders, match)


# ---- bits ----------------------------------------------------------------------------------------------------------

HEADERS = ("manifest.json", "dense.safetensors", "extents.crc32c", "records.sha256", "stripe-000.colibri")


def header_bytes(folder: Path, name: str) -> int:
    data = (folder / name).read_bytes()
    if name.startswith("stripe"):
        return ALIGN
    return 8 + int.from_bytes(data[:8], "little") if name == "dense.safetensors" else len(data)


@pytest.fixture(scope="module")
def manifest(original: list[Path]) -> manifest_pb2.Manifest:
    with opened(original) as container:
        return container.manifest


@pytest.mark.parametrize("name", HEADERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(0, 7))
@example(0, 0)
def test_no_flipped_bit_of_a_header_goes_unnoticed(
    original: list[Path], manifest: manifest_pb2.Manifest, name: str, place: int, bit: int
) -> None:
    path = original[0] / name
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[place % header_bytes(original[0], name)] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        with opened(original) as container:  # "1e-6" may become "1E-6" in the manifest
            assert name == "manifest.json"
            assert container.manifest == manifest
    except ContainerError as error:
        assert name in str(error)  # noqa: PT017
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("name", HEADERS)
def test_garbage_in_place_of_a_file_is_refused(folders: list[Path], name: str) -> None:
    source = random.Random(5)
    for size in (0, 1, 7, 8, 47, 48, 95, 96, 4095, 4096, 5000):
        (folders[0] / name).write_bytes(source.randbytes(size))
        refused(folders, name)
        (folders[0] / name).write_bytes(bytes(size))
        refused(folders, name)


def test_extents_hold_for_numpy_too(folders: list[Path]) -> None:
    with opened(folders) as container:
        assert np.all(container.extents(0)["bytes"] == container.manifest.expert_layers[0].record_bytes)
