"""Where every byte of a container goes: pure arithmetic from shapes, formats and drives, before anything is written.

Owns the choice of a striping rule per layer, the bases of the layers' areas, the places in a record and in
dense.safetensors. Refuses drives without weight. The rules themselves are csrc/striping.py and docs/container.md.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from colibri.core.container_check import PART_ALIGN, STRIPE_LIMIT, stored_tensors
from colibri.core.container_files import ALIGN, DTYPE_BYTES
from colibri.core.tensors import Format, rows_bytes, tiles_bytes
from colibri.v1 import manifest_pb2

MIN_EXTENT_BYTES = 128 << 10  # below it a second drive costs more than it brings (docs/container.md)
PART_KINDS = (
    manifest_pb2.RecordPart.KIND_GATE,
    manifest_pb2.RecordPart.KIND_UP,
    manifest_pb2.RecordPart.KIND_DOWN,
)


class LayoutError(ValueError):
    """Drives that records cannot be laid out on as asked."""


def align(offset: int, unit: int) -> int:
    """Return the first multiple of `unit` that is not below `offset`."""
    return -(-offset // unit) * unit


def record_parts(
    form: manifest_pb2.TensorFormat, hidden: int, intermediate: int
) -> tuple[list[manifest_pb2.RecordPart], int]:
    """Return the parts of an expert's record and its size: gate and up [intermediate, hidden], down the other way."""
    parts: list[manifest_pb2.RecordPart] = []
    end = 0
    for kind in PART_KINDS:
        down = kind == manifest_pb2.RecordPart.KIND_DOWN
        rows, cols = (hidden, intermediate) if down else (intermediate, hidden)
        offset = align(end, PART_ALIGN)
        size = tiles_bytes(Format.from_proto(form), rows, cols)
        parts.append(manifest_pb2.RecordPart(kind=kind, format=form, rows=rows, cols=cols, offset=offset, bytes=size))
        end = offset + size
    return parts, align(end, ALIGN)


def split_shares(record_bytes: int, weights: Sequence[int]) -> list[int]:
    """Cut a record into one piece per drive, multiples of 4096 in proportion to the weights, by largest remainder.

    Each piece is within 4096 bytes of its exact share; equal remainders go to the lower drive.
    """
    units, total = record_bytes // ALIGN, sum(weights)
    shares = [units * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda drive: (-(units * weights[drive] % total), drive))
    for drive in by_remainder[: units - sum(shares)]:
        shares[drive] += 1
    return [share * ALIGN for share in shares]


class WholeSequence:
    """The drives that whole records go to, one after the other, each prefix in proportion to the weights.

    After n records every drive has fewer than one record more or less than its exact share. That is the earliest
    deadline first schedule of unit tasks: record j of drive i may come from n = floor(j * W / w_i) on and must come by
    ceil((j + 1) * W / w_i) (Tijdeman, "The chairman assignment problem", 1980).
    """

    def __init__(self, weights: Sequence[int]) -> None:
        common = gcd(*weights)
        self._weights = [weight // common for weight in weights]
        self.period = sum(self._weights)
        self._given = [0] * len(weights)
        self._n = 0

    def take(self, count: int) -> list[int]:
        """Return the next `count` drives."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        total = self.period
        self._n += 1
        ready = [i for i, weight in enumerate(self._weights) if self._given[i] * total < self._n * weight]
        chosen = min(ready, key=lambda i: (-(-(self._given[i] + 1) * total // self._weights[i]), i))
        self._given[chosen] += 1
        if self._n == total:  # every drive has its exact share: start again, numbers stay small
            self._n, self._given = 0, [0] * len(self._given)
        return chosen


@dataclass(frozen=True)
class Placement:
    """The striping of each expert layer, and the size of each stripe file."""

    striping: list[manifest_pb2.Striping]
    stripe_bytes: list[int]


def place_experts(
    layers: Iterable[manifest_pb2.ExpertLayer], weights: Sequence[int], min_extent_bytes: int = MIN_EXTENT_BYTES
) -> Placement:
    """Place the layers' records (experts and record_bytes are read, striping is not) on drives of these weights.

    A layer is split where every piece reaches min_extent_bytes; otherwise its records stay whole. Raises LayoutError
    for drives that are none, too many or without weight.
    """
    if not 0 < len(weights) <= STRIPE_LIMIT or not all(0 < weight < 2**32 for weight in weights):
        raise LayoutError(f"weights {list(weights)!r}: 1 to {STRIPE_LIMIT} positive 32-bit numbers are wanted")
    ends = [ALIGN] * len(weights)
    sequence = WholeSequence(weights)
    striping = []
    for layer in layers:
        shares = split_shares(layer.record_bytes, weights)
        if min(shares) >= min_extent_bytes:
            striping.append(_split(layer, shares, ends))
        else:
            striping.append(_whole(layer, sequence, ends))
    return Placement(striping, ends)


def _split(layer: manifest_pb2.ExpertLayer, shares: list[int], ends: list[int]) -> manifest_pb2.Striping:
    pieces = []
    for stripe, share in enumerate(shares):
        pieces.append(manifest_pb2.SplitRule.Piece(stripe=stripe, base=ends[stripe], bytes=share))
        ends[stripe] += layer.experts * share
    return manifest_pb2.Striping(split=manifest_pb2.SplitRule(pieces=pieces))


def _whole(layer: manifest_pb2.ExpertLayer, sequence: WholeSequence, ends: list[int]) -> manifest_pb2.Striping:
    """The pattern goes on where the layer before stopped, so that the shares also hold over all layers."""
    drives = sequence.take(layer.experts)
    period = min(sequence.period, layer.experts)
    repeats = all(drive == drives[i % period] for i, drive in enumerate(drives))
    pattern = drives[:period] if repeats else drives
    rule = manifest_pb2.WholeRule(pattern=pattern, base=list(ends))
    for drive in drives:
        ends[drive] += layer.record_bytes
    return manifest_pb2.Striping(whole=rule)


def place_dense(tensors: Sequence[manifest_pb2.DenseTensor]) -> tuple[int, int]:
    """Fill in the blobs' offsets and sizes; return the size of the file's header and of the file.

    Wide elements come first, so that every blob is aligned to its element, as other readers of safetensors want it; the
    order is otherwise that of the tensors. The header is padded to a multiple of 4096.
    """
    for tensor in tensors:
        sizes = rows_bytes(Format.from_proto(tensor.format), tensor.rows, tensor.cols)
        for blob, size in zip((tensor.codes, tensor.scales, tensor.mins), sizes, strict=True):
            if size:  # touching a field of an absent blob would make it present
                blob.bytes = size
    order: list[tuple[int, manifest_pb2.Blob]] = []
    for tensor in tensors:
        blobs = (tensor.codes, tensor.scales, tensor.mins)
        stored = stored_tensors(tensor)
        order += [(-DTYPE_BYTES[entry.dtype], blob) for entry, blob in zip(stored, blobs, strict=False)]
    header_bytes = _header_room(tensors)
    end = header_bytes
    for _, blob in sorted(order, key=lambda item: item[0]):
        blob.offset = end
        end += blob.bytes
    return header_bytes, end


def _header_room(tensors: Sequence[manifest_pb2.DenseTensor]) -> int:
    """Enough for the header whatever its offsets turn out to be: 20 digits each, and 200 bytes of metadata."""
    table = {
        entry.name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [10**19, 10**19]}
        for tensor in tensors
        for entry in stored_tensors(tensor)
    }
    return align(8 + 200 + len(json.dumps(table, separators=(",", ":")).encode()), ALIGN)
