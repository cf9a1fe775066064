"""What a family file makes of a checkpoint: the model's spec and, for every matrix, where it lies in the source.

Owns the types between families and writer, and the one function that cuts a matrix out of a source tensor, whatever its
layout (per expert or fused, transposed, gate and up stacked or interleaved). Refuses nothing by itself: families has
checked every shape before a SourceSlice exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from colibri.packer.checkpoint import Checkpoint
from colibri.v1 import manifest_pb2

SourceType = Literal["F32", "BF16", "F16"]
TensorClass = Literal["attention", "shared", "ffn", "embedding", "head", "exact"]
SOURCE_TYPES: tuple[SourceType, ...] = ("F32", "BF16", "F16")
_ELEMENT_BYTES: dict[str, int] = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """How to cut a matrix [rows, cols] out of a source tensor.

    Of a 3-D tensor `expert` is taken first; a vector counts as [1, n]. `transposed` then swaps the two dimensions.
    Last, `rows` = (begin, end) with `row_step` picks rows; None means all.
    """

    tensor: str
    rows: tuple[int, int] | None
    expert: int | None
    transposed: bool = False
    row_step: int = 1


@dataclass(frozen=True, slots=True)
class DenseSource:
    """One dense tensor of the container, [rows, cols], and its source; `role` is a TensorRole."""

    role: manifest_pb2.TensorRole
    layer: int  # -1: the model's own
    name: str  # canonical, docs/container.md
    tensor_class: TensorClass
    rows: int
    cols: int
    source: SourceSlice
    source_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayerSource:
    """The routed experts of one layer: gate and up are [intermediate, hidden], down is [hidden, intermediate].

    `matrices(expert, kind)` gives the slice; kind is RecordPart.KIND_GATE, KIND_UP or KIND_DOWN.
    """

    layer: int
    experts: int
    intermediate: int
    hidden: int
    matrices: Callable[[int, manifest_pb2.RecordPart.Kind], SourceSlice]
    source_pattern: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors of the checkpoint that a named rule leaves out."""

    rule: str
    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, understood. `dense` is in the order of the container: the model's own tensors, then by layer."""

    spec: manifest_pb2.ModelSpec
    dense: tuple[DenseSource, ...]
    expert_layers: tuple[ExpertLayerSource, ...]  # ascending layer
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...]  # go into the manifest: no path of this machine


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Rows of one matrix as read: row r, column c is element r * row_stride + c of `buffer`."""

    buffer: memoryview
    source_type: SourceType
    rows: int
    cols: int
    row_stride: int  # in elements


def read_matrix(checkpoint: Checkpoint, source: SourceSlice, row_begin: int, row_end: int) -> MatrixRows:
    """Read rows [row_begin, row_end) of the matrix that `source` describes, and of the tensor no more than they span.

    Rows of the source come as they lie, so interleaved ones have a row_stride of row_step * cols; a transposed source
    is turned row by row into contiguous rows. Raises ValueError for rows outside the matrix or a dtype that cannot be
    packed, CheckpointError when reading fails.
    """
    info = checkpoint.tensors[source.tensor]
    source_type = next((known for known in SOURCE_TYPES if known == info.dtype), None)
    if source_type is None:
        raise ValueError(f"{source.tensor}: dtype {info.dtype} is not one of {', '.join(SOURCE_TYPES)}")
    shape = info.shape if len(info.shape) > 1 else (1, *info.shape)
    stored_rows, stored_cols = shape[-2:]
    base = 0 if source.expert is None else source.expert * stored_rows * stored_cols
    height, cols = (stored_cols, stored_rows) if source.transposed else (stored_rows, stored_cols)
    begin, end = source.rows or (0, height)
    if not 0 <= row_begin <= row_end <= len(range(begin, min(end, height), source.row_step)):
        raise ValueError(f"{source.tensor}: rows [{row_begin}, {row_end}) are outside {source}")
    rows = row_end - row_begin
    first = begin + row_begin * source.row_step if rows else begin
    span = (rows - 1) * source.row_step + 1 if rows else 0
    if source.transposed:
        block = _read_columns(checkpoint, source, base, (stored_rows, stored_cols), (first, span))
        return MatrixRows(block, source_type, rows, cols, cols)
    buffer = bytearray(span * cols * _ELEMENT_BYTES[source_type])
    checkpoint.read_into(source.tensor, buffer, start_element=base + first * cols, n_elements=span * cols)
    return MatrixRows(memoryview(buffer), source_type, rows, cols, source.row_step * cols)


def _read_columns(
    checkpoint: Checkpoint, source: SourceSlice, base: int, stored: tuple[int, int], columns: tuple[int, int]
) -> memoryview:
    """Columns [first, first + span) of a stored [rows, cols] matrix, every row_step-th, as contiguous rows."""
    (stored_rows, stored_cols), (first, span) = stored, columns
    dtype = np.dtype(f"u{_ELEMENT_BYTES[checkpoint.tensors[source.tensor].dtype]}")
    block = np.empty((len(range(0, span, source.row_step)), stored_rows), dtype)
    line = np.empty(span, dtype)
    for row in range(stored_rows if span else 0):
        start = base + row * stored_cols + first
        checkpoint.read_into(source.tensor, line.data, start_element=start, n_elements=span)
        block[:, row] = line[:: source.row_step]
    return block.data.cast("B") if block.size else memoryview(bytearray())
