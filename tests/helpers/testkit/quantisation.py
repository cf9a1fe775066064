"""docs/numerics.md, "Quantisation", written again in numpy; shares nothing with the core but the text.

All arithmetic is f32, one rounding per operation, vectorised over groups; sums run over the columns one by one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
f32 = np.float32


@dataclass
class Group:
    """One range of columns: codes as stored [rows, columns], scale and min f16 [rows], values [rows, columns]."""

    codes: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float16]
    min: npt.NDArray[np.float16]
    values: F32


def to_bf16(w: F32) -> F32:
    """Round f32 to the nearest bf16, ties to even."""
    bits = w.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def _ascending_sum(terms: F32) -> F32:
    total = np.zeros(terms.shape[0], np.float32)
    for k in range(terms.shape[1]):
        total = total + terms[:, k]
    return total


def _code(x: F32, low: float, high: float) -> F32:
    return np.rint(np.minimum(np.maximum(x, f32(low)), f32(high)))


def _round_and_code(w: F32, scale: F32, minimum: F32, low: int, high: int) -> Group:
    d, m = scale.astype(np.float16), minimum.astype(np.float16)
    scale, minimum = d.astype(np.float32)[:, None], m.astype(np.float32)[:, None]
    steps = np.where(scale != 0, f32(1) / scale, f32(0))
    codes = _code((w - minimum) * steps, low, high)
    return Group(codes.astype(np.int32), d, m, scale * codes + minimum)


def int4_asymmetric(w: F32) -> Group:
    """One group [rows, columns]: 16 starts, 2 refinements, least squares each time."""
    count = f32(w.shape[1])
    low, high = w.min(axis=1) + f32(0), w.max(axis=1)  # + 0: never -0
    reach = high - low
    u = np.where(reach[:, None] != 0, (w - low[:, None]) / reach[:, None], f32(0))
    sum_u = _ascending_sum(u)
    best_scale, best_min, best_score = np.zeros_like(low), np.zeros_like(low), np.full_like(low, -1)

    def fit(start: F32, steps: F32) -> None:
        nonlocal best_scale, best_min, best_score
        q = _code((u - start[:, None]) * steps[:, None], 0, 15)
        sum_q, sum_qq, sum_qu = _ascending_sum(q), _ascending_sum(q * q), _ascending_sum(q * u)
        determinant = count * sum_qq - sum_q * sum_q
        scale = (count * sum_qu - sum_q * sum_u) / determinant
        minimum = (sum_u - scale * sum_q) / count
        score = minimum * sum_u + scale * sum_qu
        better = (determinant > 0) & (score > best_score)
        best_scale = np.where(better, scale, best_scale)
        best_min = np.where(better, minimum, best_min)
        best_score = np.where(better, score, best_score)

    cuts = [f32(0), f32(0.03), f32(0.06), f32(0.09)]
    for a in cuts:
        for b in cuts:
            fit(np.full_like(low, a), np.full_like(low, f32(15) / (f32(1) - a - b)))
    for _ in range(2):
        fit(best_min, f32(1) / best_scale)

    scale = np.where(reach != 0, best_scale * reach, f32(0))
    minimum = np.where(reach != 0, low + best_min * reach, low)
    vanishes = (np.abs(scale) <= f32(2**-25)) & (reach != 0)
    minimum = np.where(vanishes, low + f32(0.5) * reach, minimum)
    return _round_and_code(w, scale, minimum, 0, 15)


def _symmetric(w: F32, unit: F32, starts: list[np.float32], refinements: int, low: int, high: int) -> Group:
    u = np.where(unit[:, None] != 0, w / unit[:, None], f32(0))
    best_scale, best_score = np.zeros_like(unit), np.full_like(unit, -1)

    def fit(steps: F32) -> None:
        nonlocal best_scale, best_score
        q = _code(u * steps[:, None], low, high)
        sum_qq, sum_qu = _ascending_sum(q * q), _ascending_sum(q * u)
        scale = sum_qu / sum_qq
        score = scale * sum_qu
        better = (sum_qq > 0) & (score > best_score)
        best_scale, best_score = np.where(better, scale, best_scale), np.where(better, score, best_score)

    for start in starts:
        fit(np.full_like(unit, start))
    for _ in range(refinements):
        fit(f32(1) / best_scale)
    scale = np.where(unit != 0, best_scale * unit, f32(0))
    return _round_and_code(w, scale, np.zeros_like(unit), low, high)


def _peak(w: F32) -> F32:
    """The weight of largest magnitude of each row, the first of equals, with its sign."""
    at = np.abs(w).argmax(axis=1)
    peak: F32 = w[np.arange(len(w)), at]
    return peak


def int4_symmetric(w: F32) -> Group:
    """One group: 11 starts, 2 refinements; codes are stored with 8 added."""
    group = _symmetric(w, _peak(w), [f32(35 + i) / f32(-5) for i in range(11)], 2, -8, 7)
    group.codes = group.codes + 8
    return group


def int8(w: F32) -> Group:
    """One group: 4 starts, 1 refinement."""
    return _symmetric(w, np.abs(_peak(w)), [f32(127 + i) for i in range(4)], 1, -127, 127)


@dataclass
class Matrix:
    """A whole matrix: codes [rows, cols], scales and mins f16 [rows, groups], values f32 [rows, cols]."""

    codes: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float16]
    mins: npt.NDArray[np.float16]
    values: F32


def quantize(kind: str, w: F32, group_size: int) -> Matrix:
    """`kind` is int4_asymmetric, int4_symmetric or int8."""
    with np.errstate(all="ignore"):
        groups = [globals()[kind](w[:, k : k + group_size]) for k in range(0, w.shape[1], group_size)]
    return Matrix(
        np.concatenate([g.codes for g in groups], axis=1),
        np.stack([g.scale for g in groups], axis=1),
        np.stack([g.min for g in groups], axis=1),
        np.concatenate([g.values for g in groups], axis=1),
    )


def rows_form(kind: str, m: Matrix) -> tuple[bytes, bytes, bytes]:
    """The row-major bytes: codes, scales, mins."""
    mins = m.mins.tobytes() if kind == "int4_asymmetric" else b""
    if kind == "int8":
        return m.codes.astype(np.int8).tobytes(), m.scales.tobytes(), mins
    codes = np.pad(m.codes, ((0, 0), (0, m.codes.shape[1] % 2))).astype(np.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).tobytes(), m.scales.tobytes(), mins


def tiles_form(kind: str, m: Matrix, group_size: int) -> bytes:
    """The R8 tiles of csrc/format.h, one byte after the other."""
    rows, cols = m.codes.shape
    nothing = 8 if kind == "int4_symmetric" else 0
    missing = -rows % 8
    codes = np.pad(m.codes, ((0, missing), (0, 0)), constant_values=nothing)
    scales, mins = np.pad(m.scales, ((0, missing), (0, 0))), np.pad(m.mins, ((0, missing), (0, 0)))
    run = 4 if kind == "int8" else 8
    out = bytearray()
    for top in range(0, rows, 8):
        for g, first in enumerate(range(0, cols, group_size)):
            out += scales[top : top + 8, g].tobytes()
            if kind == "int4_asymmetric":
                out += mins[top : top + 8, g].tobytes()
            part = codes[top : top + 8, first : min(cols, first + group_size)]
            part = np.pad(part, ((0, 0), (0, -part.shape[1] % run)), constant_values=nothing)
            for k in range(0, part.shape[1], run):
                for lane in range(8):
                    c = [int(code) for code in part[lane, k : k + run]]
                    out += bytes(v & 255 for v in c) if run == 4 else bytes(c[i] | c[i + 4] << 4 for i in range(4))
    return bytes(out)
