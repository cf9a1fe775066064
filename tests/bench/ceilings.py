"""The physical ceilings that benchmarks are held against, measured in the same run by code that is not the product's.

`Ram` reads 1 GiB of huge pages through four streams on each of two threads; `disk_rate` is an O_DIRECT reader with four
reads in flight. Callers take samples between those of the thing measured and compare medians, because this kind of
machine is shared and its absolute speed wanders.
"""

import ctypes
import functools
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

GIB = 1 << 30
SOURCE = Path(__file__).with_name("ceiling.c")
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]


@functools.cache
def _library() -> ctypes.CDLL:
    """Compile ceiling.c and load it; raises CalledProcessError if gcc refuses."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ceiling.so"
        subprocess.run([os.environ.get("CC", "gcc"), *FLAGS, "-o", str(target), str(SOURCE)], check=True)
        library = ctypes.CDLL(str(target))
    library.ceiling_buffer.restype = ctypes.c_void_p
    library.ceiling_buffer.argtypes = [ctypes.c_uint64]
    library.ceiling_ram.restype = ctypes.c_double
    library.ceiling_ram.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    library.ceiling_disk.restype = ctypes.c_double
    library.ceiling_disk.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    library.ceiling_compute.restype = ctypes.c_double
    library.ceiling_compute.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
    return library


class Ram:
    """Samples of the RAM read rate; `rate` is their median in bytes per second."""

    def __init__(self, threads: int = 2, size_bytes: int = GIB) -> None:
        self._library = _library()
        self._threads = threads
        self._bytes = size_bytes
        self._buffer = self._library.ceiling_buffer(size_bytes)
        if not self._buffer:
            raise MemoryError(f"no {size_bytes} bytes for the RAM ceiling")
        self.samples: list[float] = []

    def sample(self) -> float:
        rate = float(self._library.ceiling_ram(self._buffer, self._bytes, self._threads))
        if rate <= 0:
            raise RuntimeError("the RAM ceiling needs AVX2 and two threads")
        self.samples.append(rate)
        return rate

    @property
    def rate(self) -> float:
        return statistics.median(self.samples)


class Compute:
    """Samples of integer multiply-adds per second in registers; `rate` is their median."""

    def __init__(self, threads: int, activation: str) -> None:
        self._library = _library()
        self._threads = threads
        self._wide = int(activation == "i16")
        self.samples: list[float] = []

    def sample(self) -> float:
        rate = float(self._library.ceiling_compute(self._wide, 20_000_000, self._threads))
        if rate <= 0:
            raise RuntimeError("the arithmetic ceiling needs AVX2")
        self.samples.append(rate)
        return rate

    @property
    def rate(self) -> float:
        return statistics.median(self.samples)


def disk_rate(path: Path, size_bytes: int, block_bytes: int = 4 << 20, depth: int = 4) -> float:
    """Bytes per second of an O_DIRECT reader over the first `size_bytes` of `path`; OSError if it is refused."""
    rate = float(_library().ceiling_disk(os.fsencode(path), size_bytes, block_bytes, depth))
    if rate <= 0:
        raise OSError(f"{path}: the file system refuses O_DIRECT reads")
    return rate
