"""The drives under a running daemon: what each does, which of them is degraded, and since when everybody knows.

Owns the state of each stripe's drive (well, degraded), its speed over the last seconds, and the places that are known
to be bad: those that the core reports and those that a scrub found. A change of state is one line in the journal, not
one for each read. Fed with the core's counters by whoever looks (once a second), with places by drive_care.py; read by
the status line and by WatchStats. Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from colibri.daemon.core_errors import FaultPlace, fault_place
from colibri.daemon.journal import DRIVE_DEGRADED, DRIVE_HEALED, fields_of

log = logging.getLogger("colibri.daemon.drives")

RATE_SECONDS = 5.0
MAX_PLACES = 256  # bad places that are remembered of one drive; more are counted only


class DriveCounters(Protocol):
    """The fields of colibri.core's DriveStats that are shown; times in microseconds, counts since the start."""

    @property
    def backend(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def mirror(self) -> bool: ...
    @property
    def degraded(self) -> bool: ...
    @property
    def reads(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def busy_us(self) -> int: ...
    @property
    def cpu_us(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def checksum_errors(self) -> int: ...
    @property
    def mirror_reads(self) -> int: ...
    @property
    def latency_p50_us(self) -> int: ...
    @property
    def latency_p99_us(self) -> int: ...
    @property
    def last_error(self) -> str: ...
    @property
    def note(self) -> str: ...


@dataclass(frozen=True)
class DriveView:
    """One look at a drive. `degraded`: why it is, "" while it is well."""

    stripe: int
    path: Path
    counters: DriveCounters
    bytes_per_second: float
    degraded: str

    def __str__(self) -> str:
        return f"stripe {self.stripe} ({self.path})"


@dataclass
class _Drive:
    stripe: int
    path: Path
    counters: DriveCounters | None = None
    seen: deque[tuple[float, int]] = field(default_factory=deque)  # (time, bytes read by then), oldest first
    places: dict[tuple[int | None, int | None, int | None], str] = field(default_factory=dict)
    more: int = 0  # places beyond MAX_PLACES
    degraded: str = ""

    def rate(self) -> float:
        (begun, before), (now, read) = self.seen[0], self.seen[-1]
        return (read - before) / (now - begun) if now > begun else 0.0

    def problem(self) -> str:
        """Why this drive is degraded, "" if it is not. The core's last error first, it is the newest."""
        if self.counters is not None and self.counters.degraded:
            return self.counters.last_error or "an extent could not be read"
        if not self.places:
            return ""
        others = len(self.places) - 1 + self.more
        return next(iter(self.places.values())) + (f" (and {others} more)" if others else "")


class Drives:
    """`files`: the stripe files by number. `clock` is in seconds and never goes back."""

    def __init__(self, files: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._drives = [_Drive(stripe, path) for stripe, path in enumerate(files)]
        self._clock = clock
        self._lock = threading.Lock()

    def update(self, counters: Sequence[DriveCounters]) -> None:
        """Takes the core's counters, in stripe order."""
        now = self._clock()
        with self._lock:
            for drive, found in zip(self._drives, counters, strict=True):
                drive.counters = found
                drive.seen.append((now, found.read_bytes))
                while len(drive.seen) > 2 and drive.seen[1][0] <= now - RATE_SECONDS:
                    drive.seen.popleft()
                if found.degraded and found.last_error:
                    self._note(drive, found.last_error)
                self._settle(drive)

    def found_bad(self, stripe: int, text: str) -> None:
        """A place of this drive does not hold what was written; `text` names it as the core's errors do."""
        with self._lock:
            self._note(self._drives[stripe], text)
            self._settle(self._drives[stripe])

    def bad_places(self) -> list[tuple[int, str]]:
        """(stripe, text) of every place that is known to be bad."""
        with self._lock:
            return [(drive.stripe, text) for drive in self._drives for text in drive.places.values()]

    def healed(self, stripe: int) -> None:
        """Every known bad place of this drive has been read and was right."""
        with self._lock:
            drive = self._drives[stripe]
            drive.places.clear()
            drive.more = 0
            if drive.counters is None or not drive.counters.degraded:
                self._settle(drive)

    def views(self) -> list[DriveView]:
        """The drives by number; empty until the core has been looked at."""
        with self._lock:
            return [
                DriveView(drive.stripe, drive.path, drive.counters, drive.rate(), drive.degraded)
                for drive in self._drives
                if drive.counters is not None
            ]

    def remarks(self) -> list[str]:
        """One text for each drive that is degraded."""
        with self._lock:
            return [f"drive {drive.path.parent}: {drive.degraded}" for drive in self._drives if drive.degraded]

    def _note(self, drive: _Drive, text: str) -> None:
        place = fault_place(text)
        key = (place.layer, place.expert, place.offset)
        if key in drive.places or len(drive.places) < MAX_PLACES:
            drive.places[key] = text
        else:
            drive.more += 1

    def _settle(self, drive: _Drive) -> None:
        """Tells the journal where a drive changed its state. A drive that stays degraded is not told again."""
        problem = drive.problem()
        before, drive.degraded = drive.degraded, problem
        if bool(problem) == bool(before):
            return
        place = fault_place(problem or before)
        named = FaultPlace(stripe=drive.stripe, file=str(drive.path)) if place.file is None else place
        if problem:
            extra = fields_of("drive-degraded", DRIVE_DEGRADED, named)
            log.error("drive %s is degraded: %s", drive.path.parent, problem, extra=extra)
        else:
            extra = fields_of("drive-healed", DRIVE_HEALED, FaultPlace(stripe=drive.stripe, file=str(drive.path)))
            log.info("drive %s is well again", drive.path.parent, extra=extra)
