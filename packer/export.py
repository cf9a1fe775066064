"""`colibri-pack export`: a container back to a Hugging Face checkpoint with the weights that the daemon computes with.

Dequantises everything to f32 (or rounds that to bf16) under the family's own names, in shards of bounded size, with the
bundled files and a config.json that fits. Checks every byte on the way, like the daemon. For comparing with other
implementations; the result is several times as large as the container.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from colibri.core.container import Container, ContainerError
from colibri.core.container_check import VECTOR_ROLES
from colibri.core.container_files import read_exact
from colibri.core.tensors import Format, crc32c, dequantize_rows, dequantize_tiles
from colibri.packer.disk import Disk, OutputFile, reaching
from colibri.packer.encode import TILE_ROWS, cut_rows
from colibri.packer.errors import FolderError
from colibri.packer.families import FAMILIES, dense_name, expert_name
from colibri.packer.folders import folders_of, make_folders, refuse_within
from colibri.packer.layout import align
from colibri.packer.outputs import PARTIAL
from colibri.packer.progress import Reporter
from colibri.packer.records import RecordReader
from colibri.v1 import manifest_pb2

SHARD_BYTES = 2 << 30
INDEX_NAME = "model.safetensors.index.json"
Dtype = Literal["f32", "bf16"]
_ELEMENT_BYTES = {"f32": 4, "bf16": 2}
_PIECE_BYTES = 8 << 20

_F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the result: its hub name, its shape, and where in the container it is (layer_index -1: dense)."""

    name: str
    shape: tuple[int, ...]
    layer_index: int
    index: int  # of the dense tensor, or the expert
    part: int

    def bytes(self, dtype: Dtype) -> int:
        size = _ELEMENT_BYTES[dtype]
        for dim in self.shape:
            size *= dim
        return size


def export(
    container: Container,
    out: Path,
    reporter: Reporter,
    *,
    dtype: Dtype = "f32",
    shard_bytes: int = SHARD_BYTES,
    disk: Disk | None = None,
) -> list[str]:
    """Write the checkpoint into the empty or new folder `out`; return the shards' names.

    Raises FolderError for a folder that holds anything, lies inside the container or cannot be used, ContainerError
    for bytes that fail their checksum, DriveError.
    """
    disk = disk or Disk()
    tensors = _tensors(container.manifest)
    shards = _cut(tensors, dtype, shard_bytes)
    refuse_within([out], folders_of(container), "the container")
    make_folders([out])
    with reaching(out, "listing"):
        empty = not any(out.iterdir())
    if not empty:
        raise FolderError(f"{out} is not empty")
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    with _Source(container) as source:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(disk, out / name, shard, source, dtype, reporter)
    _write_rest(disk, container, out, dict(zip(names, shards, strict=True)), dtype)
    return names


def exported_bytes(manifest: manifest_pb2.Manifest, dtype: Dtype) -> int:
    """Return the size of all tensors that export writes."""
    return sum(tensor.bytes(dtype) for tensor in _tensors(manifest))


def _tensors(manifest: manifest_pb2.Manifest) -> list[_Tensor]:
    family = FAMILIES.get(manifest.spec.family)
    if family is None:
        raise ContainerError(f"spec.family {manifest.spec.family[:80]!r} is not one whose names this build knows")
    tensors = []
    for index, dense in enumerate(manifest.dense):
        shape = (dense.cols,) if dense.role in VECTOR_ROLES else (dense.rows, dense.cols)
        tensors.append(_Tensor(dense_name(family.names, dense.role, dense.layer), shape, -1, index, 0))
    for layer_index, layer in enumerate(manifest.expert_layers):
        for expert in range(layer.experts):
            for number, part in enumerate(layer.parts):
                name = expert_name(family.names, layer.layer, expert, part.kind)
                tensors.append(_Tensor(name, (part.rows, part.cols), layer_index, expert, number))
    return tensors


def _cut(tensors: list[_Tensor], dtype: Dtype, shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes(dtype) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes(dtype)
    return shards


def _write_shard(
    disk: Disk, path: Path, tensors: list[_Tensor], source: "_Source", dtype: Dtype, reporter: Reporter
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        size = tensor.bytes(dtype)
        header[tensor.name] = {"dtype": dtype.upper(), "shape": tensor.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align(len(text), 8), b" ")
    file = disk.open_output(path.with_name(path.name + PARTIAL))
    try:
        file.write(0, struct.pack("<Q", len(text)) + text)
        offset = 8 + len(text)
        for tensor in tensors:
            for rows in source.rows(tensor):
                data = _to_dtype(rows, dtype).data.cast("B")
                file.write(offset, data)
                offset += data.nbytes
                reporter.advance(data.nbytes)
        _publish(disk, file, path)
    finally:
        file.close()


def _publish(disk: Disk, file: OutputFile, path: Path) -> None:
    file.sync()
    file.close()
    disk.rename(file.path, path)
    disk.sync_folder(path.parent)


def _to_dtype(rows: _F32, dtype: Dtype) -> npt.NDArray[Any]:
    """f32, or its upper half rounded to nearest, ties to even (the weights are finite)."""
    if dtype == "f32":
        return rows
    bits = np.ascontiguousarray(rows).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


class _Source:
    """Reads a container's tensors as f32 rows, a few MiB at a time, each byte checked. A context manager."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._manifest = container.manifest
        self._record_key = (-1, -1)
        self._record = b""

    def __enter__(self) -> "_Source":
        self._dense = os.open(self._container.dense_path, os.O_RDONLY | os.O_CLOEXEC)
        self._records = RecordReader(self._container)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._dense)
        self._records.close()

    def rows(self, tensor: _Tensor) -> Iterator[_F32]:
        """Give the tensor in order, as runs of rows. Raises ContainerError for bytes that fail their checksum."""
        if tensor.layer_index < 0:
            return self._dense_rows(self._manifest.dense[tensor.index])
        return self._part_rows(tensor)

    def _dense_rows(self, tensor: manifest_pb2.DenseTensor) -> Iterator[_F32]:
        form = Format.from_proto(tensor.format)
        blobs = (tensor.codes, tensor.scales, tensor.mins)
        crcs = [0, 0, 0]
        for begin, end in cut_rows(tensor.rows, tensor.cols, _PIECE_BYTES):
            data = []
            for index, blob in enumerate(blobs):
                stride = blob.bytes // tensor.rows
                piece = read_exact(self._dense, blob.offset + begin * stride, (end - begin) * stride)
                crcs[index] = crc32c(piece, crcs[index])
                data.append(piece)
            yield dequantize_rows(form, data[0], data[1], data[2], end - begin, tensor.cols)
        for name, blob, crc in zip(("codes", "scales", "mins"), blobs, crcs, strict=True):
            if crc != blob.crc32c:
                raise ContainerError(
                    f"{self._container.dense_path}: tensor {tensor.name}, {name} at offset {blob.offset}: "
                    f"CRC-32C is {crc:08x}, the manifest says {blob.crc32c:08x}"
                )

    def _part_rows(self, tensor: _Tensor) -> Iterator[_F32]:
        part = self._manifest.expert_layers[tensor.layer_index].parts[tensor.part]
        form = Format.from_proto(part.format)
        record = memoryview(self._read_record(tensor.layer_index, tensor.index))
        tile_bytes = part.bytes // -(-part.rows // TILE_ROWS)
        for begin, end in cut_rows(part.rows, part.cols, _PIECE_BYTES):
            first = part.offset + begin // TILE_ROWS * tile_bytes
            tiles = record[first : first + -(-(end - begin) // TILE_ROWS) * tile_bytes]
            yield dequantize_tiles(form, tiles, end - begin, part.cols)

    def _read_record(self, layer_index: int, expert: int) -> bytes:
        if self._record_key != (layer_index, expert):
            self._record_key = (-1, -1)
            self._record = self._records.read(layer_index, expert)
            self._record_key = (layer_index, expert)
        return self._record


def _write_rest(disk: Disk, container: Container, out: Path, shards: dict[str, list[_Tensor]], dtype: Dtype) -> None:
    """Bundled files, the config last but for the index, which makes the folder a checkpoint."""
    files = {file.name: (container.primary / file.name).read_bytes() for file in container.manifest.files}
    files["config.json"] = _config(files.get("config.json", b"{}"), container.manifest.spec, dtype)
    weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
    total = sum(tensor.bytes(dtype) for tensors in shards.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files[INDEX_NAME] = json.dumps(index, indent=1).encode()
    for name, content in files.items():
        file = disk.open_output(out / (name + PARTIAL))
        try:
            file.write(0, content)
            _publish(disk, file, out / name)
        finally:
            file.close()


def _config(text: bytes, spec: manifest_pb2.ModelSpec, dtype: Dtype) -> bytes:
    """The bundled config with the few keys that the export changes: dtype, what is tied, rows, no MTP layers."""
    config = json.loads(text)
    for table in [config, config.get("text_config")]:
        if not isinstance(table, dict):
            continue
        for key in ("torch_dtype", "dtype"):
            if key in table:
                table[key] = "float32" if dtype == "f32" else "bfloat16"
        if table.get("num_nextn_predict_layers"):
            table["num_nextn_predict_layers"] = 0
        for key, value in (("tie_word_embeddings", spec.tied_embeddings), ("vocab_size", spec.vocab_size)):
            if key in table or table is config:
                table[key] = value
    return json.dumps(config, indent=2).encode() + b"\n"
