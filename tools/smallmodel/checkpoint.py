"""Writes and reads the MoE checkpoint: two safetensors shards with their index.

Owns the safetensors layout on the writing side, because the format's numpy library has no bfloat16, and the
layer-by-layer reading that the evaluation uses. Refuses a tensor that does not belong, that has another shape,
that comes twice or not at all. At most one layer is in memory at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from smallmodel.bf16 import from_bf16, to_bf16
from smallmodel.layout import (
    EMBEDDING,
    N_DENSE_LAYERS,
    N_EXPERTS,
    Attention,
    FeedForward,
    FloatArray,
    Layer,
    Moe,
    Router,
    Shape,
    layer_prefix,
    tensor_shapes,
)
from smallmodel.tokenizer import write_json

N_SHARDS = 2
ALIGNMENT = 8
"""A safetensors header is padded so that the data starts at a multiple of this."""
F32_SUFFIX = "e_score_correction_bias"
"""The one kind of tensor that GLM and DeepSeek checkpoints keep in f32."""


def tensor_bytes(name: str, dims: tuple[int, ...]) -> int:
    """Bytes of a tensor in the checkpoint."""
    return math.prod(dims) * (4 if name.endswith(F32_SUFFIX) else 2)


class CheckpointWriter:
    """Writes the tensors of one MoE checkpoint into `directory` in any order. A context manager."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self._directory = directory
        self._dims = dict(tensor_shapes(shape))
        self._missing = set(self._dims)
        self._place: dict[str, tuple[int, int]] = {}  # name -> (shard index, offset in the file)
        self._files: list[int] = []
        for names in self._split():
            self._create_shard(names)

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(dims) for dims in self._dims.values())

    def _split(self) -> list[list[str]]:
        shards: list[list[str]] = [[] for _ in range(N_SHARDS)]
        total = sum(tensor_bytes(name, dims) for name, dims in self._dims.items())
        before = 0
        for name, dims in self._dims.items():
            shards[before * N_SHARDS // total].append(name)
            before += tensor_bytes(name, dims)
        return shards

    def _shard_path(self, index: int) -> Path:
        return self._directory / f"model-{index + 1:05d}-of-{N_SHARDS:05d}.safetensors"

    def _create_shard(self, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for name in names:
            start, end = end, end + tensor_bytes(name, self._dims[name])
            kind = "F32" if name.endswith(F32_SUFFIX) else "BF16"
            header[name] = {"dtype": kind, "shape": list(self._dims[name]), "data_offsets": [start, end]}
            offsets[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        index = len(self._files)
        self._files.append(os.open(self._shard_path(index), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
        _write_all(self._files[index], len(text).to_bytes(8, "little") + text, 0)
        self._place |= {name: (index, 8 + len(text) + start) for name, start in offsets.items()}

    def put(self, name: str, values: FloatArray) -> None:
        """Write one tensor, in bf16 or, where the layout says so, f32. Raises ValueError as the file header says."""
        if name not in self._missing:
            raise ValueError(f"tensor {name} does not belong in the checkpoint or was written before")
        if values.shape != self._dims[name]:
            raise ValueError(f"tensor {name} has shape {list(values.shape)}, not {list(self._dims[name])}")
        index, offset = self._place[name]
        data = values.astype("<f4") if name.endswith(F32_SUFFIX) else to_bf16(values).astype("<u2")
        _write_all(self._files[index], data.tobytes(), offset)
        self._missing.remove(name)

    def put_layer(self, layer_index: int, tensors: Iterable[tuple[str, FloatArray]]) -> None:
        """Write a layer's tensors, given under their names without the layer prefix."""
        for name, values in tensors:
            self.put(layer_prefix(layer_index) + name, values)

    def finish(self) -> None:
        """Write the index. Raises ValueError if a tensor has not been written."""
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors were never written, such as {min(self._missing)}")
        weight_map = {name: self._shard_path(index).name for name, (index, _) in self._place.items()}
        total = sum(tensor_bytes(name, dims) for name, dims in self._dims.items())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(self._directory / "model.safetensors.index.json", index)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files:
            os.close(file)


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(file, view, offset)
        view, offset = view[n:], offset + n


class CheckpointReader:
    """Reads the tensors of a checkpoint that this package wrote, as f32."""

    def __init__(self, directory: Path) -> None:
        self.shape = read_shape(directory)
        weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        self._tensors: dict[str, tuple[Path, int, dict[str, object]]] = {}
        for file_name in sorted(set(weight_map.values())):
            path = directory / file_name
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_bytes))
            del header["__metadata__"]
            self._tensors |= {name: (path, 8 + header_bytes, entry) for name, entry in header.items()}

    def tensor(self, name: str) -> FloatArray:
        """Tensor `name` as f32. Raises KeyError if there is none."""
        path, data_start, entry = self._tensors[name]
        dims, offsets = entry["shape"], entry["data_offsets"]
        assert isinstance(dims, list)
        assert isinstance(offsets, list)
        dtype = np.dtype("<f4" if entry["dtype"] == "F32" else "<u2")
        count = (offsets[1] - offsets[0]) // dtype.itemsize
        raw = np.fromfile(path, dtype=dtype, count=count, offset=data_start + offsets[0]).reshape(dims)
        return raw if entry["dtype"] == "F32" else from_bf16(raw)

    def embedding(self) -> FloatArray:
        """[vocab, hidden]; also the head."""
        return self.tensor(EMBEDDING)

    def layer(self, index: int) -> Layer:
        """All weights of layer `index`."""
        prefix = layer_prefix(index)

        def ffn(name: str) -> FeedForward:
            return FeedForward(*(self.tensor(f"{prefix}mlp.{name}{p}_proj.weight") for p in ("gate", "up", "down")))

        attention = Attention(*(self.tensor(f"{prefix}self_attn.{p}_proj.weight") for p in "qkvo"))
        feed_forward: FeedForward | Moe
        if index < N_DENSE_LAYERS:
            feed_forward = ffn("")
        else:
            router = Router(self.tensor(f"{prefix}mlp.gate.weight"), self.tensor(f"{prefix}mlp.gate.{F32_SUFFIX}"))
            experts = tuple(ffn(f"experts.{e}.") for e in range(N_EXPERTS))
            feed_forward = Moe(router, ffn("shared_experts."), experts)
        return Layer(
            self.tensor(prefix + "input_layernorm.weight"),
            attention,
            self.tensor(prefix + "post_attention_layernorm.weight"),
            feed_forward,
        )


def read_shape(directory: Path) -> Shape:
    """The shape that a checkpoint's config.json states."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
    )
