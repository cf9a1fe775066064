"""The headers of a container's files: stripe and table headers of format.h, and the dense file's safetensors header.

Each is parsed from bytes that nobody vouches for: every length is bounded before it is used, and every refusal is a
ContainerError whose text names the field; the caller adds the file. Writing them is here too, so that both directions
stand side by side.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from colibri.core.paths import why_unreachable
from colibri.core.tensors import crc32c

FORMAT_VERSION = 1
ALIGN = 4096
PIECE_BYTES = 1 << 30  # one Linux read or write moves at most 0x7ffff000 bytes; asking for more is legal but pointless

STRIPE_MAGIC = b"COLIBRI\x01"
TABLE_MAGIC = b"COLITBL\x01"
_STRIPE = struct.Struct("<8sIIII16s32sQ12s")
_TABLE = struct.Struct("<8sIIQ16sI")
TABLE_HEADER_BYTES = _TABLE.size + 4

DENSE_HEADER_LIMIT = 16 << 20
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


class ContainerError(Exception):
    """A container, or a part of one, that must not be used; the text names file, field, stripe and offset."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of what is wrong with it."""
    try:
        yield
    except ContainerError as error:
        raise type(error)(f"{path}: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Give descriptor and size of a regular file, and name it in every refusal."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ContainerError(f"{path} cannot be opened: {why_unreachable(path, error, file=True)}") from error
    try:
        with naming(path):
            if not os.path.isfile(path):
                raise ContainerError("is no regular file")
            yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_exact(fd: int, offset: int, count: int, *, piece_bytes: int = 0) -> bytes:
    """Read exactly `count` bytes at `offset`, in pieces. Raises ContainerError at the end of the file, OSError else."""
    piece_bytes = piece_bytes or PIECE_BYTES
    pieces = []
    while count:
        piece = os.pread(fd, min(count, piece_bytes), offset)
        if not piece:
            raise ContainerError(f"ends at offset {offset}, {count} bytes short")
        pieces.append(piece)
        offset += len(piece)
        count -= len(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class StripeHeader:
    """cl_stripe_header of format.h; `mirror` says that the file is the stripe's second copy."""

    stripe: int
    stripes: int
    uuid: UUID
    content_id: str
    file_bytes: int
    mirror: bool = False

    def pack(self) -> bytes:
        """Return the whole first block of the stripe file, 4096 bytes."""
        body = _STRIPE.pack(
            *(STRIPE_MAGIC, FORMAT_VERSION, self.stripe, self.stripes, int(self.mirror), self.uuid.bytes),
            *(bytes.fromhex(self.content_id), self.file_bytes, bytes(12)),
        )
        return (body + struct.pack("<I", crc32c(body))).ljust(ALIGN, b"\0")

    @classmethod
    def unpack(cls, block: bytes) -> "StripeHeader":
        """Parse the first block. Raises ContainerError."""
        if len(block) != ALIGN:
            raise ContainerError(f"is {len(block)} bytes, a stripe file has at least {ALIGN}")
        if block[:8] != STRIPE_MAGIC:
            raise ContainerError(f"is no stripe file: magic {block[:8]!r} at offset 0, not {STRIPE_MAGIC!r}")
        _check_header_crc(block, _STRIPE.size)
        fields = _STRIPE.unpack_from(block)
        _check_version(fields[1])
        if any(fields[8]) or any(block[_STRIPE.size + 4 :]):
            raise ContainerError("has non-zero bytes where its header is reserved")
        if fields[4] > 1:
            raise ContainerError(f"has the number {fields[4]} where its header says whether it is a mirror, not 0 or 1")
        return cls(fields[2], fields[3], UUID(bytes=fields[5]), fields[6].hex(), fields[7], bool(fields[4]))


def _check_header_crc(data: bytes, size: int) -> None:
    (stored,) = struct.unpack_from("<I", data, size)
    found = crc32c(data[:size])
    if stored != found:
        raise ContainerError(f"has a damaged header: CRC-32C {found:08x}, at offset {size} stands {stored:08x}")


def _check_version(version: int) -> None:
    if version != FORMAT_VERSION:
        raise ContainerError(f"has format version {version}; this build reads version {FORMAT_VERSION}")


def pack_table(uuid: UUID, entry_bytes: int, entries: bytes) -> bytes:
    """Return the bytes of a table file: header and entries."""
    body = _TABLE.pack(
        TABLE_MAGIC, FORMAT_VERSION, entry_bytes, len(entries) // entry_bytes, uuid.bytes, crc32c(entries)
    )
    return body + struct.pack("<I", crc32c(body)) + entries


def unpack_table(data: bytes, uuid: UUID, entry_bytes: int, count: int) -> bytes:
    """Return the entries of a table file after checking header and entries. Raises ContainerError."""
    if len(data) < TABLE_HEADER_BYTES:
        raise ContainerError(f"is {len(data)} bytes, its header alone has {TABLE_HEADER_BYTES}")
    if data[:8] != TABLE_MAGIC:
        raise ContainerError(f"is no table: magic {data[:8]!r} at offset 0, not {TABLE_MAGIC!r}")
    _check_header_crc(data, _TABLE.size)
    _, version, found_bytes, found_count, found_uuid, entries_crc = _TABLE.unpack_from(data)
    _check_version(version)
    if (found_bytes, found_count) != (entry_bytes, count):
        raise ContainerError(
            f"has {found_count} entries of {found_bytes} bytes, the manifest asks for {count} of {entry_bytes}"
        )
    if found_uuid != uuid.bytes:
        raise ContainerError(f"belongs to container {UUID(bytes=found_uuid)}, not to {uuid}")
    entries = data[TABLE_HEADER_BYTES:]
    if len(entries) != entry_bytes * count:
        raise ContainerError(f"has {len(entries)} bytes of entries, its header says {entry_bytes * count}")
    if crc32c(entries) != entries_crc:
        raise ContainerError(f"has damaged entries: CRC-32C {crc32c(entries):08x}, the header says {entries_crc:08x}")
    return entries


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a safetensors header; offset is absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def dense_metadata(uuid: str) -> dict[str, str]:
    """Return the metadata that dense.safetensors carries; "format" is for other readers of safetensors."""
    return {"format": "pt", "colibri_format_version": str(FORMAT_VERSION), "colibri_uuid": uuid}


def pack_safetensors_header(entries: Iterable[StoredTensor], metadata: dict[str, str], header_bytes: int) -> bytes:
    """Return length, JSON and padding, `header_bytes` long together; the entries' offsets are absolute.

    Raises ValueError if it does not fit.
    """
    table: dict[str, Any] = {"__metadata__": metadata}
    for entry in entries:
        begin = entry.offset - header_bytes
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.bytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    if len(text) > header_bytes - 8:
        raise ValueError(f"a safetensors header of {len(text)} bytes does not fit into {header_bytes - 8}")
    return struct.pack("<Q", header_bytes - 8) + text.ljust(header_bytes - 8, b" ")


def read_safetensors_header(fd: int, file_bytes: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, every tensor inside it. Raises ContainerError."""
    if file_bytes < 8:
        raise ContainerError(f"is {file_bytes} bytes, no safetensors file")
    (length,) = struct.unpack("<Q", read_exact(fd, 0, 8))
    if length > min(DENSE_HEADER_LIMIT, file_bytes - 8):
        raise ContainerError(f"claims a header of {length} bytes in a file of {file_bytes}")
    table = strict_json(read_exact(fd, 8, length))
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ContainerError("has a __metadata__ that is no map of strings")
    data = 8 + length
    tensors = {name: _stored_tensor(name, entry, data) for name, entry in table.items()}
    end = data
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != end:
            raise ContainerError(
                f"tensor {tensor.name}: starts at offset {tensor.offset}, the one before ends at {end}"
            )
        end += tensor.bytes
    if end != file_bytes:
        raise ContainerError(f"is {file_bytes} bytes, its tensors end at {end}")
    return tensors, metadata


def _stored_tensor(name: str, entry: object, data: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ContainerError(f"tensor {name}: its entry has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ContainerError(f"tensor {name}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape) or not 1 <= len(shape) <= 2:
        raise ContainerError(f"tensor {name}: shape {shape!r} is not one or two sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ContainerError(f"tensor {name}: data_offsets {offsets!r} are not two ascending offsets")
    size = DTYPE_BYTES[dtype]
    for dim in shape:
        size *= dim
    if offsets[1] - offsets[0] != size:
        raise ContainerError(f"tensor {name}: {dtype} {shape} takes {size} bytes, data_offsets {offsets} differ")
    return StoredTensor(name, dtype, tuple(shape), data + offsets[0], size)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def strict_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuse duplicate keys, NaN and Infinity, and nesting beyond the parser. ContainerError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"key {twice!r} stands twice")
        return table

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ContainerError("holds JSON that is no object")
    return table
