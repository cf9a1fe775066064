"""The header of one safetensors file, read and checked to the last byte before anything in it is believed.

Owns the format's rules (https://github.com/huggingface/safetensors#format) in this order: length of the file, bound of
the header, UTF-8, JSON without repeated keys, dtype, shape, offsets, full coverage of the file without holes. Refuses
bytes behind the last tensor and a Git LFS pointer, by name. Reads headers only; tensor bytes are checkpoint's.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from colibri.packer.errors import CorruptCheckpointError
from colibri.packer.open_files import OpenFiles

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"

# Width in bits of every dtype that the safetensors library writes.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `bytes` bytes at the absolute `offset` of `file`, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    bytes: int


def read_header(files: OpenFiles, path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of the safetensors file `path` by name.

    Raises CorruptCheckpointError naming the file, and the tensor where one is to blame.
    """
    size = files.size(path)
    header_bytes = _header_bytes(files, path, size)
    raw = bytearray(header_bytes)
    files.read_into(path, _LENGTH_BYTES, memoryview(raw))
    header = _parse(path, raw)
    _check_metadata(path, header.pop("__metadata__", {}))
    data_start = _LENGTH_BYTES + header_bytes
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in header.items()}
    _check_coverage(path, tensors, data_start, size)
    return tensors


def parse_json(path: Path, raw: bytes | bytearray) -> dict[str, object]:
    """Parse a JSON object strictly: UTF-8, no repeated key, no NaN or Infinity, bounded depth.

    Raises CorruptCheckpointError naming `path`.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(path, f"not UTF-8 at byte {error.start}")
    try:
        value = json.loads(text, object_pairs_hook=_no_repeated_keys, parse_constant=_no_constants)
    except RecursionError:
        _refuse(path, "JSON nested too deeply")
    except ValueError as error:
        _refuse(path, f"not valid JSON: {error}")
    if not isinstance(value, dict):
        _refuse(path, f"the JSON is {type(value).__name__}, not an object")
    return value


def _refuse(path: Path, text: str) -> NoReturn:
    raise CorruptCheckpointError(f"{path}: {text}")


def _no_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    for key in result:
        key.encode()  # a lone surrogate is a ValueError here, and could not be written to a manifest later
    if len(result) != len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {repeated!r} occurs twice")
    return result


def _no_constants(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _header_bytes(files: OpenFiles, path: Path, size: int) -> int:
    start = bytearray(min(size, len(_LFS_POINTER)))
    files.read_into(path, 0, memoryview(start))
    if start == _LFS_POINTER:
        _refuse(path, "a Git LFS pointer, not the weights themselves; fetch the file with `git lfs pull`")
    if size < _LENGTH_BYTES:
        _refuse(path, f"{size} bytes long, too short for a safetensors file")
    header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if header_bytes > MAX_HEADER_BYTES:
        _refuse(path, f"not a safetensors file: header of {header_bytes} bytes, the limit is {MAX_HEADER_BYTES}")
    if _LENGTH_BYTES + header_bytes > size:
        _refuse(
            path, f"cut inside its header: {size} bytes long, the header alone ends at {_LENGTH_BYTES + header_bytes}"
        )
    return header_bytes


def _parse(path: Path, raw: bytearray) -> dict[str, object]:
    if raw[:1] != b"{":
        _refuse(path, "not a safetensors file: the header does not begin with '{'")
    return parse_json(path, raw)


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "__metadata__ is not an object of strings")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"tensor {name!r}: the entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"tensor {name!r}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        _refuse(path, f"tensor {name!r}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _refuse(path, f"tensor {name!r}: data_offsets {offsets!r} are not two sizes")
    begin, end = offsets
    wanted = _data_bytes(path, name, dtype, shape)
    if end - begin != wanted:
        _refuse(
            path, f"tensor {name!r}: {dtype} {shape} takes {wanted} bytes, data_offsets {offsets} give {end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, wanted)


def _data_bytes(path: Path, name: str, dtype: str, shape: list[int]) -> int:
    bits = DTYPE_BITS[dtype]
    for dimension in shape:
        bits *= dimension
        if bits >= 1 << 66:
            _refuse(path, f"tensor {name!r}: shape {shape} is more than 2^63 bytes")
    if bits % 8:
        _refuse(path, f"tensor {name!r}: {dtype} {shape} does not fill whole bytes")
    return bits // 8


def _check_coverage(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != position:
            what = "a hole" if tensor.offset > position else "an overlap"
            _refuse(path, f"tensor {tensor.name!r}: {what} before it: begins at {tensor.offset}, expected {position}")
        position += tensor.bytes
    if size < position:
        _refuse(path, f"cut: {size} bytes long, its header describes {position}")
    if size > position:
        _refuse(
            path, f"{size - position} bytes behind the last tensor: {size} bytes long, its header describes {position}"
        )
