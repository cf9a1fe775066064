"""What a pack will do, decided before a byte is written: formats, places, sizes, and the room that each folder needs.

Takes an understood checkpoint (ModelSource) and the user's options, gives a PackPlan: the manifest with everything but
the digests, the UUID and the time. Refuses nothing but impossible drives; writes nothing, and reads of the checkpoint
only the bundled files and the shards' headers.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from uuid import UUID

from colibri.core.container import canonical_encoding
from colibri.core.container_check import FILE_LIMIT, check_manifest
from colibri.core.container_files import FORMAT_VERSION, ContainerError
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError
from colibri.packer.layout import MIN_EXTENT_BYTES, place_dense, place_experts, record_parts
from colibri.packer.model_source import ModelSource
from colibri.packer.precision import Precision
from colibri.packer.target import fill_tables, needed_bytes, place_stripes
from colibri.v1 import manifest_pb2

_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class PackPlan:
    """A pack, ready to be executed (a Target).

    `manifest` lacks content_id, uuid, create time, checksums, digests and reports. `folder_bytes` is what each folder
    will hold at most, the primary first. `fingerprint` is equal for the same input and options only.
    """

    model: ModelSource
    manifest: manifest_pb2.Manifest
    dense_header_bytes: int
    dense_file_bytes: int
    folder_bytes: tuple[int, ...]
    source_bytes: int
    fingerprint: str


def make_plan(
    checkpoint: Checkpoint,
    model: ModelSource,
    precision: Precision,
    weights: Sequence[int],
    *,
    mirror: bool = False,
    min_extent_bytes: int = MIN_EXTENT_BYTES,
) -> PackPlan:
    """Plan a pack onto len(weights) drives, the primary first; with `mirror`, every stripe twice.

    Raises PrecisionError, CheckpointError, and LayoutError for drives that cannot be.
    """
    manifest = manifest_pb2.Manifest(format_version=FORMAT_VERSION, spec=model.spec)
    manifest.dense.extend(_dense_tensors(model, precision))
    header_bytes, dense_bytes = place_dense(manifest.dense)
    manifest.expert_layers.extend(_expert_layers(model, precision))
    placement = place_experts(manifest.expert_layers, weights, min_extent_bytes)
    for layer, striping in zip(manifest.expert_layers, placement.striping, strict=True):
        layer.striping.CopyFrom(striping)
    place_stripes(manifest, weights, placement.stripe_bytes, mirror=mirror)
    fill_tables(manifest, min_extent_bytes)
    _fill_origin(manifest, checkpoint, model)
    _check_early(manifest)
    return PackPlan(
        model=model,
        manifest=manifest,
        dense_header_bytes=header_bytes,
        dense_file_bytes=dense_bytes,
        folder_bytes=needed_bytes(manifest, dense_bytes),
        source_bytes=_source_bytes(checkpoint, model),
        fingerprint=_fingerprint(checkpoint, manifest),
    )


def _check_early(planned: manifest_pb2.Manifest) -> None:
    """Let the reader's rules judge the plan, so that what they refuse is refused before hours of work, not after."""
    manifest = manifest_pb2.Manifest()
    manifest.CopyFrom(planned)
    manifest.content_id = _NO_DIGEST
    manifest.layout.uuid = str(UUID(int=0))
    for tensor in manifest.dense:
        tensor.sha256 = _NO_DIGEST
    try:
        check_manifest(manifest)
    except ContainerError as error:
        raise CheckpointError(f"cannot be packed: {error}") from error


def created_by() -> str:
    """Return the name and version that a manifest carries."""
    return f"colibri-pack {version('colibri')}"


def _dense_tensors(model: ModelSource, precision: Precision) -> list[manifest_pb2.DenseTensor]:
    return [
        manifest_pb2.DenseTensor(
            role=source.role,
            layer=source.layer,
            name=source.name,
            tensor_class=source.tensor_class,
            format=precision.format_of(source.tensor_class),
            rows=source.rows,
            cols=source.cols,
            source_names=source.source_names,
        )
        for source in model.dense
    ]


def _expert_layers(model: ModelSource, precision: Precision) -> list[manifest_pb2.ExpertLayer]:
    layers = []
    for source in model.expert_layers:
        parts, record_bytes = record_parts(precision.format_of("experts"), source.hidden, source.intermediate)
        layers.append(
            manifest_pb2.ExpertLayer(
                layer=source.layer,
                experts=source.experts,
                record_bytes=record_bytes,
                parts=parts,
                source_pattern=source.source_pattern,
            )
        )
    return layers


def _fill_origin(manifest: manifest_pb2.Manifest, checkpoint: Checkpoint, model: ModelSource) -> None:
    for path in sorted(checkpoint.bundled):
        if checkpoint.file_bytes(path) > FILE_LIMIT:
            raise CheckpointError(f"{path} is {checkpoint.file_bytes(path)} bytes, readers take {FILE_LIMIT}")
        content = checkpoint.read_file(path)
        manifest.files.add(name=path.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    for skipped in model.skipped:
        manifest.skipped.add(rule=skipped.rule, reason=skipped.reason, names=skipped.names)
    manifest.warnings.extend(model.warnings)
    source = manifest.source
    architectures = checkpoint.config.get("architectures")
    if isinstance(architectures, list) and architectures:
        source.architecture = str(architectures[0])
    source.model_type = str(checkpoint.config.get("model_type", ""))
    source.name = checkpoint.folder.name
    source.ignored_copies = checkpoint.ignored_copies
    for path in checkpoint.files:
        source.files.add(name=path.name, bytes=checkpoint.file_bytes(path))


def _source_bytes(checkpoint: Checkpoint, model: ModelSource) -> int:
    """Bytes of the checkpoint that will be read: every tensor that is not left out."""
    skipped = {name for rule in model.skipped for name in rule.names}
    return sum(tensor.bytes for name, tensor in checkpoint.tensors.items() if name not in skipped)


def _fingerprint(checkpoint: Checkpoint, manifest: manifest_pb2.Manifest) -> str:
    """Digest of the plan and of the source's state: sizes, times and headers of its shards."""
    shards = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files]
    tensors = sorted((name, t.dtype, t.shape, t.file.name, t.offset) for name, t in checkpoint.tensors.items())
    state = json.dumps([created_by(), shards, tensors], separators=(",", ":")).encode()
    return hashlib.sha256(state + canonical_encoding(manifest)).hexdigest()
