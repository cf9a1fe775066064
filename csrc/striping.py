"""Where the bytes of an expert record lie: the arithmetic of docs/container.md, "Expert records", and nothing else.

The packer places records by it and the reader finds them by it, so there is one definition. Pure: no file is touched,
and a rule is taken as valid here; container_check.py refuses those that are not.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri.v1 import manifest_pb2

# The memory layout of cl_extent in colibri.h.
EXTENT = np.dtype(
    [("stripe", "<u4"), ("crc32c", "<u4"), ("file_offset", "<u8"), ("record_offset", "<u8"), ("bytes", "<u8")]
)

ExtentTable = npt.NDArray[np.void]


@dataclass(frozen=True)
class Area:
    """The bytes [begin, end) of a stripe file that a layer takes."""

    stripe: int
    begin: int
    end: int


def extents_per_record(layer: manifest_pb2.ExpertLayer) -> int:
    """Return into how many extents each record of the layer is cut."""
    return len(layer.striping.split.pieces) if layer.striping.HasField("split") else 1


def layer_extents(layer: manifest_pb2.ExpertLayer) -> ExtentTable:
    """Return the extents [experts, extents_per_record] of a layer, checksums zero."""
    table = np.zeros((layer.experts, extents_per_record(layer)), EXTENT)
    expert = np.arange(layer.experts, dtype=np.uint64)
    if layer.striping.HasField("split"):
        record_offset = 0
        for index, piece in enumerate(layer.striping.split.pieces):
            column = table[:, index]
            column["stripe"] = piece.stripe
            column["file_offset"] = np.uint64(piece.base) + expert * np.uint64(piece.bytes)
            column["record_offset"] = record_offset
            column["bytes"] = piece.bytes
            record_offset += piece.bytes
        return table
    rule = layer.striping.whole
    pattern = np.array(rule.pattern, np.uint32)
    slot = (expert % np.uint64(len(pattern))).astype(np.int64)
    turn = expert // np.uint64(len(pattern))
    per_turn = np.bincount(pattern)[pattern].astype(np.uint64)
    before = _earlier_equals(pattern)
    base = np.array([rule.base[stripe] for stripe in pattern], np.uint64)
    column = table[:, 0]
    column["stripe"] = pattern[slot]
    column["file_offset"] = base[slot] + (turn * per_turn[slot] + before[slot]) * np.uint64(layer.record_bytes)
    column["bytes"] = layer.record_bytes
    return table


def _earlier_equals(pattern: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return for each entry how many entries before it are equal; not quadratic, a pattern may be hostile."""
    order = np.argsort(pattern, kind="stable")
    grouped = pattern[order]
    before = np.empty(len(pattern), np.uint64)
    before[order] = np.arange(len(pattern)) - np.searchsorted(grouped, grouped)
    return before


def layer_areas(layer: manifest_pb2.ExpertLayer) -> list[Area]:
    """Return what the layer takes of each stripe file, empty areas left out."""
    if layer.striping.HasField("split"):
        return [
            Area(piece.stripe, piece.base, piece.base + layer.experts * piece.bytes)
            for piece in layer.striping.split.pieces
        ]
    rule = layer.striping.whole
    turns, rest = divmod(layer.experts, len(rule.pattern))
    whole, part = Counter(rule.pattern), Counter(rule.pattern[:rest])
    areas = []
    for stripe in sorted(whole):
        records = turns * whole[stripe] + part[stripe]
        if records:
            areas.append(Area(stripe, rule.base[stripe], rule.base[stripe] + records * layer.record_bytes))
    return areas
