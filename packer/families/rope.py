"""Rotary position embedding: config keys in either spelling -> one RopeTable.

Owns the inverse frequencies, with every kind of scaling already applied, computed as transformers'
modeling_rope_utils.py does (functions named at each kind; float32 in the same order). Refuses a config without
rope_theta, spellings that differ, and every rope_type that is not in SCALINGS, by name. Part of families.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from colibri.packer.errors import UnsupportedCheckpointError
from colibri.packer.families.config_reader import ConfigReader
from colibri.v1 import manifest_pb2

Frequencies = npt.NDArray[np.float32]


def read_rope(config: ConfigReader, head_dim: int, partial_default: float | None = None) -> manifest_pb2.RopeTable:
    """Return the half-split table for heads of `head_dim`.

    Reads rope_theta, rope_scaling, rope_parameters and partial_rotary_factor. `partial_default` is the family's default
    for the last; None says that the family always rotates whole heads. Raises UnsupportedCheckpointError by key.
    """
    parameters = _merged(config)
    base = parameters.number("rope_theta")
    partial = parameters.number("partial_rotary_factor", default=partial_default or 1.0)
    kind = parameters.text("rope_type", "type", default="default")
    if partial > 1 or (partial_default is None and partial != 1):
        parameters.refuse("partial_rotary_factor", f"{partial!r} is not supported in this family")
    dims = int(head_dim * partial)
    if dims % 2 or not dims:
        parameters.refuse("partial_rotary_factor", f"{partial!r} of head_dim {head_dim} is {dims} dimensions, not even")
    scaling = SCALINGS.get(kind)
    if scaling is None:
        parameters.refuse("rope_type", f"{kind!r} is not supported, only {', '.join(map(repr, SCALINGS))}")
    frequencies, attention_factor = scaling(parameters, base, dims)
    parameters.finish({})
    return manifest_pb2.RopeTable(
        style=manifest_pb2.RopeTable.STYLE_HALF,
        dims=dims,
        inv_freq=frequencies.tolist(),
        attention_factor=attention_factor,
    )


def _merged(config: ConfigReader) -> ConfigReader:
    """One flat reader of the rope keys, wherever they stand; two values for one key are refused."""
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    for place in ("rope_parameters", "rope_scaling", ""):
        values = config.value(place) if place else {k: config.value(k) for k in ("rope_theta", "partial_rotary_factor")}
        if values is None:
            continue
        if not isinstance(values, dict):
            config.refuse(place, f"{values!r} is not an object")
        for key, value in values.items():
            key = "rope_type" if key == "type" else key
            where = f"{place}.{key}" if place else key
            if value is None:
                continue
            if key in merged and merged[key] != value:
                config.refuse(where, f"{value!r} contradicts {origin[key]} {merged[key]!r}")
            merged[key], origin[key] = value, where
    if "rope_theta" not in merged:
        raise UnsupportedCheckpointError(
            f"{config.file}: rope_theta is given neither at the top nor in rope_parameters or rope_scaling"
        )
    return ConfigReader(merged, config.file, "rope parameters: ")


def _base_powers(base: float, dims: int) -> Frequencies:
    """base^(i / dims) for even i, [dims / 2] f32. The power itself in double: correctly rounded, so within one unit of
    the last place of any float32 library's pow."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _plain(parameters: ConfigReader, base: float, dims: int) -> tuple[Frequencies, float]:
    """compute_default_rope_parameters of each model file."""
    del parameters
    return np.float32(1.0) / _base_powers(base, dims), 1.0


def _linear(parameters: ConfigReader, base: float, dims: int) -> tuple[Frequencies, float]:
    """_compute_linear_scaling_rope_parameters."""
    factor = np.float32(parameters.number("factor"))
    return np.float32(1.0) / _base_powers(base, dims) / factor, 1.0


def _llama3(parameters: ConfigReader, base: float, dims: int) -> tuple[Frequencies, float]:
    """_compute_llama3_parameters."""
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    context = parameters.size("original_max_position_embeddings")
    if high <= low:
        parameters.refuse("high_freq_factor", f"{high!r} is not above low_freq_factor {low!r}")
    frequencies = np.float32(1.0) / _base_powers(base, dims)
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > context / low, frequencies / np.float32(factor), frequencies)
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    smoothed = (np.float32(1) - smooth) * scaled / np.float32(factor) + smooth * scaled
    medium = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return np.where(medium, smoothed, scaled).astype(np.float32), 1.0


def _yarn(parameters: ConfigReader, base: float, dims: int) -> tuple[Frequencies, float]:
    """_compute_yarn_parameters (arXiv 2309.00071)."""
    factor = parameters.number("factor")
    context = parameters.size("original_max_position_embeddings")
    fast, slow = parameters.number("beta_fast", default=32.0), parameters.number("beta_slow", default=1.0)
    truncate = parameters.flag("truncate", default=True)

    def correction(rotations: float) -> float:
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # as the reference: no division by zero
    ramp = (np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _base_powers(base, dims)
    extrapolated, interpolated = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)
    return interpolated * (np.float32(1) - keep) + extrapolated * keep, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: ConfigReader, factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = parameters.has("attention_factor")
    stated = parameters.number("attention_factor", default=1.0)
    both = parameters.has("mscale") and parameters.has("mscale_all_dim")
    mscale, all_dim = parameters.number("mscale", default=1.0), parameters.number("mscale_all_dim", default=1.0)
    if given:
        return stated
    return magnitude(mscale) / magnitude(all_dim) if both else magnitude(1.0)


# "dynamic" and "longrope" change their frequencies with the length of the text: not a table.
SCALINGS: dict[str, Callable[[ConfigReader, float, int], tuple[Frequencies, float]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
