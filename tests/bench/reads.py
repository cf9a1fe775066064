"""`make bench BENCH=reads`: the I/O engine, both back ends, beside an independent O_DIRECT reader in the same run.

Reads extents of 20 MiB of one file in scattered order, four on their way, and checks their CRC-32C. One row per back
end, verify mode and depth (requests in flight, or reading threads): GB/s, its share of the independent reader's rate,
and processor time per GB: of the I/O threads, and of the whole process (kernel workers of io_uring included). Rounds
alternate between all rows and the reader; medians. `value` is the rate of io_uring (threads where that is refused) at
the default depth with checksums. --file reads another file, which must be as large as --mib says, and keeps it.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import ceilings
import report

from testkit.repository import ROOT

SOURCE = Path(__file__).with_name("reads.c")
PARTS = ["crc32c", "error", "io", "io_files", "io_requests", "io_stats", "io_threads", "io_uring", "uring"]
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
EXTENT_BYTES = 20 << 20
BACKENDS = {"io_uring": 1, "threads": 2}
VERIFY = {"always": 0, "never": 2}
DEFAULT_DEPTH = 4
UNSUPPORTED = -4
ERROR_TEXT_BYTES = 512


class Reading(ctypes.Structure):
    """What one run of the engine gave; `reading` of reads.c."""

    _fields_ = [
        ("bytes_per_second", ctypes.c_double),
        ("io_cpu_seconds", ctypes.c_double),
        ("process_cpu_seconds", ctypes.c_double),
        ("p50_us", ctypes.c_double),
        ("p99_us", ctypes.c_double),
        ("registered", ctypes.c_int32),
    ]


@dataclass
class Row:
    """The samples of one way of reading."""

    backend: str
    verify: str
    depth: int
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])


class Engine:
    """The core's I/O engine, compiled for this benchmark, over one file."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Compile and load it, and read the file once for its checksums. Raises OSError, CalledProcessError."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "reads.so"
            sources = [str(SOURCE), *(str(ROOT / "csrc" / f"{part}.c") for part in PARTS)]
            command = [os.environ.get("CC", "gcc"), *FLAGS, "-I", str(ROOT / "csrc"), "-o", str(target), *sources]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(target))
        self._library.bench_checksum.restype = ctypes.c_double
        self._path = path
        failed = self._library.bench_prepare(
            os.fsencode(path), ctypes.c_uint64(size_bytes), ctypes.c_uint64(EXTENT_BYTES)
        )
        if failed:
            raise OSError(failed, os.strerror(failed), str(path))

    def read(self, row: Row, extents: int, seed: int) -> bool:
        """Add one sample to `row`; False if the kernel refuses its back end. Raises OSError if a read fails."""
        out, why = Reading(), ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        code = self._library.bench_read(
            os.fsencode(self._path),
            *(BACKENDS[row.backend], VERIFY[row.verify], row.depth),
            *(ctypes.c_uint64(extents), ctypes.c_uint64(seed), ctypes.byref(out), why),
        )
        if code == UNSUPPORTED and row.backend == "io_uring":
            print(f"left out: {why.value.decode()}")
            return False
        if code:
            raise OSError(f"{self._path}: the engine failed: {why.value.decode()} ({code})")
        for name in (described[0] for described in Reading._fields_):
            row.samples[name].append(float(getattr(out, name)))
        return True

    def checksum(self, turn: int) -> float:
        """Bytes per second of one core's CRC-32C over 19 MB from RAM."""
        rate = float(self._library.bench_checksum(turn))
        if rate <= 0:
            raise MemoryError("no memory for the checksum's buffers")
        return rate


def _file(arguments: argparse.Namespace, size_bytes: int) -> Path:
    if arguments.file:
        return Path(arguments.file)
    path = report.cache_folder() / "reads.bin"
    if not path.exists() or path.stat().st_size < size_bytes:
        with path.open("wb") as file:
            for _ in range(size_bytes >> 24):
                file.write(os.urandom(1 << 24))
            file.flush()
            os.fsync(file.fileno())
    return path


def _measure(
    engine: Engine, path: Path, rows: list[Row], arguments: argparse.Namespace
) -> tuple[list[Row], float, float]:
    """Return the rows that could run, the independent reader's rate and the checksum's."""
    size_bytes = arguments.mib << 20
    extents = max(4, (arguments.sample_mib << 20) // EXTENT_BYTES)
    reader, checksum = [], []
    for number in range(arguments.rounds):
        reader.append(ceilings.disk_rate(path, min(size_bytes, arguments.sample_mib << 20)))
        checksum += [engine.checksum(8 * number + turn) for turn in range(8)]
        rows = [row for row in rows if engine.read(row, extents, 1000 * number + 7)]
    return rows, statistics.median(reader), statistics.median(checksum)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reads", description=__doc__)
    parser.add_argument("--file", help="read this file instead of one in the cache folder")
    parser.add_argument("--mib", type=int, default=2048, help="how much of it (default 2048)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-mib", type=int, default=640, help="read for each sample (default 640)")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, DEFAULT_DEPTH, 8])
    arguments = parser.parse_args(argv)
    path = _file(arguments, arguments.mib << 20)
    engine = Engine(path, arguments.mib << 20)
    wanted = [Row(b, v, d) for b in BACKENDS for v in VERIFY for d in sorted({*arguments.depths, DEFAULT_DEPTH})]
    rows, reader, checksum = _measure(engine, path, wanted, arguments)
    shown = [
        [
            *(f"{row.backend} {row.verify}", str(row.depth), f"{row.median('bytes_per_second') / 1e9:.2f}"),
            *(f"{row.median('bytes_per_second') / reader:.0%}", f"{row.median('io_cpu_seconds'):.3f}"),
            *(f"{row.median('process_cpu_seconds'):.3f}", f"{row.median('p50_us'):.0f}", f"{row.median('p99_us'):.0f}"),
        ]
        for row in rows
    ]
    columns = ["back end, verify", "depth", "GB/s", "share", "I/O cpu s/GB", "process cpu s/GB", "p50 us", "p99 us"]
    title = f"I/O engine; independent reader {reader / 1e9:.2f} GB/s; CRC-32C {checksum / 1e9:.1f} GB/s per core"
    report.table(title, columns, shown)
    default = {row.backend: row for row in rows if row.verify == "always" and row.depth == DEFAULT_DEPTH}
    head = default.get("io_uring", default["threads"])
    cpu = {f"{name}_cpu_s_per_gb": row.median("io_cpu_seconds") for name, row in default.items()}
    rates = {f"{name}_gb_s": row.median("bytes_per_second") / 1e9 for name, row in default.items()}
    registered = int(head.median("registered"))
    more: dict[str, float | int | str] = {
        **cpu,
        **rates,
        "crc32c_gb_s": checksum / 1e9,
        "backend": head.backend,
        "registered": registered,
    }
    report.result("reads", path.name, head.median("bytes_per_second") / 1e9, "GB/s", reader / 1e9, **more)
    return 0
