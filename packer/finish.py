"""The end of a pack: from what the journal knows to the finished manifest, the two tables and the bundled files.

Pure but for reading the bundled files again. The manifest is checked by the reader's own rules before it is written.
"""

import hashlib
import struct
import time
from collections.abc import Iterable, Iterator
from uuid import UUID

from google.protobuf import json_format

from colibri.core.container import MANIFEST_NAME, content_id
from colibri.core.container_check import MANIFEST_LIMIT, check_manifest
from colibri.core.container_files import pack_table
from colibri.core.container_survey import EXTENTS_NAME, RECORDS_NAME
from colibri.core.identity import manifest_digest
from colibri.core.tensors import crc32c
from colibri.packer.errors import CheckpointError
from colibri.packer.journal import Done, UnitReport
from colibri.packer.plan import created_by
from colibri.packer.precision import CLASS_FORMATS
from colibri.packer.sinks import relative_rms
from colibri.v1 import manifest_pb2


def finished_manifest(planned: manifest_pb2.Manifest, uuid: UUID, done: Done) -> manifest_pb2.Manifest:
    """Return the planned manifest with checksums, digests, reports and identities filled in."""
    manifest = manifest_pb2.Manifest()
    manifest.CopyFrom(planned)
    manifest.report.extend(_class_reports(manifest, done))
    sign(manifest, uuid, done)
    return manifest


def sign(manifest: manifest_pb2.Manifest, uuid: UUID, done: Done) -> None:
    """Fill in checksums, digests, identities and time of a manifest whose data is complete."""
    for tensor, sums in zip(manifest.dense, done.dense, strict=True):
        for blob, crc in zip((tensor.codes, tensor.scales, tensor.mins), sums.crcs, strict=True):
            if blob.bytes:
                blob.crc32c = crc
        tensor.sha256 = sums.sha256
    manifest.layout.uuid = str(uuid)
    manifest.layout.create_unix_seconds = int(time.time())
    manifest.layout.created_by = created_by()
    manifest.layout.extent_checksums.crc32c = crc32c(_extent_entries(done))
    manifest.layout.record_digests.crc32c = crc32c(_record_entries(done))
    manifest.content_id = content_id(manifest, [bytes.fromhex(record.sha256) for record in done.records])
    manifest.manifest_sha256 = manifest_digest(manifest)
    check_manifest(manifest)


def is_finished_form_of(manifest: manifest_pb2.Manifest, planned: manifest_pb2.Manifest) -> bool:
    """Return whether a finished manifest is what this plan would lead to, whatever its digests, UUID and time."""
    bare = manifest_pb2.Manifest()
    bare.CopyFrom(manifest)
    for tensor in bare.dense:
        tensor.ClearField("sha256")
        for name in ("codes", "scales", "mins"):
            if tensor.HasField(name):
                getattr(tensor, name).ClearField("crc32c")
    for field in ("uuid", "create_unix_seconds", "created_by"):
        bare.layout.ClearField(field)
    bare.layout.extent_checksums.ClearField("crc32c")
    bare.layout.record_digests.ClearField("crc32c")
    for field in ("report", "content_id", "manifest_sha256"):
        bare.ClearField(field)
    return bare == planned


def small_files(
    manifest: manifest_pb2.Manifest, done: Done, bundled: Iterable[tuple[str, bytes]]
) -> Iterator[tuple[str, bytes]]:
    """All files of the primary folder but data and LOCK, the manifest last.

    Raises CheckpointError for a bundled file that is not the manifest's.
    """
    uuid = UUID(manifest.layout.uuid)
    yield EXTENTS_NAME, pack_table(uuid, 4, _extent_entries(done))
    yield RECORDS_NAME, pack_table(uuid, 32, _record_entries(done))
    digests = {file.name: file.sha256 for file in manifest.files}
    for name, content in bundled:
        if hashlib.sha256(content).hexdigest() != digests[name]:
            raise CheckpointError(f"{name} was changed while it was packed")
        yield name, content
    text = manifest_text(manifest)
    if len(text) > MANIFEST_LIMIT:
        raise CheckpointError(f"the manifest would be {len(text)} bytes, readers take {MANIFEST_LIMIT}")
    yield MANIFEST_NAME, text


def manifest_text(manifest: manifest_pb2.Manifest) -> bytes:
    """Return the bytes of manifest.json."""
    return json_format.MessageToJson(manifest, preserving_proto_field_name=True, indent=1).encode() + b"\n"


def _extent_entries(done: Done) -> bytes:
    return b"".join(struct.pack(f"<{len(record.crcs)}I", *record.crcs) for record in done.records)


def _record_entries(done: Done) -> bytes:
    return b"".join(bytes.fromhex(record.sha256) for record in done.records)


def _class_reports(manifest: manifest_pb2.Manifest, done: Done) -> Iterator[manifest_pb2.ClassReport]:
    dense: dict[str, list[UnitReport]] = {name: [] for name in CLASS_FORMATS}
    formats = {tensor.tensor_class: tensor.format for tensor in manifest.dense}
    for tensor, sums in zip(manifest.dense, done.dense, strict=True):
        if tensor.tensor_class in dense:
            dense[tensor.tensor_class].append(sums.report)
    dense["experts"] = [record.report for record in done.records]
    if manifest.expert_layers:
        formats["experts"] = manifest.expert_layers[0].parts[0].format
    for name, units in dense.items():
        if units:
            yield _class_report(name, formats[name], units)


def _class_report(name: str, form: manifest_pb2.TensorFormat, units: list[UnitReport]) -> manifest_pb2.ClassReport:
    nonzero = sum(unit.nonzero for unit in units)
    worst = max(units, key=lambda unit: unit.worst_rms)
    return manifest_pb2.ClassReport(
        tensor_class=name,
        format=form,
        values=sum(unit.values for unit in units),
        relative_rms=relative_rms(sum(u.error_squares for u in units), sum(u.sum_squares for u in units)),
        zeroed_share=sum(unit.zeroed for unit in units) / nonzero if nonzero else 0.0,
        worst_relative_rms=worst.worst_rms,
        worst_tensor=worst.worst_name,
        zero_experts=sum(unit.nonzero == 0 for unit in units) if name == "experts" else 0,
    )
