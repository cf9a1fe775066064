"""The matrix product through its Python face: generic and AVX2 bit by bit, against float64, and whatever the batch."""

import numpy as np
import numpy.typing as npt
import pytest

from colibri.core import tensors
from colibri.core.errors import InvalidError, UnsupportedError
from colibri.core.tensors import Activation, Format

F32 = npt.NDArray[np.float32]

FORMATS = {
    "f32": Format.f32(),
    "bf16": Format.bf16(),
    "int8": Format.int8(),
    "int4": Format.int4(asymmetric=False),
    "int4a": Format.int4(),
    "int8/24": Format.int8(24),
    "int4a/8": Format.int4(8),
    "int4/512": Format.int4(512, asymmetric=False),
}
ACTIVATIONS: list[Activation] = ["i8", "i16"]
# Largest error relative to sum |w x|: half a step of the activations in each product, and the f32 sums.
BOUND = {"i8": 0.5 / 127 + 1e-6, "i16": 0.5 / 32767 + 1e-6}
SHAPES = [(1, 1), (8, 64), (37, 130), (100, 77), (129, 640)]


def has_avx2() -> bool:
    try:
        product("avx2", Format.f32(), "i8", np.ones((1, 1), np.float32), np.ones((1, 1), np.float32))
    except UnsupportedError:
        return False
    return True


def tiled(form: Format, rows: int, cols: int, seed: int = 0) -> bytes:
    w = (np.random.default_rng(seed).standard_t(5, (rows, cols)) * 0.02).astype(np.float32)
    return bytes(tensors.quantize_tiles(form, w, "f32", rows, cols)[0].tobytes())


def product(isa: str, form: Format, activation: Activation, w: F32, x: F32) -> F32:
    tiles, _ = tensors.quantize_tiles(form, w, "f32", *w.shape)
    return tensors.matmul(isa, form, tiles, w.shape[0], w.shape[1], activation, x)


def inputs(n: int, cols: int, seed: int = 1) -> F32:
    """Activations with the outliers that real ones have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, cols))
    x[rng.random((n, cols)) < 0.01] *= 30
    return x.astype(np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_within_the_rounding_of_the_activations(name: str, activation: Activation, rows: int, cols: int) -> None:
    form, x = FORMATS[name], inputs(5, cols)
    tiles = tiled(form, rows, cols)
    w = tensors.dequantize_tiles(form, tiles, rows, cols).astype(np.float64)
    exact = x.astype(np.float64) @ w.T
    step = np.zeros_like(x, dtype=np.float64)
    size = form.group_size or cols
    for k in range(0, cols, size):  # an activation may be off by half a step of its group
        step[:, k : k + size] = np.abs(x[:, k : k + size]).max(axis=1, keepdims=True)
    plain = form.group_size == 0
    bound = (1e-6 if plain else BOUND[activation]) * ((np.abs(x) if plain else step) @ np.abs(w).T) + 1e-9
    got = tensors.matmul("auto", form, tiles, rows, cols, activation, x)
    assert (np.abs(got - exact) <= bound).all()


@pytest.mark.skipif(not has_avx2(), reason="this CPU has no AVX2")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_avx2_gives_the_bits_of_generic(name: str, activation: Activation) -> None:
    for rows, cols in SHAPES:
        for n in (1, 2, 3, 4, 7):
            form, x = FORMATS[name], inputs(n, cols, seed=n)
            tiles = tiled(form, rows, cols)
            generic = tensors.matmul("generic", form, tiles, rows, cols, activation, x)
            avx2 = tensors.matmul("avx2", form, tiles, rows, cols, activation, x)
            assert generic.tobytes() == avx2.tobytes(), (rows, cols, n)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_does_not_feel_its_batch(name: str, activation: Activation) -> None:
    form, rows, cols = FORMATS[name], 45, 200
    tiles, x = tiled(form, rows, cols), inputs(500, cols)
    alone = [tensors.matmul("auto", form, tiles, rows, cols, activation, x[i : i + 1]).tobytes() for i in range(64)]
    for n in (1, 2, 3, 4, 5, 8, 64, 500):
        together = tensors.matmul("auto", form, tiles, rows, cols, activation, x[:n])
        assert [row.tobytes() for row in together[:64]] == alone[:n]


def test_a_row_does_not_feel_its_neighbours() -> None:
    form, x = Format.int4(), inputs(3, 136)
    w = (np.random.default_rng(3).standard_normal((104, 136)) * 0.02).astype(np.float32)
    whole = product("auto", form, "i16", w, x)
    for first in range(0, 104, 24):
        part = product("auto", form, "i16", w[first : first + 24], x)
        assert part.tobytes() == np.ascontiguousarray(whole[:, first : first + 24]).tobytes()


@pytest.mark.parametrize("isa", ["generic", "auto"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_activations_are_not_lost(isa: str, bad: float) -> None:
    for form in FORMATS.values():
        w, x = np.full((9, 70), 0.5, np.float32), inputs(2, 70)
        x[1, 69] = bad
        y = product(isa, form, "i8", w, x)
        assert np.isfinite(y[0]).all()
        assert not np.isfinite(y[1]).any()


def test_zero_and_tiny_activations_give_zero() -> None:
    for form in (Format.int8(), Format.int4()):
        x = np.zeros((2, 70), np.float32)
        x[1] = 9e-31
        assert not product("auto", form, "i8", np.full((9, 70), 0.5, np.float32), x).any()


def test_what_cannot_be_multiplied_is_refused() -> None:
    form, tiles = Format.int8(), tiled(Format.int8(), 8, 64)
    x = inputs(1, 64)
    with pytest.raises(UnsupportedError, match="isa"):
        tensors.matmul("altivec", form, tiles, 8, 64, "i8", x)
    with pytest.raises(InvalidError, match="activation"):
        tensors.matmul("auto", form, tiles, 8, 64, "i4", x)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="shape"):
        tensors.matmul("auto", form, tiles, 8, 64, "i8", inputs(1, 63))
    with pytest.raises(InvalidError, match="tiles has"):
        tensors.matmul("auto", form, tiles[:-1], 8, 64, "i8", x)
