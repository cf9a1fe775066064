"""The bytes and numbers of every stored format, against an emulation of docs/numerics.md and format.h."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.core import tensors
from colibri.core.errors import InvalidError, NonFiniteError, UnsupportedError
from colibri.core.tensors import Format, QuantReport
from testkit import quantisation

F32 = npt.NDArray[np.float32]

KINDS = ["int4_asymmetric", "int4_symmetric", "int8"]
PLAIN = [Format.f32(), Format.bf16()]
SIZES = [(1, 1), (8, 64), (9, 65), (3, 8), (17, 135), (5, 200), (24, 128), (40, 63), (2, 513)]


def format_of(kind: str, group_size: int) -> Format:
    if kind == "int8":
        return Format.int8(group_size)
    return Format.int4(group_size, asymmetric=kind == "int4_asymmetric")


def weights(rows: int, cols: int, seed: int, scale: float = 0.02) -> F32:
    """Heavy-tailed weights, as trained ones are."""
    return (np.random.default_rng(seed).standard_t(4, (rows, cols)) * scale).astype(np.float32)


def as_source(w: F32, source_type: str) -> tuple[bytes, F32]:
    """Return the bytes of w in that precision, and the f32 values that they stand for."""
    if source_type == "f32":
        return w.tobytes(), w
    if source_type == "f16":
        return w.astype(np.float16).tobytes(), w.astype(np.float16).astype(np.float32)
    rounded = quantisation.to_bf16(w)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16).tobytes(), rounded


def check_against_emulation(kind: str, group_size: int, w: F32, source_type: str = "f32") -> QuantReport:
    """Both forms, the values, and the report of w are what the emulation says; returns the report."""
    rows, cols = w.shape
    source, w = as_source(w, source_type)
    form = format_of(kind, group_size)
    want = quantisation.quantize(kind, w, group_size)
    codes, scales, mins, report = tensors.quantize_rows(form, source, source_type, rows, cols)  # type: ignore[arg-type]
    tiles, tiles_report = tensors.quantize_tiles(form, source, source_type, rows, cols)  # type: ignore[arg-type]
    assert (codes.tobytes(), scales.tobytes(), mins.tobytes()) == quantisation.rows_form(kind, want)
    assert tiles.tobytes() == quantisation.tiles_form(kind, want, group_size)
    for values in (
        tensors.dequantize_tiles(form, tiles, rows, cols),
        tensors.dequantize_rows(form, codes, scales, mins, rows, cols),
    ):
        np.testing.assert_array_equal(values, want.values)
    assert tensors.tile_rows(form, codes, scales, mins, rows, cols).tobytes() == tiles.tobytes()
    check_report(report, w, want.values)
    assert report == tiles_report
    return report


def check_report(report: QuantReport, w: F32, values: F32) -> None:
    error = w.astype(np.float64) - values.astype(np.float64)
    assert report.values == w.size
    assert report.nonzero == np.count_nonzero(w)
    assert report.zeroed == np.count_nonzero((w != 0) & (values == 0))
    assert report.sum_squares == pytest.approx(np.sum(w.astype(np.float64) ** 2), rel=1e-12)
    assert report.error_squares == pytest.approx(np.sum(error**2), rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [8, 64, 40])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_bytes_equal_the_emulation(kind: str, group_size: int, rows: int, cols: int) -> None:
    for seed in range(3):
        check_against_emulation(kind, group_size, weights(rows, cols, seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source_type", ["f32", "bf16", "f16"])
def test_every_source_precision(kind: str, source_type: str) -> None:
    check_against_emulation(kind, 64, weights(19, 300, 5), source_type)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    group_size=st.sampled_from([8, 16, 24, 64, 512]),
    rows=st.integers(1, 20),
    cols=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-42, 1e-30, 1e-9, 1e-7, 1e-6, 1e-4, 0.02, 1.0, 1000.0]),
    offset=st.sampled_from([0.0, 0.0, 1.0, -30.0]),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_any_matrix(
    kind: str, group_size: int, rows: int, cols: int, seed: int, scale: float, offset: float, zeros: float
) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((rows, cols)) * scale + offset * scale).astype(np.float32)
    w[rng.random((rows, cols)) < zeros] = 0
    w[rng.random((rows, cols)) < zeros / 4] *= -1  # some zeros become -0
    check_against_emulation(kind, group_size, w)


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_group_stays_exactly_zero(kind: str) -> None:
    w = weights(8, 192, 1)
    w[3, 64:128] = 0
    w[5] = 0
    form = format_of(kind, 64)
    codes, scales, mins, _ = tensors.quantize_rows(form, w, "f32", 8, 192)
    values = tensors.dequantize_rows(form, codes, scales, mins, 8, 192)
    assert not values[3, 64:128].any()
    assert not values[5].any()
    assert np.isfinite(scales.view(np.float16)).all()
    assert np.isfinite(mins.view(np.float16)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_too_small_for_f16_are_counted_as_zeroed(kind: str) -> None:
    w = weights(8, 64, 2, scale=1e-12)
    report = check_against_emulation(kind, 64, w)
    assert report.zeroed == report.nonzero == 512


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("int4_asymmetric", -70000.0, "row 5, group 1: minimum"),
        ("int4_asymmetric", 2e6, "row 5, group 1: scale"),
        ("int4_symmetric", 1e6, "row 5, group 1: scale"),
        ("int8", -1e7, "row 5, group 1: scale"),
        ("int4_asymmetric", 3e38, "row 5, group 1: scale"),
    ],
)
def test_a_scale_beyond_f16_is_refused_by_name(kind: str, value: float, words: str) -> None:
    w = weights(10, 128, 3)
    w[5, 100] = value
    w[5, 101] = -3e38 if value == 3e38 else 0
    for quantize in (tensors.quantize_tiles, tensors.quantize_rows):
        with pytest.raises(UnsupportedError, match=words):
            quantize(format_of(kind, 64), w, "f32", 10, 128)


@pytest.mark.parametrize("form", [*PLAIN, *(format_of(kind, 64) for kind in KINDS)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_non_finite_weight_is_named(form: Format, bad: float) -> None:
    w = weights(20, 150, 4)
    w[9, 3] = w[8, 149] = w[15, 0] = bad
    for quantize in (tensors.quantize_tiles, tensors.quantize_rows):
        with pytest.raises(NonFiniteError, match="row 8, column 149") as caught:
            quantize(form, w, "f32", 20, 150)
        assert (caught.value.row, caught.value.col) == (8, 149)


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("source_type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_plain_formats_round_once(form: Format, source_type: str, rows: int, cols: int) -> None:
    source, w = as_source(weights(rows, cols, 6), source_type)
    want = w if form.codes == Format.f32().codes else quantisation.to_bf16(w)
    tiles, report = tensors.quantize_tiles(form, source, source_type, rows, cols)  # type: ignore[arg-type]
    codes, scales, mins, same = tensors.quantize_rows(form, source, source_type, rows, cols)  # type: ignore[arg-type]
    np.testing.assert_array_equal(tensors.dequantize_tiles(form, tiles, rows, cols), want)
    np.testing.assert_array_equal(tensors.dequantize_rows(form, codes, b"", b"", rows, cols), want)
    assert tensors.tile_rows(form, codes, scales, mins, rows, cols).tobytes() == tiles.tobytes()
    assert (scales.size, mins.size) == (0, 0)
    assert report == same
    check_report(report, w, want)
    interleaved = np.pad(want, ((0, -rows % 8), (0, 0))).reshape(-1, 8, cols).transpose(0, 2, 1)
    dequantized = tiles.view(np.float32 if form == PLAIN[0] else np.uint16)
    expected = interleaved if form == PLAIN[0] else np.ascontiguousarray(interleaved).view(np.uint32) >> 16
    np.testing.assert_array_equal(dequantized, expected.reshape(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_rows_add_up_to_the_whole(kind: str) -> None:
    form, w = format_of(kind, 64), weights(43, 100, 7)
    whole, report = tensors.quantize_tiles(form, w, "f32", 43, 100)
    pieces, total = b"", QuantReport()
    for first in range(0, 43, 16):
        rows = min(16, 43 - first)
        piece, part = tensors.quantize_tiles(form, w[first : first + rows], "f32", rows, 100)
        pieces, total = pieces + piece.tobytes(), total + part
    assert pieces == whole.tobytes()
    assert (total.values, total.nonzero, total.zeroed) == (report.values, report.nonzero, report.zeroed)
    assert total.relative_rms == pytest.approx(report.relative_rms, rel=1e-12)


def test_row_stride_selects_a_block_of_columns() -> None:
    w = weights(12, 300, 8)
    part = np.ascontiguousarray(w[:, :130])
    want, _ = tensors.quantize_tiles(Format.int4(), part, "f32", 12, 130)
    got, _ = tensors.quantize_tiles(Format.int4(), w, "f32", 12, 130, row_stride=300)
    assert got.tobytes() == want.tobytes()


def test_the_search_beats_the_plain_range() -> None:
    """Group-64 weight errors at the level that the formats are chosen for (Gaussian weights)."""
    w = (np.random.default_rng(9).standard_normal((256, 512)) * 0.02).astype(np.float32)
    errors = {kind: tensors.quantize_tiles(format_of(kind, 64), w, "f32", 256, 512)[1].relative_rms for kind in KINDS}
    assert errors["int4_asymmetric"] < 0.082
    assert errors["int4_symmetric"] < 0.091
    assert errors["int8"] < 0.006


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Format(9), "codes 9"),
        (Format.int8(63), "group_size 63"),
        (Format.int8(0), "group_size 0"),
        (Format.int8(520), "group_size 520"),
        (Format(3, 1, 1, True, 64), "asymmetric"),
        (Format(4, 0, 1, True, 64), "scale_format"),
        (Format(4, 1, 7, True, 64), "codebook 7"),
        (Format(1, 0, 0, False, 64), "group_size"),
    ],
)
def test_formats_without_meaning_are_refused(form: Format, words: str) -> None:
    with pytest.raises((UnsupportedError, InvalidError), match=words):
        tensors.tiles_bytes(form, 8, 8)
    with pytest.raises((UnsupportedError, InvalidError), match=words):
        tensors.rows_bytes(form, 8, 8)


@pytest.mark.parametrize(("rows", "cols"), [(0, 5), (5, 0), (2**62, 2**40), (2**40, 2**62), (2**63, 1), (1, 2**63)])
def test_sizes_that_overflow_are_refused(rows: int, cols: int) -> None:
    for form in (*PLAIN, *(format_of(kind, 64) for kind in KINDS)):
        with pytest.raises(InvalidError, match="rows"):
            tensors.tiles_bytes(form, rows, cols)
        with pytest.raises(InvalidError, match="rows"):
            tensors.rows_bytes(form, rows, cols)


def test_buffers_of_the_wrong_size_are_refused() -> None:
    w = weights(8, 64, 1)
    with pytest.raises(InvalidError, match="source has 2048 bytes where 2304"):
        tensors.quantize_tiles(Format.int8(), w, "f32", 9, 64)
    with pytest.raises(InvalidError, match="row_stride 63"):
        tensors.quantize_tiles(Format.int8(), w, "f32", 8, 64, row_stride=63)
    with pytest.raises(InvalidError, match="out must be"):
        tensors.quantize_tiles(Format.int8(), w, "f32", 8, 64, out=bytearray(7))
    with pytest.raises(InvalidError, match="tiles has 10 bytes"):
        tensors.dequantize_tiles(Format.int8(), bytes(10), 8, 64)
    with pytest.raises(InvalidError, match="source_type"):
        tensors.quantize_tiles(Format.int8(), w, "f8", 8, 64)  # type: ignore[arg-type]


def test_format_and_its_message_are_one() -> None:
    for form in (*PLAIN, *(format_of(kind, 32) for kind in KINDS)):
        assert Format.from_proto(form.to_proto()) == form


def test_crc32c() -> None:
    assert tensors.crc32c(b"") == 0
    assert tensors.crc32c(b"123456789") == 0xE3069283  # the check value of the Castagnoli CRC
    assert tensors.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert tensors.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert tensors.crc32c(bytes(range(32))) == 0x46DD794E
    data = np.random.default_rng(0).bytes(40000)
    for cut in (1, 7, 4096, 12288, 39999):
        assert tensors.crc32c(data[cut:], tensors.crc32c(data[:cut])) == tensors.crc32c(data)
