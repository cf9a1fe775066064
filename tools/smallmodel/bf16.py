"""bfloat16 in numpy, which has no such dtype: the high half of an f32, rounded to nearest even.

Owns the two conversions and nothing else. Refuses values that are not finite: no weight of this model is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from smallmodel.layout import FloatArray


def to_bf16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Bit patterns of `values` (f32, any shape) in bfloat16. Raises ValueError on infinities and NaNs."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if not np.isfinite(values).all():
        raise ValueError("a weight is not finite")
    # Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when nearest-even rounds up.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """The f32 values of bfloat16 bit patterns (exact)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(values: FloatArray) -> FloatArray:
    """`values` rounded to what a bfloat16 checkpoint will hold, as f32."""
    return from_bf16(to_bf16(values))
