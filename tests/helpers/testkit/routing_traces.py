"""Routing as trace files that were not recorded by a model: from arrays of expert ids, for tests and benchmarks.

The files have no state: a replay begins with an empty cache that knows nothing. docs/caching.md describes the bytes.
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.core.tensors import crc32c

HEADER = struct.Struct("<8sIIQQQdII")
BLOCK = struct.Struct("<IIIIQQQ")
NEXT_LAYER, FAR, USES, RELEASE_TURN, TICK = 0xC0, 0xC2, 0xC3, 0xC4, 0xCD
_PAYLOAD = 12000


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def header(experts: Sequence[int], record_bytes: int, slots: int, ring: int, state: bytes | None = None) -> bytes:
    """The start of a trace of layers with so many experts each."""
    layers = b"".join(struct.pack("<IIQ", number, count, record_bytes) for number, count in enumerate(experts))
    rest = struct.pack("<QQQdII", HEADER.size + len(layers) + len(state or b""), slots, ring, 0.0, len(experts),
                       state is not None)  # fmt: skip
    rest += layers + (state or b"")
    return struct.pack("<8sII", b"COLTRACE", 1, crc32c(rest)) + rest


def block(payload: bytes, *, last: bool = False, steps: int = 0, hits: int = 0, loads: int = 0) -> bytes:
    rest = struct.pack("<IQQQ", last, steps, hits, loads) + payload
    return struct.pack("<III", 0x4B4C4243, len(payload), crc32c(rest)) + rest


def turn(experts: Iterable[tuple[int, int]]) -> bytes:
    """A layer's turn in a decode step: pairs of expert and rows, each expert once."""
    out, last = bytearray([NEXT_LAYER]), -1
    for expert, rows in experts:
        distance = expert - last
        out += bytes([distance + 64]) if -64 <= distance < 128 else bytes([FAR]) + varint(zigzag(distance))
        if rows != 1:
            out += bytes([USES]) + varint(rows)
        last = expert
    return bytes([*out, RELEASE_TURN])


def write_routing(
    path: Path,
    routing: npt.NDArray[np.integer[Any]],
    experts: int,
    *,
    rows: int = 1,
    ring: int = 8,
    record_bytes: int = 4096,
) -> Path:
    """Write the ids `routing` [tokens, layers, top_k] as decode steps of `rows` sequences that run side by side.

    The tokens are cut into `rows` equal parts; step t decodes token t of each.
    """
    steps = len(routing) // rows
    sides = routing[: steps * rows].reshape(rows, steps, *routing.shape[1:]).astype(np.int64)
    out, payload = [header([experts] * routing.shape[1], record_bytes, 1, ring)], bytearray()
    for step in range(steps):
        for layer in range(routing.shape[1]):
            wanted, counts = np.unique(sides[:, step, layer], return_counts=True)
            payload += turn(zip(wanted.tolist(), counts.tolist(), strict=True))
            if len(payload) > _PAYLOAD:
                out.append(block(bytes(payload), steps=step))
                payload.clear()
        payload.append(TICK)
    path.write_bytes(b"".join([*out, block(bytes(payload), last=True, steps=steps)]))
    return path
