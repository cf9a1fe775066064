"""How fast drives read, measured by the engine's own read pattern on a temporary file on each.

The drives take turns, so that what else the machine does falls on all of them alike, and then all read at once, as they
will when they serve: drives behind one bus share it. The file has lost its name before anything is written to it, so
nothing is left behind, even by a kill. Refuses nothing: what a drive refuses comes as DriveError.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

from colibri.core import drives
from colibri.packer.disk import Disk, DriveError, naming
from colibri.packer.folders import PROBE_NAME, by_file_system
from colibri.packer.wording import size_text

FILE_BYTES = 128 << 20  # of the temporary file, or less where a quarter of the free space is less
LEAST_FILE_BYTES = 4 << 20
_BLOCK_BYTES = 4 << 20
_REQUEST_BYTES = 8 << 20
_ROUNDS = 3
_SECONDS = 0.5  # of reading per round
_STEP = 1.1  # weights are rounded to powers of it: repeated packs on the same drives get the same layout
_FASTEST = 100  # the weight of the fastest drive

# Reads `size_bytes` of the file in extents of `request_bytes`, returns bytes per second: colibri.core.drives.probe.
Probe = Callable[[str, int, int], float]


@dataclass(frozen=True)
class DriveRate:
    """What a folder's drive reads, in bytes per second: alone, and while all the others read too."""

    folder: Path
    alone: float
    together: float

    def text(self) -> str:
        """Return a line for people."""
        return f"{self.folder}: {size_text(self.alone)}/s alone, {size_text(self.together)}/s with all drives reading"


def engine_probe(path: str, request_bytes: int, size_bytes: int) -> float:
    """Measure as the engine reads."""
    return drives.probe(path, request_bytes=request_bytes, size_bytes=size_bytes)


def measure(folders: Sequence[Path], *, disk: Disk | None = None, probe: Probe = engine_probe) -> list[DriveRate]:
    """Measure the drives of the folders, which must exist. Folders on one file system get equal parts of its rate.

    Raises DriveError, also where there is no room for a file worth reading, and CoreError.
    """
    disk = disk or Disk()
    systems = by_file_system(folders)
    with ExitStack() as stack:
        files = [stack.enter_context(_probe_file(disk, folders[system[0]])) for system in systems]
        alone = _take_turns(files, probe)
        together = _all_at_once(files, alone, probe)
    rates: dict[int, DriveRate] = {}
    for system, own, shared in zip(systems, alone, together, strict=True):
        for index in system:
            rates[index] = DriveRate(folders[index], own / len(system), shared / len(system))
    return [rates[index] for index in range(len(folders))]


def weights_of(rates: Sequence[DriveRate]) -> list[int]:
    """Return weights in proportion to what the drives read together, the fastest 100, rounded to steps of 10 %."""
    fastest = max(rate.together for rate in rates)
    steps = [round(log(rate.together / fastest) / log(_STEP)) for rate in rates]
    return [max(1, round(_FASTEST * _STEP**step)) for step in steps]


@dataclass(frozen=True)
class _File:
    folder: Path
    path: str  # works as long as the file is open
    bytes: int


@contextmanager
def _probe_file(disk: Disk, folder: Path) -> Iterator[_File]:
    size = min(FILE_BYTES, disk.free_bytes(folder) // 4) // _BLOCK_BYTES * _BLOCK_BYTES
    if size < LEAST_FILE_BYTES:
        raise DriveError(f"{folder}: too little room to measure how fast the drive reads")
    file = disk.open_output(folder / PROBE_NAME)
    try:
        disk.remove(folder / PROBE_NAME)
        block = os.urandom(_BLOCK_BYTES)  # some drives are faster with zeros
        for begin in range(0, size, _BLOCK_BYTES):
            file.write(begin, block)
        file.sync()
        yield _File(folder, f"/proc/self/fd/{file.fileno()}", size)
    finally:
        file.close()


def _take_turns(files: Sequence[_File], probe: Probe) -> list[float]:
    """Bytes per second of each file, read one at a time; the first round only finds out how much is worth reading."""
    amounts = [LEAST_FILE_BYTES] * len(files)
    rounds: list[list[float]] = []
    for _ in range(1 + _ROUNDS):
        rounds.append([_rate(file, amount, probe) for file, amount in zip(files, amounts, strict=True)])
        amounts = [_amount(file, rate, _SECONDS) for file, rate in zip(files, rounds[-1], strict=True)]
    return [median(rates) for rates in zip(*rounds[1:], strict=True)]


def _all_at_once(files: Sequence[_File], alone: Sequence[float], probe: Probe) -> list[float]:
    """The same with all of them reading; each gets as much to read as keeps it busy as long as the others."""
    if len(files) == 1:
        return list(alone)
    seconds = min([_SECONDS, *(file.bytes / rate for file, rate in zip(files, alone, strict=True))])
    amounts = [_amount(file, rate, seconds) for file, rate in zip(files, alone, strict=True)]
    rounds = []
    with ThreadPoolExecutor(len(files), thread_name_prefix="probe") as pool:
        for _ in range(_ROUNDS):
            rounds.append(list(pool.map(lambda job: _rate(job[0], job[1], probe), zip(files, amounts, strict=True))))
    return [median(rates) for rates in zip(*rounds, strict=True)]


def _amount(file: _File, rate: float, seconds: float) -> int:
    wanted = int(rate * seconds) // _BLOCK_BYTES * _BLOCK_BYTES
    return max(LEAST_FILE_BYTES, min(file.bytes, wanted))


def _rate(file: _File, amount: int, probe: Probe) -> float:
    with naming(file.folder, "measuring the drive of"):
        return probe(file.path, min(_REQUEST_BYTES, amount), amount)
