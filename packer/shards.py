"""Which safetensors files of a folder hold which tensor.

Owns the rules for `model.safetensors.index.json`: the index alone decides which files are read and which of several
copies counts. Refuses a folder whose weights it cannot name without guessing: shards without an index, an index whose
shards or tensors are absent, two sets of weights side by side. Sits between safetensors_file and checkpoint.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from colibri.packer.errors import CheckpointError, CorruptCheckpointError
from colibri.packer.open_files import OpenFiles, describe_open_failure
from colibri.packer.safetensors_file import TensorInfo, parse_json, read_header
from colibri.packer.wording import counted

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_JSON_BYTES = 256 << 20  # an index of a million tensors is about 100 MB


@dataclass(frozen=True)
class Shards:
    """The tensors of a checkpoint and what was noticed while collecting them."""

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]  # in name order
    ignored_copies: int  # tensors in a shard that the index places in another one
    unindexed: dict[str, Path]  # tensors in a shard that the index does not mention
    warnings: tuple[str, ...]


def read_json(files: OpenFiles, path: Path) -> dict[str, object]:
    """Read a JSON object from `path`; the rules are parse_json's, plus a bound on the size."""
    size = files.size(path)
    if size > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{path}: {size} bytes of JSON, the limit is {MAX_JSON_BYTES}")
    raw = bytearray(size)
    files.read_into(path, 0, memoryview(raw))
    return parse_json(path, raw)


def collect(files: OpenFiles, folder: Path) -> Shards:
    """Read the headers of all shards of `folder`.

    Raises CheckpointError or CorruptCheckpointError naming the file, and the tensor where one is to blame.
    """
    present = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))
    index = folder / INDEX_NAME
    if index.exists() or index.is_symlink():
        return _collect_indexed(files, folder, index, present)
    if not present:
        raise CheckpointError(f"{folder}: no .safetensors file and no {INDEX_NAME}; other weight formats are not read")
    if len(present) > 1:
        _refuse_without_index(files, folder, present)
    path = folder / present[0]
    return Shards(read_header(files, path), (path,), 0, {}, ())


def _refuse_without_index(files: OpenFiles, folder: Path, present: list[str]) -> NoReturn:
    counts = Counter(name for file in present for name in read_header(files, folder / file))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    tensors = counted(len(repeated), "tensor is", "tensors are")
    detail = f"; {tensors} in more than one of them, {repeated[0]!r} for one" if repeated else ""
    raise CheckpointError(f"{folder}: {len(present)} .safetensors files and no {INDEX_NAME} to say what counts{detail}")


def _collect_indexed(files: OpenFiles, folder: Path, index: Path, present: list[str]) -> Shards:
    weight_map = _weight_map(index, read_json(files, index))
    names = sorted(set(weight_map.values()))
    if SINGLE_NAME in present and SINGLE_NAME not in names:
        raise CheckpointError(
            f"{folder}: both {SINGLE_NAME} and {INDEX_NAME}, which does not name it: two sets of weights"
        )
    _check_present(folder, names, weight_map)
    headers = {name: read_header(files, folder / name) for name in names}
    tensors = {tensor: _find(index, headers, tensor, shard) for tensor, shard in weight_map.items()}
    copies = 0
    unindexed: dict[str, Path] = {}
    for name, header in headers.items():
        for tensor in header:
            if tensor not in weight_map:
                unindexed.setdefault(tensor, folder / name)
            elif weight_map[tensor] != name:
                copies += 1
    warnings = [f"{name}: not named by {INDEX_NAME}, not read" for name in present if name not in names]
    warnings += [
        f"{path.name}: tensor {tensor!r} is not in {INDEX_NAME}, not used" for tensor, path in unindexed.items()
    ]
    if copies:
        what = counted(copies, "copy of a tensor", "copies of tensors")
        warnings.append(f"{what} that {INDEX_NAME} places elsewhere, not used")
    return Shards(tensors, tuple(folder / name for name in names), copies, unindexed, tuple(warnings))


def _weight_map(index: Path, content: dict[str, object]) -> dict[str, str]:
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{index}: weight_map is missing, empty or not an object")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise CorruptCheckpointError(
                f"{index}: tensor {tensor!r} lies in {shard!r}, not a file name below the folder"
            )
    return weight_map


def _stays_inside(shard: str) -> bool:
    # A back-slash is a legal character here and a separator where the index was written: no guess is safe.
    path = PurePosixPath(shard)
    plain = shard.encode("utf-8", "replace").decode() == shard and not set(shard) & {"\\", "\0"}
    return plain and path.name != "" and shard == str(path) and not path.is_absolute() and ".." not in path.parts


def _check_present(folder: Path, names: list[str], weight_map: dict[str, str]) -> None:
    counts = Counter(weight_map.values())
    missing = []
    for name in names:
        path = folder / name
        if not path.exists():
            why = describe_open_failure(path, FileNotFoundError(2, "no such file"))
            missing.append(f"{name!r} with {counted(counts[name], 'tensor')} ({why})")
    if missing:
        raise CorruptCheckpointError(f"{folder}: {INDEX_NAME} names shards that are absent: {'; '.join(missing)}")


def _find(index: Path, headers: dict[str, dict[str, TensorInfo]], tensor: str, shard: str) -> TensorInfo:
    if tensor in headers[shard]:
        return headers[shard][tensor]
    elsewhere = [name for name, header in headers.items() if tensor in header]
    where = f"it is in {', '.join(elsewhere)}" if elsewhere else "it is in no shard"
    raise CorruptCheckpointError(f"{index}: places tensor {tensor!r} in {shard}, which does not hold it; {where}")
