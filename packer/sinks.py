"""Puts encoded pieces in their place: dense tensors into dense.safetensors, expert records into the stripes.

Owns hashing and the zero padding of records. Pieces come in logical order; when the last one of a tensor or record has
been written, its checksums, digest and report come back for the journal. Nothing is synced here.
"""

import hashlib
from math import sqrt

import numpy as np

from colibri.core.striping import layer_extents
from colibri.core.tensors import QuantReport, crc32c
from colibri.packer.encode import TILE_ROWS, EncodedPiece
from colibri.packer.journal import DoneDense, DoneRecord, UnitReport
from colibri.packer.outputs import Outputs
from colibri.v1 import manifest_pb2

_READ_BACK_BYTES = 8 << 20
_FLUSH_BYTES = 1 << 20


def relative_rms(error_squares: float, sum_squares: float) -> float:
    """Return sqrt(sum (w - w')^2 / sum w^2), 0 for an all-zero tensor."""
    return sqrt(error_squares / sum_squares) if sum_squares else 0.0


class _Reports:
    """Adds up the reports of a unit's pieces, matrix by matrix."""

    def __init__(self) -> None:
        self._by_label: dict[str, QuantReport] = {}

    def add(self, encoded: EncodedPiece) -> None:
        label = encoded.piece.label
        known = self._by_label.get(label)
        self._by_label[label] = encoded.report if known is None else known + encoded.report

    def unit(self) -> UnitReport:
        reports = self._by_label.values()
        rms = {label: relative_rms(r.error_squares, r.sum_squares) for label, r in self._by_label.items()}
        worst = max(rms, key=lambda label: rms[label])
        return UnitReport(
            values=sum(report.values for report in reports),
            nonzero=sum(report.nonzero for report in reports),
            zeroed=sum(report.zeroed for report in reports),
            sum_squares=sum(report.sum_squares for report in reports),
            error_squares=sum(report.error_squares for report in reports),
            worst_rms=rms[worst],
            worst_name=worst,
        )


class DenseSink:
    """Writes dense tensors."""

    def __init__(self, manifest: manifest_pb2.Manifest, outputs: Outputs) -> None:
        self._manifest = manifest
        self._outputs = outputs
        self._start()

    def _start(self) -> None:
        self._crcs = [0, 0, 0]
        self._digest = hashlib.sha256()
        self._reports = _Reports()

    def feed(self, encoded: EncodedPiece) -> DoneDense | None:
        """Write a piece; return the tensor's sums if it was the last one. Raises DriveError."""
        piece = encoded.piece
        tensor = self._manifest.dense[piece.unit]
        blobs = (tensor.codes, tensor.scales, tensor.mins)
        for index, (blob, data) in enumerate(zip(blobs, (encoded.codes, encoded.scales, encoded.mins), strict=True)):
            if blob.bytes:
                self._outputs.dense.write(blob.offset + piece.row_begin * (blob.bytes // tensor.rows), data)
                self._crcs[index] = crc32c(data, self._crcs[index])
        self._digest.update(encoded.codes)
        self._reports.add(encoded)
        if piece.row_end < tensor.rows:
            return None
        # The digest wants all codes before the first scale; keeping the scales would cost memory, reading them does
        # not.
        for blob in blobs[1:]:
            for begin in range(0, blob.bytes, _READ_BACK_BYTES):
                count = min(_READ_BACK_BYTES, blob.bytes - begin)
                self._digest.update(self._outputs.dense.read(blob.offset + begin, count))
        codes, scales, mins = self._crcs
        done = DoneDense((codes, scales, mins), self._digest.hexdigest(), self._reports.unit())
        self._start()
        return done


class RecordSink:
    """Writes expert records, each cut into its extents."""

    def __init__(self, manifest: manifest_pb2.Manifest, outputs: Outputs) -> None:
        self._outputs = outputs
        self._layers = list(manifest.expert_layers)
        self._ends = np.cumsum([layer.experts for layer in self._layers])
        self._layer_index = -1
        self._unit = -1

    def feed(self, encoded: EncodedPiece) -> DoneRecord | None:
        """Write a piece; return the record's sums if it was the last one. Raises DriveError."""
        piece = encoded.piece
        if piece.unit != self._unit:
            self._start(piece.unit)
        part = self._layer.parts[piece.part]
        tile_bytes = part.bytes // -(-part.rows // TILE_ROWS)
        self._pad(part.offset + piece.row_begin // TILE_ROWS * tile_bytes)
        self._put(encoded.codes)
        self._reports.add(encoded)
        if piece.part + 1 < len(self._layer.parts) or piece.row_end < part.rows:
            return None
        self._pad(self._layer.record_bytes)
        self._flush()
        return DoneRecord(tuple(self._crcs), self._digest.hexdigest(), self._reports.unit())

    def _start(self, unit: int) -> None:
        layer_index = int(np.searchsorted(self._ends, unit, side="right"))
        if layer_index != self._layer_index:
            self._layer_index, self._layer = layer_index, self._layers[layer_index]
            self._table = layer_extents(self._layer)
        self._extents = self._table[unit - int(self._ends[layer_index]) + self._layer.experts]
        self._unit = unit
        self._crcs = [0] * len(self._extents)
        self._digest = hashlib.sha256()
        self._reports = _Reports()
        self._buffer = bytearray()
        self._flushed = 0  # bytes of the record that are written

    def _pad(self, offset: int) -> None:
        missing = offset - self._flushed - len(self._buffer)
        assert missing >= 0, "pieces come in order and fit their parts"
        self._put(bytes(missing))

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        if len(self._buffer) >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._digest.update(self._buffer)
        begin, end = self._flushed, self._flushed + len(self._buffer)
        view = memoryview(self._buffer)
        for index, extent in enumerate(self._extents):
            first = int(extent["record_offset"])
            low, high = max(begin, first), min(end, first + int(extent["bytes"]))
            if low < high:
                data = view[low - begin : high - begin]
                self._outputs.write(int(extent["stripe"]), int(extent["file_offset"]) + low - first, data)
                self._crcs[index] = crc32c(data, self._crcs[index])
        self._flushed = end
        self._buffer = bytearray()
