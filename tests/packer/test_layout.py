"""Placement: no byte twice, none left out, every drive its share; arithmetic agrees with a walk over all extents."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.core.container_files import ALIGN, DTYPE_BYTES
from colibri.core.striping import Area, extents_per_record, layer_areas, layer_extents
from colibri.packer.layout import (
    MIN_EXTENT_BYTES,
    Placement,
    WholeSequence,
    place_dense,
    place_experts,
    record_parts,
    split_shares,
)
from colibri.packer.precision import tensor_format
from colibri.v1 import manifest_pb2

Layers = list[manifest_pb2.ExpertLayer]

WEIGHTS = st.lists(st.integers(1, 4000), min_size=1, max_size=6)
LAYERS = st.lists(
    st.builds(
        lambda layer, experts, units: manifest_pb2.ExpertLayer(
            layer=layer, experts=experts, record_bytes=units * ALIGN
        ),
        st.integers(0, 90),
        st.integers(1, 40),
        st.integers(1, 600),
    ),
    min_size=1,
    max_size=5,
)


def placed(layers: Layers, weights: list[int], min_extent: int = MIN_EXTENT_BYTES) -> Placement:
    placement = place_experts(layers, weights, min_extent)
    for layer, striping in zip(layers, placement.striping, strict=True):
        layer.striping.CopyFrom(striping)
    return placement


def walk(layer: manifest_pb2.ExpertLayer) -> list[list[tuple[int, int, int, int]]]:
    """Extents (stripe, file offset, record offset, bytes) by laying one record after the other, no multiplication."""
    table = []
    if layer.striping.HasField("split"):
        ends = [piece.base for piece in layer.striping.split.pieces]
        for _ in range(layer.experts):
            row, record = [], 0
            for index, piece in enumerate(layer.striping.split.pieces):
                row.append((piece.stripe, ends[index], record, piece.bytes))
                ends[index] += piece.bytes
                record += piece.bytes
            table.append(row)
        return table
    rule = layer.striping.whole
    next_free = list(rule.base)
    for expert in range(layer.experts):
        stripe = rule.pattern[expert % len(rule.pattern)]
        table.append([(stripe, next_free[stripe], 0, layer.record_bytes)])
        next_free[stripe] += layer.record_bytes
    return table


def arithmetic(layer: manifest_pb2.ExpertLayer) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(int(e["stripe"]), int(e["file_offset"]), int(e["record_offset"]), int(e["bytes"])) for e in row]
        for row in layer_extents(layer)
    ]


@settings(max_examples=40)
@given(LAYERS, WEIGHTS, st.sampled_from([ALIGN, 16 * ALIGN, MIN_EXTENT_BYTES]))
def test_arithmetic_equals_a_walk(layers: Layers, weights: list[int], min_extent: int) -> None:
    placed(layers, weights, min_extent)
    for layer in layers:
        assert arithmetic(layer) == walk(layer)


@settings(max_examples=40)
@given(LAYERS, WEIGHTS, st.sampled_from([ALIGN, 16 * ALIGN, MIN_EXTENT_BYTES]))
def test_every_byte_of_a_stripe_belongs_to_one_extent(layers: Layers, weights: list[int], min_extent: int) -> None:
    placement = placed(layers, weights, min_extent)
    for stripe, size in enumerate(placement.stripe_bytes):
        spans = [(0, ALIGN)]
        for layer in layers:
            spans += [(e[1], e[1] + e[3]) for row in walk(layer) for e in row if e[0] == stripe]
        spans.sort()
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert spans[-1][1] == size


@settings(max_examples=40)
@given(LAYERS, WEIGHTS)
def test_extents_cover_the_record_in_ascending_order(layers: Layers, weights: list[int]) -> None:
    placed(layers, weights, ALIGN)
    for layer in layers:
        for row in walk(layer):
            assert len(row) == extents_per_record(layer)
            assert [e[2] for e in row] == [sum(e[3] for e in row[:i]) for i in range(len(row))]
            assert sum(e[3] for e in row) == layer.record_bytes
            assert all(value % ALIGN == 0 for e in row for value in e[1:])


@settings(max_examples=40)
@given(LAYERS, WEIGHTS)
def test_areas_are_what_the_extents_take(layers: Layers, weights: list[int]) -> None:
    placed(layers, weights)
    for layer in layers:
        extents = [e for row in walk(layer) for e in row]
        expected = [
            Area(s, min(e[1] for e in extents if e[0] == s), max(e[1] + e[3] for e in extents if e[0] == s))
            for s in sorted({e[0] for e in extents})
        ]
        assert layer_areas(layer) == expected


@given(st.integers(1, 5000), WEIGHTS)
def test_split_shares_are_within_one_unit_of_the_weights(units: int, weights: list[int]) -> None:
    shares = split_shares(units * ALIGN, weights)
    assert sum(shares) == units * ALIGN
    for share, weight in zip(shares, weights, strict=True):
        assert share % ALIGN == 0
        assert abs(share * sum(weights) - units * ALIGN * weight) < ALIGN * sum(weights)


@given(WEIGHTS, st.integers(1, 300))
@settings(max_examples=60)
def test_whole_records_are_within_one_record_of_the_weights_at_every_moment(weights: list[int], count: int) -> None:
    given_to = [0] * len(weights)
    for n, drive in enumerate(WholeSequence(weights).take(count), 1):
        given_to[drive] += 1
        assert all(abs(have * sum(weights) - n * w) < sum(weights) for have, w in zip(given_to, weights, strict=True))


@settings(max_examples=40)
@given(LAYERS, WEIGHTS)
def test_a_layer_is_split_only_where_every_piece_is_worth_a_read(layers: Layers, weights: list[int]) -> None:
    placed(layers, weights)
    for layer in layers:
        worth_it = min(split_shares(layer.record_bytes, weights)) >= MIN_EXTENT_BYTES
        assert layer.striping.HasField("split") == worth_it


def test_shares_hold_over_layers_too() -> None:
    layers = [manifest_pb2.ExpertLayer(layer=i, experts=5, record_bytes=ALIGN) for i in range(30)]
    sizes = placed(layers, [2, 1]).stripe_bytes
    assert sizes == [ALIGN + 100 * ALIGN, ALIGN + 50 * ALIGN]


@pytest.mark.parametrize("weights", [[], [0], [1, 2**32], [1] * 1001, [-1]])
def test_impossible_drives_are_refused(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="weights"):
        place_experts([], weights)


@given(
    st.sampled_from(["int4", "int8", "bf16", "f32"]),
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from([32, 64, 128]),
)
def test_parts_of_a_record_are_aligned_and_do_not_overlap(name: str, hidden: int, width: int, group: int) -> None:
    parts, record_bytes = record_parts(tensor_format(name, group), hidden, width)
    assert [(part.rows, part.cols) for part in parts] == [(width, hidden), (width, hidden), (hidden, width)]
    end = 0
    for part in parts:
        assert part.offset % 64 == 0
        assert end <= part.offset < end + 64
        end = part.offset + part.bytes
    assert record_bytes % ALIGN == 0
    assert end <= record_bytes < end + ALIGN


@given(
    st.lists(
        st.tuples(st.sampled_from(["int4", "int8", "bf16", "f32"]), st.integers(1, 50), st.integers(1, 150)),
        min_size=1,
        max_size=8,
    )
)
def test_dense_blobs_fill_the_file_and_are_aligned_to_their_elements(shapes: list[tuple[str, int, int]]) -> None:
    tensors = [
        manifest_pb2.DenseTensor(
            role=manifest_pb2.TENSOR_ROLE_Q, layer=i, name=f"t{i}", format=tensor_format(name), rows=rows, cols=cols
        )
        for i, (name, rows, cols) in enumerate(shapes)
    ]
    header_bytes, file_bytes = place_dense(tensors)
    assert header_bytes % ALIGN == 0
    widths = {"f32": DTYPE_BYTES["F32"], "bf16": DTYPE_BYTES["BF16"]}
    spans = []
    for (name, _, _), tensor in zip(shapes, tensors, strict=True):
        assert tensor.codes.offset % widths.get(name, 1) == 0
        blobs = [blob for blob in (tensor.codes, tensor.scales, tensor.mins) if blob.bytes]
        assert all(blob.offset % 2 == 0 for blob in blobs[1:])
        spans += [(blob.offset, blob.offset + blob.bytes) for blob in blobs]
    spans.sort()
    assert spans[0][0] == header_bytes
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert spans[-1][1] == file_bytes
