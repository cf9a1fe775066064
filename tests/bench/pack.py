"""How fast colibri-pack is, and how much memory it takes: packs a random checkpoint several times larger than its
limit.

The ceiling is the core's quantiser alone, on one core with its input in memory: what is lost against it goes to
reading, hashing, writing and Python. Peak memory is that of the whole process tree, sampled, and not below the
kernel's own mark.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from memory import TreePeak
from randommodel import OlmoeShape, write_checkpoint
from report import result, table

from colibri.core.tensors import Format, quantize_tiles

LIMIT_BYTES = 1 << 30
CEILING_ROWS, CEILING_COLS = 2048, 2048
MB = 1e6


def quantiser_rate(samples: int) -> float:
    """Source bytes (bf16) per second of the int4 quantiser on one core, median."""
    values = np.random.default_rng(1).standard_normal((CEILING_ROWS, CEILING_COLS), np.float32)
    source = (values.view(np.uint32) >> 16).astype(np.uint16)
    rates = []
    for _ in range(samples):
        begin = time.perf_counter()
        quantize_tiles(Format.int4(), source, "bf16", CEILING_ROWS, CEILING_COLS)
        rates.append(source.nbytes / (time.perf_counter() - begin))
    return statistics.median(rates)


def run_and_watch(command: list[str]) -> tuple[float, int]:
    """Run a command; return seconds and the peak memory of its process tree."""
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with TreePeak(child.pid) as peak:
        child.wait()
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, command)
    return time.perf_counter() - begin, peak.bytes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pack", description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers, 0.8 GB each (default: 4)")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    options = parser.parse_args(argv)
    shape = OlmoeShape(layers=options.layers)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="colibri-bench-") as name:
        source, out = Path(name) / shape.name, Path(name) / "container"
        size = write_checkpoint(shape, source)
        before = quantiser_rate(5)
        command = [sys.executable, "-P", "-m", "colibri.packer.cli", str(source), "--out", str(out)]
        seconds, peak = run_and_watch(command)
        ceiling = statistics.median([before, quantiser_rate(5)])
        written = sum(path.stat().st_size for path in out.iterdir())
    rate = size / seconds / cores
    rows = [
        ["checkpoint", f"{size / MB:.0f} MB"],
        ["container", f"{written / MB:.0f} MB"],
        ["time", f"{seconds:.1f} s on {cores} cores"],
        ["rate per core", f"{rate / MB:.1f} MB/s"],
        ["quantiser alone", f"{ceiling / MB:.1f} MB/s"],
        ["peak memory", f"{peak / MB:.0f} MB of {LIMIT_BYTES / MB:.0f}"],
    ]
    table("pack", ["what", "measured"], rows)
    more = {"checkpoint_bytes": size, "seconds": seconds, "cores": cores, "limit_bytes": LIMIT_BYTES}
    result("pack", shape.name, rate / MB, "MB/s per core", ceiling / MB, peak_rss_bytes=peak, **more)
    return 0 if peak <= LIMIT_BYTES else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
