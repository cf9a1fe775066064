"""The core's number formats from Python: sizes, quantisation, the way back to f32, checksums, one matrix product.

Owns the typed face of the functions in colibri.h's "number formats" section, nothing else; core.py owns the model.
Buffers are borrowed for one call, during which the GIL is released, and must be C-contiguous. Every function may be
called from several threads at once. Errors are those of errors.py: InvalidError for sizes that contradict each other,
UnsupportedError for formats that the core lacks or scales beyond f16, NonFiniteError (.row, .col) for NaN or infinity.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from colibri.core._core import ffi, lib
from colibri.core.errors import InvalidError, NonFiniteError, error_from
from colibri.v1 import manifest_pb2

Bytes = bytes | bytearray | memoryview | npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
SourceType = Literal["f32", "bf16", "f16"]
Activation = Literal["i8", "i16"]

_SOURCE_TYPES: dict[str, tuple[int, int]] = {"f32": (1, 4), "bf16": (2, 2), "f16": (3, 2)}  # CL_SOURCE_*, bytes
_ACTIVATIONS: dict[str, int] = {"i8": 1, "i16": 2}


@dataclass(frozen=True)
class Format:
    """How numbers are stored: the fields of the manifest's TensorFormat, with the same values."""

    codes: int
    scale_format: int = 0
    codebook: int = 0
    asymmetric: bool = False
    group_size: int = 0

    @classmethod
    def f32(cls) -> "Format":
        return cls(manifest_pb2.TensorFormat.CODES_F32)

    @classmethod
    def bf16(cls) -> "Format":
        return cls(manifest_pb2.TensorFormat.CODES_BF16)

    @classmethod
    def int8(cls, group_size: int = 64) -> "Format":
        """Symmetric int8: value = scale * code, code in -127..127."""
        return cls(manifest_pb2.TensorFormat.CODES_INT8, 1, 1, False, group_size)

    @classmethod
    def int4(cls, group_size: int = 64, *, asymmetric: bool = True) -> "Format":
        """int4: value = scale * code + min, or scale * (code - 8) where symmetric."""
        return cls(manifest_pb2.TensorFormat.CODES_INT4, 1, 1, asymmetric, group_size)

    @classmethod
    def from_proto(cls, message: manifest_pb2.TensorFormat) -> "Format":
        """Return the format of a manifest's message; whether the core supports it shows when it is used."""
        return cls(
            int(message.codes),
            int(message.scale_format),
            int(message.codebook),
            bool(message.asymmetric),
            int(message.group_size),
        )

    def to_proto(self) -> manifest_pb2.TensorFormat:
        """Return the manifest's message for this format."""
        message = manifest_pb2.TensorFormat(group_size=self.group_size, asymmetric=self.asymmetric)
        message.codes = self.codes  # type: ignore[assignment]
        message.scale_format = self.scale_format  # type: ignore[assignment]
        message.codebook = self.codebook  # type: ignore[assignment]
        return message

    def to_c(self) -> Any:
        """Return a new `cl_format *`. Raises InvalidError for a field that does not fit its C type."""
        for name in ("codes", "scale_format", "codebook"):
            if not 0 <= getattr(self, name) <= 255:
                raise InvalidError(f"format.{name} {getattr(self, name)} is not in 0..255")
        if not 0 <= self.group_size < 2**32:
            raise InvalidError(f"format.group_size {self.group_size} is not in 0..2^32-1")
        return ffi.new(
            "cl_format *", [self.codes, self.scale_format, self.codebook, int(self.asymmetric), self.group_size]
        )


@dataclass(frozen=True)
class QuantReport:
    """Sums over what was quantised; reports of pieces add up to the report of the whole."""

    values: int = 0
    nonzero: int = 0
    zeroed: int = 0
    sum_squares: float = 0.0
    error_squares: float = 0.0

    def __add__(self, other: "QuantReport") -> "QuantReport":
        return QuantReport(
            self.values + other.values,
            self.nonzero + other.nonzero,
            self.zeroed + other.zeroed,
            self.sum_squares + other.sum_squares,
            self.error_squares + other.error_squares,
        )

    @property
    def relative_rms(self) -> float:
        """sqrt(sum (w - w')^2 / sum w^2); 0 where all weights are zero."""
        return float((self.error_squares / self.sum_squares) ** 0.5) if self.sum_squares > 0 else 0.0

    @property
    def zeroed_share(self) -> float:
        """Share of the non-zero weights that became exactly zero; 0 where there are none."""
        return self.zeroed / self.nonzero if self.nonzero else 0.0


def _raise_if(err: Any, report: Any = None) -> None:
    error = error_from(err[0])
    if error is None:
        return
    if isinstance(error, NonFiniteError) and report is not None:
        error.row, error.col = int(report.nonfinite_row), int(report.nonfinite_col)
    try:
        raise error
    finally:
        del error  # else the frame holds the error and the error's traceback the frame


def _borrow(buffer: Bytes, name: str) -> U8:
    """Return the buffer's bytes as an array. Raises InvalidError if they are scattered.

    The array stands between the buffer and cffi on purpose. A memoryview that is lent out directly can end, through a
    traceback's frames, in a cycle that the garbage collector clears in the wrong order: CPython 3.11 then crashes. It
    does not look into arrays, so what an array holds is never part of such a cycle.
    """
    try:
        return np.frombuffer(buffer, np.uint8)
    except ValueError as error:
        raise InvalidError(f"{name} is not contiguous") from error


def _in(buffer: Bytes, name: str, bytes_wanted: int) -> Any:
    """Borrow at least bytes_wanted bytes to read. Raises InvalidError if there are fewer or they are scattered."""
    view = _borrow(buffer, name)
    if view.nbytes < bytes_wanted:
        raise InvalidError(f"{name} has {view.nbytes} bytes where {bytes_wanted} are needed")
    return ffi.from_buffer("uint8_t[]", view)


def _out(buffer: Bytes | None, name: str, bytes_wanted: int) -> tuple[Any, Any]:
    """Return (bytes-like, pointer) of exactly bytes_wanted writable bytes, new ones if buffer is None."""
    if buffer is None:
        buffer = np.empty(bytes_wanted, np.uint8)
    view = _borrow(buffer, name)
    if not view.flags.writeable or view.nbytes != bytes_wanted:
        raise InvalidError(f"{name} must be {bytes_wanted} writable contiguous bytes, not {view.nbytes}")
    return buffer, ffi.from_buffer("uint8_t[]", view, require_writable=True)


def tiles_bytes(format: Format, rows: int, cols: int) -> int:  # noqa: A002
    """Bytes of a [rows, cols] matrix in R8 tiles."""
    err, size = ffi.new("cl_error *"), ffi.new("uint64_t *")
    lib.cl_tiles_bytes(format.to_c(), rows, cols, size, err)
    _raise_if(err)
    return int(size[0])


def rows_bytes(format: Format, rows: int, cols: int) -> tuple[int, int, int]:  # noqa: A002
    """Bytes of (codes, scales, mins) of a [rows, cols] matrix in the row-major form; 0 where the format has none."""
    err, sizes = ffi.new("cl_error *"), ffi.new("uint64_t[3]")
    lib.cl_rows_bytes(format.to_c(), rows, cols, sizes, sizes + 1, sizes + 2, err)
    _raise_if(err)
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def _source(
    source: Bytes, source_type: SourceType, rows: int, cols: int, row_stride: int | None
) -> tuple[Any, int, int]:
    if source_type not in _SOURCE_TYPES:
        raise InvalidError(f"source_type {source_type!r} is not one of {', '.join(_SOURCE_TYPES)}")
    number, size = _SOURCE_TYPES[source_type]
    stride = cols if row_stride is None else row_stride
    if stride < cols:
        raise InvalidError(f"row_stride {stride} is less than cols {cols}")
    return _in(source, "source", size * ((rows - 1) * stride + cols)), number, stride


def _report(report: Any) -> QuantReport:
    return QuantReport(
        int(report.values),
        int(report.nonzero),
        int(report.zeroed),
        float(report.sum_squares),
        float(report.error_squares),
    )


def quantize_tiles(
    format: Format,  # noqa: A002
    source: Bytes,
    source_type: SourceType,
    rows: int,
    cols: int,
    *,
    row_stride: int | None = None,
    out: Bytes | None = None,
) -> tuple[Any, QuantReport]:
    """Quantise source [rows, cols] (row_stride in elements, default cols) into R8 tiles.

    Returns (tiles, report); tiles is `out` if given (exactly tiles_bytes(...) writable bytes), else a new uint8 array.
    Pieces of a larger matrix may be done separately if each but the last has a multiple of 8 rows. After an error the
    content of `out` is undefined.
    """
    tiles, pointer = _out(out, "out", tiles_bytes(format, rows, cols))
    data, number, stride = _source(source, source_type, rows, cols, row_stride)
    err, report = ffi.new("cl_error *"), ffi.new("cl_quant_report *")
    lib.cl_quantize_tiles(format.to_c(), data, number, rows, cols, stride, pointer, len(pointer), report, err)
    _raise_if(err, report)
    return tiles, _report(report)


def quantize_rows(
    format: Format,  # noqa: A002
    source: Bytes,
    source_type: SourceType,
    rows: int,
    cols: int,
    *,
    row_stride: int | None = None,
) -> tuple[U8, U8, U8, QuantReport]:
    """The same numbers in the row-major form: (codes, scales, mins, report), each array uint8 of rows_bytes(...)."""
    sizes = rows_bytes(format, rows, cols)
    (codes, p_codes), (scales, p_scales), (mins, p_mins) = (_out(None, "out", size) for size in sizes)
    data, number, stride = _source(source, source_type, rows, cols, row_stride)
    err, report = ffi.new("cl_error *"), ffi.new("cl_quant_report *")
    lib.cl_quantize_rows(format.to_c(), data, number, rows, cols, stride, p_codes, p_scales, p_mins, report, err)
    _raise_if(err, report)
    return codes, scales, mins, _report(report)


def dequantize_tiles(format: Format, tiles: Bytes, rows: int, cols: int) -> F32:  # noqa: A002
    """R8 tiles back to f32 [rows, cols]."""
    size = tiles_bytes(format, rows, cols)
    data, out, err = _in(tiles, "tiles", size), np.empty((rows, cols), np.float32), ffi.new("cl_error *")
    lib.cl_dequantize_tiles(format.to_c(), data, size, rows, cols, ffi.from_buffer("float[]", out), err)
    _raise_if(err)
    return out


def dequantize_rows(
    format: Format,  # noqa: A002
    codes: Bytes,
    scales: Bytes,
    mins: Bytes,
    rows: int,
    cols: int,
) -> F32:
    """The row-major form back to f32 [rows, cols]; scales and mins are empty where the format has none."""
    parts = _row_parts(format, codes, scales, mins, rows, cols)
    out, err = np.empty((rows, cols), np.float32), ffi.new("cl_error *")
    lib.cl_dequantize_rows(format.to_c(), *parts, rows, cols, ffi.from_buffer("float[]", out), err)
    _raise_if(err)
    return out


def _row_parts(
    format: Format,  # noqa: A002
    codes: Bytes,
    scales: Bytes,
    mins: Bytes,
    rows: int,
    cols: int,
) -> tuple[Any, Any, Any]:
    sizes = rows_bytes(format, rows, cols)
    return _in(codes, "codes", sizes[0]), _in(scales, "scales", sizes[1]), _in(mins, "mins", sizes[2])


def tile_rows(
    format: Format,  # noqa: A002
    codes: Bytes,
    scales: Bytes,
    mins: Bytes,
    rows: int,
    cols: int,
    *,
    out: Bytes | None = None,
) -> Any:
    """The row-major form to R8 tiles, as the core does with dense tensors at load. Returns `out` or a new array."""
    parts = _row_parts(format, codes, scales, mins, rows, cols)
    tiles, pointer = _out(out, "out", tiles_bytes(format, rows, cols))
    err = ffi.new("cl_error *")
    lib.cl_tile_rows(format.to_c(), *parts, rows, cols, pointer, len(pointer), err)
    _raise_if(err)
    return tiles


def crc32c(data: Bytes, crc: int = 0) -> int:
    """CRC-32C (Castagnoli) of data, continuing from the CRC of what came before it (0 to start)."""
    pointer = _in(data, "data", 0)
    return int(lib.cl_crc32c(crc, pointer, len(pointer)))


def matmul(
    isa: str,
    format: Format,  # noqa: A002
    tiles: Bytes,
    rows: int,
    cols: int,
    activation: Activation,
    x: F32,
) -> F32:
    """x [n, cols] times the transpose of the tiled W [rows, cols], with the kernels of `isa`, on one thread.

    `isa`: "generic", "avx2" or "auto". `activation` counts for integer weights only. Raises UnsupportedError for an
    instruction set that this machine lacks.
    """
    if activation not in _ACTIVATIONS:
        raise InvalidError(f"activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2 or x.shape[1] != cols:
        raise InvalidError(f"x has shape {x.shape} where [n, {cols}] is needed")
    size = tiles_bytes(format, rows, cols)
    data, out, err = _in(tiles, "tiles", size), np.empty((x.shape[0], rows), np.float32), ffi.new("cl_error *")
    px, py = ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", out)
    kind = _ACTIVATIONS[activation]
    lib.cl_matmul(isa.encode(), format.to_c(), data, size, rows, cols, kind, px, x.shape[0], py, err)
    _raise_if(err)
    return out
