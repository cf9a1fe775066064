"""From source rows to stored bytes: cuts every matrix into pieces and quantises them on all cores, in order.

Owns the bound on memory: a piece is a few MiB of source, and only so many are in flight, however large the model is.
The core makes the bytes (colibri.core.tensors) with the interpreter's lock released; results come back in logical
order, which is what lets the writer stream, hash and journal. Refuses numbers that are not finite, by tensor, row and
column.
"""

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from colibri.core.errors import NonFiniteError, UnsupportedError
from colibri.core.tensors import Format, QuantReport, SourceType, quantize_rows, quantize_tiles
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError
from colibri.packer.layout import PART_KINDS
from colibri.packer.model_source import ModelSource, SourceSlice, read_matrix
from colibri.v1 import manifest_pb2

MEMORY_BYTES = 320 << 20  # source and result of all pieces in flight
PIECE_BYTES = 8 << 20  # source of one piece, as f32
TILE_ROWS = 8
_PART_NAMES = ("gate", "up", "down")
_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_CORE_TYPES: dict[str, SourceType] = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row_begin, row_end) of a matrix [rows, cols]; row_begin is a multiple of 8.

    `unit` is the index of the dense tensor or of the record (in logical order), `part` that of the matrix in it,
    `label` its canonical name. Records are stored in tiles, dense tensors row by row.
    """

    unit: int
    part: int
    label: str
    source: SourceSlice
    form: Format
    cols: int
    row_begin: int
    row_end: int
    tiled: bool

    @property
    def work_bytes(self) -> int:
        """Memory that the piece may take: source, copy and result."""
        return (self.row_end - self.row_begin + TILE_ROWS) * self.cols * 4 * 2


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """The stored bytes of a piece; scales and mins are empty where the bytes are tiles or the format has none."""

    piece: Piece
    codes: memoryview
    scales: memoryview
    mins: memoryview
    report: QuantReport


def cut_rows(rows: int, cols: int, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of a multiple of 8 (but the last) that hold about `piece_bytes` of f32."""
    step = max(TILE_ROWS, piece_bytes // (4 * cols) // TILE_ROWS * TILE_ROWS)
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def dense_pieces(model: ModelSource, manifest: manifest_pb2.Manifest, first: int) -> Iterator[Piece]:
    """All pieces of the dense tensors from index `first` on."""
    for index in range(first, len(model.dense)):
        source = model.dense[index]
        form = Format.from_proto(manifest.dense[index].format)
        for begin, end in cut_rows(source.rows, source.cols):
            yield Piece(index, 0, source.name, source.source, form, source.cols, begin, end, tiled=False)


def record_pieces(model: ModelSource, manifest: manifest_pb2.Manifest, first: int) -> Iterator[Piece]:
    """All pieces of the expert records from logical index `first` on."""
    unit = 0
    for source, layer in zip(model.expert_layers, manifest.expert_layers, strict=True):
        forms = [Format.from_proto(part.format) for part in layer.parts]
        for expert in range(max(0, first - unit), source.experts):
            for index, (kind, part, form) in enumerate(zip(PART_KINDS, layer.parts, forms, strict=True)):
                label = f"layers.{source.layer}.experts.{expert}.{_PART_NAMES[index]}"
                matrix = source.matrices(expert, kind)
                for begin, end in cut_rows(part.rows, part.cols):
                    yield Piece(unit + expert, index, label, matrix, form, part.cols, begin, end, tiled=True)
        unit += source.experts


def encode(checkpoint: Checkpoint, piece: Piece) -> EncodedPiece:
    """Read and quantise one piece. Raises CheckpointError for values that are not finite or that the
    format cannot hold, or a read that fails."""
    rows = piece.row_end - piece.row_begin
    source = read_matrix(checkpoint, piece.source, piece.row_begin, piece.row_end)
    source_type: SourceType = _CORE_TYPES[source.source_type]
    try:
        if piece.tiled:
            tiles, report = quantize_tiles(
                piece.form, source.buffer, source_type, rows, piece.cols, row_stride=source.row_stride
            )
            return EncodedPiece(piece, memoryview(tiles), memoryview(b""), memoryview(b""), report)
        codes, scales, mins, report = quantize_rows(
            piece.form, source.buffer, source_type, rows, piece.cols, row_stride=source.row_stride
        )
        return EncodedPiece(piece, codes.data, scales.data, mins.data, report)
    except NonFiniteError as error:
        raise CheckpointError(
            f"{piece.source.tensor}: NaN or infinity in {piece.label} at row {piece.row_begin + error.row}, "
            f"column {error.col}"
        ) from error
    except UnsupportedError as error:  # a scale or minimum that f16 cannot hold; the core counts rows from the piece's
        place = f"{piece.label}, counted from row {piece.row_begin}"
        raise CheckpointError(f"{piece.source.tensor}: {place}: {error}") from error


def worker_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode_all(checkpoint: Checkpoint, pieces: Iterator[Piece], workers: int) -> Generator[EncodedPiece, None, None]:
    """Encode on `workers` threads; results in the order of `pieces`, never more in flight than MEMORY_BYTES allow."""
    waiting: deque[tuple[Piece, Future[EncodedPiece]]] = deque()
    held = 0
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quantise")
    try:
        for piece in pieces:
            while waiting and (held + piece.work_bytes > MEMORY_BYTES or len(waiting) >= 2 * workers):
                done, future = waiting.popleft()
                held -= done.work_bytes
                yield future.result()
            waiting.append((piece, pool.submit(encode, checkpoint, piece)))
            held += piece.work_bytes
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def piece_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    """Return how many bytes of the source a piece stands for."""
    return (
        (piece.row_end - piece.row_begin) * piece.cols * _ELEMENT_BYTES[checkpoint.tensors[piece.source.tensor].dtype]
    )
