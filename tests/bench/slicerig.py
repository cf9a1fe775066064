"""A giant slice on throttled drives, and what a run over it may be held against.

Owns the drives, groups and containers of one benchmark (testkit.loop_drives, giant.py) and the floor of a token. Sits
between the benchmarks and slicerun.py, whose results it judges.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from giant import Shape, plan_slice, write_giant
from report import cache_folder

from testkit.loop_drives import DriveSpec, LoopDrive, loop_drives, why_not

MB = 1_000_000
BACKENDS = ("io_uring", "threads")
LEAST_LIMIT_BYTES = 320 << 20  # Python and the RAM ceiling need that much; only the small slice comes below


def refuse_where_impossible(bench: str) -> bool:
    """Say why `bench` cannot run here; False where it can."""
    reason = why_not()
    if reason:
        print(f"BENCH={bench}: {reason}", file=sys.stderr)
    return bool(reason)


def limit_for(shape: Shape, factor: int) -> int:
    """The memory limit in bytes under which the model is `factor` times larger than memory."""
    return max(sum(plan_slice(shape, [1]).folder_bytes) // factor, LEAST_LIMIT_BYTES)


@contextmanager
def slice_on_drives(
    shape: Shape, rates: Sequence[int], under: Path | None
) -> Iterator[tuple[list[LoopDrive], list[str]]]:
    """Write the slice onto new drives of these read rates, striped by them; yields the drives and the folders.

    The drives are read-only and in the page cache by then. `under` (default: the benchmark cache) holds the images.
    """
    weights = [rate // MB for rate in rates]
    sizes = plan_slice(shape, weights).folder_bytes
    specs = [DriveSpec(size + (16 << 20), rate) for size, rate in zip(sizes, rates, strict=True)]
    print(f"making {shape.name} on drives of {', '.join(map(str, weights))} MB/s", file=sys.stderr, flush=True)
    with loop_drives(specs, under or cache_folder()) as drives:
        folders = [drive.folder / "container" for drive in drives]
        write_giant(shape, folders, weights)
        for drive in drives:
            drive.prefault()
            drive.seal()
        yield drives, [str(folder) for folder in folders]


@dataclass(frozen=True)
class Judged:
    """A decode run beside its ceilings. Times in seconds per token, rates in bytes per second."""

    seconds: float
    missed_bytes: float
    touched_bytes: float
    drive_rate: float
    ram_rate: float
    hit_share: float
    waited_share: float
    cpu_per_gb: float

    @property
    def floor(self) -> float:
        """max(missed / drives, touched / RAM): what no engine can beat."""
        return max(self.missed_bytes / self.drive_rate, self.touched_bytes / self.ram_rate)

    @property
    def serial_floor(self) -> float:
        """The same without overlap: first read, then compute."""
        return self.missed_bytes / self.drive_rate + self.touched_bytes / self.ram_rate

    @property
    def share(self) -> float:
        return self.floor / self.seconds

    @property
    def read_rate(self) -> float:
        """Bytes read per second of decoding, pauses included."""
        return self.missed_bytes / self.seconds


def judge(run: dict[str, Any], ceilings: Sequence[dict[str, Any]]) -> Judged:
    """Hold a result of slicerun's decode mode against results of its ceilings mode; rates are medians."""
    tokens, uses = len(run["seconds"]), run["hits"] + run["loads"]
    return Judged(
        seconds=statistics.mean(run["seconds"]),  # tokens that miss differ from each other
        missed_bytes=run["needed_bytes"] / tokens,
        touched_bytes=run["touched_bytes"],
        drive_rate=statistics.median(sum(ceiling["drive_rates"]) for ceiling in ceilings),
        ram_rate=statistics.median(ceiling["ram_rate"] for ceiling in ceilings),
        hit_share=run["hits"] / uses if uses else 0.0,
        waited_share=run["wait_us"] / run["compute_us"] if run["compute_us"] else 0.0,
        cpu_per_gb=run["io_cpu_us"] * 1e3 / run["read_bytes"] if run["read_bytes"] else 0.0,
    )
