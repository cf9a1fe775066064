"""The two digests of a manifest: what the model is (`content_id`) and whether the manifest is as it was written.

Both run over the canonical encoding of docs/container.md, which has one form per message, unlike protobuf's own bytes
or its JSON. Layout, times, reports and names of drives never enter the content id.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from colibri.v1 import manifest_pb2

CONTENT_PREFIX = b"colibri content 1\n"
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def canonical_encoding(message: Message) -> bytes:
    """Return the canonical encoding of a message: set fields in ascending number, little-endian (docs/container.md)."""
    out = bytearray()
    for field, value in message.ListFields():
        out += struct.pack("<I", field.number)
        if isinstance(value, Message | str | bytes | int | float):
            out += _encode_value(field, value)
        else:
            out += struct.pack("<Q", len(value))
            for item in value:
                out += _encode_value(field, item)
    return bytes(out)


def _encode_value(field: FieldDescriptor, value: Message | str | bytes | float) -> bytes:
    if isinstance(value, Message):
        return framed(canonical_encoding(value))
    if isinstance(value, str):
        return framed(value.encode())
    if isinstance(value, bytes):
        return framed(value)
    if field.cpp_type in _FLOATS:
        return struct.pack("<d", value)
    # A u64 above the largest i64 keeps its 64 bits.
    return struct.pack("<Q", int(value) & (2**64 - 1))


def framed(data: bytes) -> bytes:
    """Return `u64 length` + data."""
    return struct.pack("<Q", len(data)) + data


def content_id(manifest: manifest_pb2.Manifest, record_digests: Sequence[bytes]) -> str:
    """Return the hex content id of a manifest whose experts' records have these SHA-256 digests, in logical order.

    Raises ValueError if the number of digests is not the number of experts, or a digest has not 32 bytes.
    """
    records = sum(layer.experts for layer in manifest.expert_layers)
    if len(record_digests) != records:
        raise ValueError(f"{len(record_digests)} record digests for {records} experts")
    digest = hashlib.sha256(CONTENT_PREFIX + framed(canonical_encoding(manifest.spec)))
    digest.update(struct.pack("<Q", len(manifest.dense)))
    for tensor in manifest.dense:
        digest.update(framed(canonical_encoding(dense_identity(tensor))) + _sha256_bytes(tensor.sha256))
    digest.update(struct.pack("<Q", len(manifest.expert_layers)))
    first = 0
    for layer in manifest.expert_layers:
        digest.update(framed(canonical_encoding(layer_identity(layer))))
        for record in record_digests[first : first + layer.experts]:
            if len(record) != 32:
                raise ValueError(f"a record digest of {len(record)} bytes")
            digest.update(record)
        first += layer.experts
    digest.update(_files_identity(manifest.files))
    return digest.hexdigest()


def _files_identity(files: Iterable[manifest_pb2.BundledFile]) -> bytes:
    named = sorted((file.name.encode(), _sha256_bytes(file.sha256)) for file in files if file.name != "config.json")
    return struct.pack("<Q", len(named)) + b"".join(framed(name) + framed(sha256) for name, sha256 in named)


def _sha256_bytes(text: str) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != 32:
        raise ValueError(f"not a SHA-256: {text[:80]!r}")
    return raw


def dense_identity(tensor: manifest_pb2.DenseTensor) -> manifest_pb2.DenseTensor:
    """Return the tensor with only the fields that say what it is, not where it lies or where it came from."""
    return manifest_pb2.DenseTensor(
        role=tensor.role, layer=tensor.layer, format=tensor.format, rows=tensor.rows, cols=tensor.cols
    )


def layer_identity(layer: manifest_pb2.ExpertLayer) -> manifest_pb2.ExpertLayer:
    """Return the layer with only the fields that say what its records are."""
    return manifest_pb2.ExpertLayer(
        layer=layer.layer, experts=layer.experts, record_bytes=layer.record_bytes, parts=layer.parts
    )


def manifest_digest(manifest: manifest_pb2.Manifest) -> str:
    """Return the hex SHA-256 that `manifest_sha256` must hold."""
    bare = manifest_pb2.Manifest()
    bare.CopyFrom(manifest)
    bare.ClearField("manifest_sha256")
    return hashlib.sha256(canonical_encoding(bare)).hexdigest()
