"""Drives as the core sees them: what each stripe's drive has done since the model was opened, and what a drive can do.

Owns the typed face of the drive functions in colibri.h. Refuses to judge: when a drive is slow, or how records are
divided among drives, is decided above.
"""

import os
from dataclasses import dataclass
from typing import Any

from colibri.core._core import ffi, lib
from colibri.core.core_options import IO_BACKENDS, IoBackend, choice
from colibri.core.errors import InvalidError, error_from

_BACKEND_NAMES = {1: "io_uring", 2: "threads"}
_NUMBERS = (
    *("depth", "reads", "read_bytes", "busy_us", "cpu_us", "retries", "errors", "checksum_errors", "mirror_reads"),
    *("latency_p50_us", "latency_p99_us"),
)


@dataclass(frozen=True)
class DriveStats:
    """One stripe's drive since the model was opened; times in microseconds. See cl_drive_stats in colibri.h.

    backend: "io_uring" or "threads". degraded: an extent could not be read even by the second try; last_error says
    which. note: what the drive goes without (io_uring, registered buffers, its mirror), or empty.
    """

    backend: str
    direct: bool
    mirror: bool
    degraded: bool
    depth: int
    reads: int
    read_bytes: int
    busy_us: int
    cpu_us: int
    retries: int
    errors: int
    checksum_errors: int
    mirror_reads: int
    latency_p50_us: int
    latency_p99_us: int
    last_error: str
    note: str

    @classmethod
    def from_c(cls, c: Any) -> "DriveStats":
        """Return the contents of a cl_drive_stats."""
        return cls(
            backend=_BACKEND_NAMES[int(c.backend)],
            direct=bool(c.direct),
            mirror=bool(c.mirror),
            degraded=bool(c.degraded),
            last_error=ffi.string(c.last_error).decode("utf-8", "replace"),
            note=ffi.string(c.note).decode("utf-8", "replace"),
            **{name: int(getattr(c, name)) for name in _NUMBERS},
        )


def probe(
    path: str | os.PathLike[str],
    *,
    request_bytes: int = 8 << 20,
    size_bytes: int = 256 << 20,
    depth: int = 0,
    backend: IoBackend = "auto",
) -> float:
    """Return the bytes per second that the engine's own way of reading gets from an existing file.

    Reads `size_bytes` in extents of `request_bytes` (a multiple of 4096, at most the file's size) at scattered places,
    past the page cache where the file system allows, with `depth` requests in flight (0: the default). The GIL is
    released. Raises InvalidError, StorageError, CorruptError (the file is shorter than one extent), UnsupportedError
    (io_uring asked for and refused) or NoMemoryError.
    """
    rate, err = ffi.new("double *"), ffi.new("cl_error *")
    kind = choice("backend", IO_BACKENDS, backend)
    try:
        lib.cl_drive_probe(os.fsencode(path), request_bytes, depth, size_bytes, kind, rate, err)
    except (OverflowError, TypeError) as error:
        raise InvalidError(f"probe of {os.fspath(path)}: a number does not fit: {error}") from error
    if (failure := error_from(err)) is not None:
        raise failure
    return float(rate[0])
