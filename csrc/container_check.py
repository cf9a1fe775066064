"""What a manifest must say before anything believes it: ranges, sizes and places, checked against the number formats.

Pure: no file is opened here; container.py compares the result with the files. Every refusal is a ContainerError that
names the field. What the spec means is the core's to check when a model is opened; here only that tensors and layers
fit it.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar
from uuid import UUID

from google.protobuf import json_format

from colibri.core.container_files import (
    ALIGN,
    FORMAT_VERSION,
    TABLE_HEADER_BYTES,
    ContainerError,
    StoredTensor,
    strict_json,
)
from colibri.core.errors import InvalidError, UnsupportedError
from colibri.core.identity import manifest_digest
from colibri.core.striping import Area, extents_per_record, layer_areas
from colibri.core.tensors import Format, rows_bytes, tiles_bytes
from colibri.v1 import manifest_pb2

MANIFEST_LIMIT = 16 << 20
FILE_LIMIT = 256 << 20  # of one bundled file
SIZE_LIMIT = 1 << 62
RECORD_LIMIT = 1 << 22  # experts of all layers together
STRIPE_LIMIT = 1000  # stripe-NNN.colibri
PART_ALIGN = 64

# What this build understands beyond format version 1; a container that asks for anything else is refused by name.
KNOWN_FEATURES: frozenset[str] = frozenset()

_HEX = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,255}")
_OWN_FILES = re.compile(
    r"manifest\.json|dense\.safetensors|extents\.crc32c|records\.sha256|(stripe|mirror)-.*|LOCK|.*\.partial"
)

_Role = manifest_pb2.TensorRole
VECTOR_ROLES = frozenset(number for name, number in _Role.items() if name.endswith(("_NORM", "_BIAS")))
_PLAIN_CODES = (manifest_pb2.TensorFormat.CODES_F32, manifest_pb2.TensorFormat.CODES_BF16)
_PART_KINDS = (
    manifest_pb2.RecordPart.KIND_GATE,
    manifest_pb2.RecordPart.KIND_UP,
    manifest_pb2.RecordPart.KIND_DOWN,
)

_Size = TypeVar("_Size")


def require(condition: bool, text: str) -> None:
    """Raise ContainerError with `text` unless `condition`."""
    if not condition:
        raise ContainerError(text)


def parse_manifest(text: bytes) -> manifest_pb2.Manifest:
    """Parse manifest.json strictly: version and features first, then every field known, then its own digest."""
    require(len(text) <= MANIFEST_LIMIT, f"is {len(text)} bytes, more than {MANIFEST_LIMIT}")
    table = strict_json(text)
    version = table.get("format_version", table.get("formatVersion"))
    require(
        type(version) is int and version == FORMAT_VERSION,
        f"format_version is {version!r}; this build reads version {FORMAT_VERSION}",
    )
    features = table.get("required_features", table.get("requiredFeatures", []))
    require(isinstance(features, list), "required_features is no list")
    unknown = [str(feature)[:100] for feature in features if str(feature) not in KNOWN_FEATURES]
    require(not unknown, f"required_features: this build does not know {', '.join(unknown)}")
    manifest = manifest_pb2.Manifest()
    try:
        json_format.ParseDict(table, manifest)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise ContainerError(f"does not follow the manifest's schema: {error}") from error
    require(manifest.manifest_sha256 != "", "has no manifest_sha256")
    found = manifest_digest(manifest)
    require(
        manifest.manifest_sha256 == found,
        f"was changed after it was written: manifest_sha256 {manifest.manifest_sha256[:64]}, its fields give {found}",
    )
    return manifest


def check_manifest(manifest: manifest_pb2.Manifest) -> None:
    """Refuse a manifest whose fields contradict each other. Raises ContainerError naming the field."""
    require(_HEX.fullmatch(manifest.content_id) is not None, "content_id is not 64 lower-case hex digits")
    _check_layout(manifest.layout)
    require(len(manifest.spec.layers) > 0, "spec has no layers")
    _check_dense(manifest)
    _check_expert_layers(manifest)
    _check_areas(manifest)
    _check_tables(manifest)
    _check_bundled(manifest.files)


def parse_uuid(text: str) -> UUID:
    """Return the UUID written in its one canonical form. Raises ContainerError."""
    try:
        uuid = UUID(text)
    except ValueError:
        uuid = None
    if uuid is None or str(uuid) != text:
        raise ContainerError(f"layout.uuid {text[:80]!r} is no UUID")
    return uuid


def _check_layout(layout: manifest_pb2.Layout) -> None:
    parse_uuid(layout.uuid)
    require(0 < len(layout.stripes) <= STRIPE_LIMIT, f"layout.stripes: {len(layout.stripes)} stripes")
    for index, stripe in enumerate(layout.stripes):
        where = f"layout.stripes[{index}]"
        require(stripe.number == index, f"{where}.number is {stripe.number}")
        require(0 < stripe.weight < 2**32, f"{where}.weight is {stripe.weight}")
        require(
            ALIGN <= stripe.bytes < SIZE_LIMIT and stripe.bytes % ALIGN == 0,
            f"{where}.bytes is {stripe.bytes}, not a positive multiple of {ALIGN}",
        )
        require(
            not stripe.mirrored or len(layout.stripes) > 1, f"{where}.mirrored: there is no other drive for a mirror"
        )
    least = layout.min_extent_bytes
    require(0 < least < SIZE_LIMIT and least % ALIGN == 0, f"layout.min_extent_bytes is {least}")


def _sizes(
    measure: Callable[[Format, int, int], _Size], form: manifest_pb2.TensorFormat, shape: tuple[int, int], where: str
) -> _Size:
    """Let the core say how many bytes a matrix takes. Raises ContainerError for a shape or format that is not built."""
    rows, cols = shape
    fits = 0 < rows < 2**40 and 0 < cols < 2**32 and rows * cols < 2**56
    require(fits, f"{where}: shape [{rows}, {cols}] is out of range")
    try:
        return measure(Format.from_proto(form), rows, cols)
    except (InvalidError, UnsupportedError) as error:
        raise ContainerError(f"{where}.format: {error}") from error


def canonical_name(role: int, layer: int) -> str:
    """Return the name of a dense tensor: its role in lower case, with the layer unless it is the model's own (-1)."""
    short = manifest_pb2.TensorRole.Name(role).removeprefix("TENSOR_ROLE_").lower()
    return short if layer < 0 else f"layers.{layer}.{short}"


def stored_tensors(tensor: manifest_pb2.DenseTensor) -> list[StoredTensor]:
    """Return what the tensor's blobs must be in dense.safetensors: names, dtypes, shapes, offsets and sizes."""
    shape = (tensor.cols,) if tensor.role in VECTOR_ROLES else (tensor.rows, tensor.cols)
    codes = tensor.format.codes
    blob = tensor.codes
    if codes in _PLAIN_CODES:
        dtype = "F32" if codes == manifest_pb2.TensorFormat.CODES_F32 else "BF16"
        return [StoredTensor(tensor.name, dtype, shape, blob.offset, blob.bytes)]
    packed = codes == manifest_pb2.TensorFormat.CODES_INT4
    code_shape = (tensor.rows, -(-tensor.cols // 2) if packed else tensor.cols)
    group_shape = (tensor.rows, -(-tensor.cols // tensor.format.group_size))
    stored = [
        StoredTensor(f"{tensor.name}.codes", "U8" if packed else "I8", code_shape, blob.offset, blob.bytes),
        StoredTensor(f"{tensor.name}.scales", "F16", group_shape, tensor.scales.offset, tensor.scales.bytes),
    ]
    if tensor.format.asymmetric:
        stored.append(StoredTensor(f"{tensor.name}.mins", "F16", group_shape, tensor.mins.offset, tensor.mins.bytes))
    return stored


def _check_dense(manifest: manifest_pb2.Manifest) -> None:
    names: set[str] = set()
    for index, tensor in enumerate(manifest.dense):
        where = f"dense[{index}]"
        require(
            tensor.role in _Role.values() and tensor.role != _Role.TENSOR_ROLE_UNSPECIFIED,
            f"{where}.role is {tensor.role}",
        )
        require(-1 <= tensor.layer < len(manifest.spec.layers), f"{where}.layer is {tensor.layer}")
        name = canonical_name(tensor.role, tensor.layer)
        require(tensor.name == name, f"{where}.name is {tensor.name[:80]!r}, its role and layer make it {name!r}")
        require(name not in names, f"{where}: {name} stands twice")
        names.add(name)
        _check_dense_sizes(tensor, f"{where} ({name})")


def _check_dense_sizes(tensor: manifest_pb2.DenseTensor, where: str) -> None:
    if tensor.role in VECTOR_ROLES:
        plain = tensor.rows == 1 and tensor.format.codes in _PLAIN_CODES
        require(plain, f"{where}: a vector is [1, n] and not quantised")
    require(_HEX.fullmatch(tensor.sha256) is not None, f"{where}.sha256 is not 64 lower-case hex digits")
    sizes = _sizes(rows_bytes, tensor.format, (tensor.rows, tensor.cols), where)
    for field, blob, size in zip(
        ("codes", "scales", "mins"), (tensor.codes, tensor.scales, tensor.mins), sizes, strict=True
    ):
        require(blob.bytes == size, f"{where}.{field}.bytes is {blob.bytes}, its format and shape make it {size}")
        require(blob.offset < SIZE_LIMIT, f"{where}.{field}.offset is {blob.offset}")


def _check_expert_layers(manifest: manifest_pb2.Manifest) -> None:
    moe = [index for index, layer in enumerate(manifest.spec.layers) if layer.HasField("moe")]
    found = [layer.layer for layer in manifest.expert_layers]
    require(found == moe, f"expert_layers are of layers {found}, the spec's MoE layers are {moe}")
    records = 0
    for index, layer in enumerate(manifest.expert_layers):
        where = f"expert_layers[{index}]"
        moe_spec = manifest.spec.layers[layer.layer].moe
        require(
            layer.experts == moe_spec.experts > 0,
            f"{where}.experts is {layer.experts}, the spec says {moe_spec.experts}",
        )
        records += layer.experts
        require(records <= RECORD_LIMIT, f"{where}: more than {RECORD_LIMIT} experts")
        _check_parts(layer, manifest.spec.hidden_size, moe_spec.intermediate_size, where)
        _check_striping(layer, len(manifest.layout.stripes), where)


def _check_parts(layer: manifest_pb2.ExpertLayer, hidden: int, width: int, where: str) -> None:
    require(
        tuple(part.kind for part in layer.parts) == _PART_KINDS,
        f"{where}.parts are not gate, up and down in this order",
    )
    end = 0
    for index, part in enumerate(layer.parts):
        here = f"{where}.parts[{index}]"
        shape = (hidden, width) if part.kind == manifest_pb2.RecordPart.KIND_DOWN else (width, hidden)
        require(
            (part.rows, part.cols) == shape,
            f"{here}: shape [{part.rows}, {part.cols}], the spec makes it {list(shape)}",
        )
        size = _sizes(tiles_bytes, part.format, shape, here)
        require(part.bytes == size, f"{here}.bytes is {part.bytes}, its format and shape make it {size}")
        require(
            part.offset % PART_ALIGN == 0 and end <= part.offset < SIZE_LIMIT,
            f"{here}.offset is {part.offset}, not a multiple of {PART_ALIGN} from {end} on",
        )
        end = part.offset + part.bytes
    record = layer.record_bytes
    require(
        record % ALIGN == 0 and end <= record < SIZE_LIMIT,
        f"{where}.record_bytes is {record}, not a multiple of {ALIGN} from {end} on",
    )


def _check_striping(layer: manifest_pb2.ExpertLayer, stripes: int, where: str) -> None:
    here = f"{where}.striping"
    rule = layer.striping.WhichOneof("rule")
    require(rule is not None, f"{here} has no rule")
    if rule == "whole":
        pattern, base = layer.striping.whole.pattern, layer.striping.whole.base
        require(0 < len(pattern) <= 65536, f"{here}.whole.pattern has {len(pattern)} entries")
        require(max(pattern) < stripes, f"{here}.whole.pattern names stripe {max(pattern)} of {stripes}")
        require(len(base) == stripes, f"{here}.whole.base has {len(base)} entries for {stripes} stripes")
        _check_bases(base, f"{here}.whole.base")
        return
    pieces = layer.striping.split.pieces
    require(0 < len(pieces) <= stripes, f"{here}.split.pieces: {len(pieces)} pieces for {stripes} stripes")
    for index, piece in enumerate(pieces):
        require(piece.stripe < stripes, f"{here}.split.pieces[{index}].stripe is {piece.stripe} of {stripes}")
        require(
            0 < piece.bytes < SIZE_LIMIT and piece.bytes % ALIGN == 0,
            f"{here}.split.pieces[{index}].bytes is {piece.bytes}, not a positive multiple of {ALIGN}",
        )
    _check_bases([piece.base for piece in pieces], f"{here}.split.pieces' base")
    total = sum(piece.bytes for piece in pieces)
    require(total == layer.record_bytes, f"{here}.split.pieces make {total} bytes, the record has {layer.record_bytes}")


def _check_bases(bases: Iterable[int], where: str) -> None:
    for base in bases:
        require(
            base % ALIGN == 0 and ALIGN <= base < SIZE_LIMIT,
            f"{where}: {base} is not a multiple of {ALIGN} behind the header",
        )


def _check_areas(manifest: manifest_pb2.Manifest) -> None:
    """Every stripe file holds its header and then areas that do not overlap."""
    placed: list[tuple[Area, int]] = [
        (area, index) for index, layer in enumerate(manifest.expert_layers) for area in layer_areas(layer)
    ]
    ends = [(ALIGN, "its header")] * len(manifest.layout.stripes)
    for area, index in sorted(placed, key=lambda item: (item[0].stripe, item[0].begin)):
        end, owner = ends[area.stripe]
        require(
            area.begin >= end,
            f"expert_layers[{index}].striping: offset {area.begin} of stripe {area.stripe} lies inside {owner}",
        )
        size = manifest.layout.stripes[area.stripe].bytes
        require(
            area.end <= size,
            f"expert_layers[{index}].striping: ends at {area.end} in stripe {area.stripe}, which has {size} bytes",
        )
        ends[area.stripe] = (area.end, f"expert_layers[{index}]")


def table_counts(manifest: manifest_pb2.Manifest) -> tuple[int, int]:
    """Return how many entries extents.crc32c and records.sha256 have."""
    extents = sum(layer.experts * extents_per_record(layer) for layer in manifest.expert_layers)
    return extents, sum(layer.experts for layer in manifest.expert_layers)


def _check_tables(manifest: manifest_pb2.Manifest) -> None:
    extents, records = table_counts(manifest)
    layout = manifest.layout
    for field, blob, size in (
        ("extent_checksums", layout.extent_checksums, 4 * extents),
        ("record_digests", layout.record_digests, 32 * records),
    ):
        require(
            (blob.offset, blob.bytes) == (TABLE_HEADER_BYTES, size),
            f"layout.{field} is {blob.bytes} bytes at offset {blob.offset}, not {size} at {TABLE_HEADER_BYTES}",
        )


def _check_bundled(files: Iterable[manifest_pb2.BundledFile]) -> None:
    names: set[str] = set()
    for index, file in enumerate(files):
        where = f"files[{index}]"
        plain = _FILE_NAME.fullmatch(file.name) is not None and _OWN_FILES.fullmatch(file.name) is None
        require(plain, f"{where}.name {file.name[:80]!r} is not the plain name of a bundled file")
        require(file.name not in names, f"{where}: {file.name} stands twice")
        names.add(file.name)
        require(file.bytes <= FILE_LIMIT, f"{where}.bytes is {file.bytes}, more than {FILE_LIMIT}")
        require(_HEX.fullmatch(file.sha256) is not None, f"{where}.sha256 is not 64 lower-case hex digits")
