"""Weights of a giant slice: random codes with sane scales, and routing that the tokens decide.

Owns the numbers, not where they lie (giant.py). Random matrices are windows of a pool of random codes, scaled so that a
unit-variance input gives an output of the wanted size; what a layer adds to the residual stream shrinks with the number
of layers, so activations stay bounded over any of them. Every token has `top_k` experts of its own in every layer: its
embedding is the sum of their router rows and noise, so the model's own router finds them again. A token stream with a
Zipf law and drift therefore makes experts hot and lets them cool, which is what caches have to learn.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from colibri.core.tensors import Format, rows_bytes
from colibri.v1 import manifest_pb2

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

TILE_ROWS = 8
POOL_SPARE = 8192  # windows of a pool start at as many places
PEAK = 3.0  # router logit of a token's own experts; the others' are near 0
NOISE = 0.5  # of an embedding, relative to its experts' part
OUTPUT_GAIN = 0.2  # what all layers together add to the residual stream, in units of the embedding
_INT4_STD = float(np.sqrt(255 / 12))  # of a code drawn from 0..15
_INT8_STD = float(np.sqrt((255**2 - 1) / 12))  # of a code drawn from -127..127

Role = manifest_pb2.TensorRole
OUTPUT_ROLES = (Role.TENSOR_ROLE_O, Role.TENSOR_ROLE_FFN_DOWN, Role.TENSOR_ROLE_SHARED_DOWN)


class Routed(Protocol):
    """What routing needs to know of a shape."""

    @property
    def hidden(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def moe_layers(self) -> int: ...


def output_gain(layers: int) -> float:
    """Gain of the matrices that write to the residual stream, of which there are two per layer."""
    return OUTPUT_GAIN / float(np.sqrt(2 * layers))


# ---- routing ---------------------------------------------------------------------------------------------------------


def own_experts(shape: Routed, seed: int, moe_index: int, first: int, count: int) -> npt.NDArray[np.int64]:
    """The experts [count, top_k] of the tokens from `first` on in the MoE layer number `moe_index`."""
    chosen = np.empty((count, shape.top_k), np.int64)
    for row in range(count):
        chosen[row] = np.random.default_rng([seed, 1, moe_index, first + row]).choice(
            shape.experts, shape.top_k, replace=False
        )
    return chosen


def router_rows(shape: Routed, seed: int, moe_index: int) -> F32:
    """The router [experts, hidden] of a MoE layer, scaled so that a token's own experts get a logit of about PEAK."""
    directions = np.random.default_rng([seed, 2, moe_index]).standard_normal((shape.experts, shape.hidden), np.float32)
    parts = shape.top_k * shape.moe_layers * (1 + NOISE**2)
    return directions * np.float32(PEAK * np.sqrt(parts) / shape.hidden)


def embedding_rows(shape: Routed, seed: int, first: int, count: int) -> F32:
    """Embeddings [count, hidden] of tokens from `first` on: their experts' router rows and noise, unit mean square."""
    noise = np.random.default_rng([seed, 3, first]).standard_normal((count, shape.hidden), np.float32)
    rows = noise * np.float32(NOISE * np.sqrt(shape.top_k * shape.moe_layers))
    for layer in range(shape.moe_layers):
        router = router_rows(shape, seed, layer)
        router /= np.sqrt(np.mean(np.square(router)))
        wanted = np.zeros((count, shape.experts), np.float32)
        np.put_along_axis(wanted, own_experts(shape, seed, layer, first, count), 1, axis=1)
        rows += wanted @ router
    scaled: F32 = rows / np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True))
    return scaled


def token_stream(vocab: int, seed: int, *, zipf: float = 1.0, drift: float = 0.02) -> Iterator[int]:
    """Tokens without end: ranks follow a Zipf law; per token, with probability `drift`, a hot token and any other one
    exchange their ranks, so that what is hot changes over some hundreds of tokens."""
    rng = np.random.default_rng([seed, 4])
    weights = np.cumsum(1.0 / np.arange(1, vocab + 1) ** zipf)
    tokens = rng.permutation(vocab)
    while True:
        rank = int(np.searchsorted(weights, rng.random() * weights[-1]))
        if rng.random() < drift:
            other = int(rng.integers(vocab))
            tokens[rank], tokens[other] = tokens[other], tokens[rank]
        yield int(tokens[rank])


# ---- random matrices -------------------------------------------------------------------------------------------------


def _f16_bytes(value: float) -> U8:
    return np.array([value], "<f2").view(np.uint8)


class TilePool:
    """Random int4 asymmetric R8 tiles of one gain; part() gives any matrix of up to `most_values` weights."""

    def __init__(self, form: Format, cols: int, gain: float, most_values: int, rng: np.random.Generator) -> None:
        """Raises ValueError for a format or width whose groups are not all alike."""
        if not (form.codes == manifest_pb2.TensorFormat.CODES_INT4 and form.asymmetric) or cols % form.group_size:
            raise ValueError(f"experts of {cols} columns as {form}: whole groups of asymmetric int4 are wanted")
        group = form.group_size
        scale = gain / np.sqrt(cols) / _INT4_STD
        groups = -(-most_values // (TILE_ROWS * group)) + POOL_SPARE
        self._group_values = TILE_ROWS * group
        self._pool = rng.integers(0, 256, (groups, 4 * TILE_ROWS + group * TILE_ROWS // 2), np.uint8)
        self._pool[:, : 2 * TILE_ROWS] = np.tile(_f16_bytes(scale), TILE_ROWS)
        self._pool[:, 2 * TILE_ROWS : 4 * TILE_ROWS] = np.tile(_f16_bytes(-7.5 * scale), TILE_ROWS)

    def part(self, rows: int, cols: int, rng: np.random.Generator) -> memoryview:
        """The tiles of a [rows, cols] matrix, rows a multiple of 8; valid until the pool goes."""
        count = rows * cols // self._group_values
        start = int(rng.integers(POOL_SPARE))
        return self._pool[start : start + count].reshape(-1).data


def random_rows(
    form: Format, rows: int, cols: int, gain: float, rng: np.random.Generator
) -> tuple[memoryview, memoryview, memoryview]:
    """A random quantised matrix in the row-major form: codes, scales, mins (docs/container.md)."""
    codes_bytes, scales_bytes, mins_bytes = rows_bytes(form, rows, cols)
    codes = rng.integers(0, 256, codes_bytes, np.uint8)
    std = _INT4_STD if form.asymmetric else _INT8_STD
    if not form.asymmetric:
        codes[codes == 128] = 129  # -128 is no code of int8
    scale = gain / np.sqrt(cols) / std
    scales = np.full(scales_bytes // 2, scale, "<f2")
    mins = np.full(mins_bytes // 2, -7.5 * scale, "<f2")
    return _bytes_of(codes), _bytes_of(scales), _bytes_of(mins)


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.view(np.uint8).reshape(-1).data
