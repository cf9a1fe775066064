"""The drives under a running daemon: what each does, which of them is degraded, and since when everybody knows.

Owns the state of each stripe's drive (well, degraded), its speed over the last seconds, and the places that are known
to be bad: those that the core reports and those that a scrub found. A mirror lies on another drive than its stripe and
has a state of its own. A change of state is one line in the journal, not one for each read. Fed with the core's
counters by whoever looks (once a second), with places by drive_care.py; read by the status line and by WatchStats. Any
thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

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


class BadPlace(NamedTuple):
    """`text` names the place as the core's errors do; `mirror`: it is in the mirror of the stripe."""

    stripe: int
    text: str
    mirror: bool = False


@dataclass(frozen=True)
class DriveView:
    """One look at a drive. `degraded`: why it is, "" while it is well; `mirror_degraded` the same of the mirror, which
    is None where there is none."""

    stripe: int
    path: Path
    counters: DriveCounters
    bytes_per_second: float
    degraded: str
    mirror: Path | None = None
    mirror_degraded: str = ""

    def __str__(self) -> str:
        return f"stripe {self.stripe} ({self.path})"


_Key = tuple[int | None, int | None, int | None]


def _key(text: str) -> _Key:
    """Layer, expert and offset of the place that `text` names: the same place may be told in other words."""
    place = fault_place(text)
    return place.layer, place.expert, place.offset


@dataclass
class _Copy:
    """One file of a drive, the stripe or its mirror, and what is known to be bad in it."""

    stripe: int
    path: Path
    name: str
    places: dict[_Key, str] = field(default_factory=dict)
    more: int = 0  # places beyond MAX_PLACES
    degraded: str = ""

    def note(self, text: str) -> None:
        key = _key(text)
        if key in self.places or len(self.places) < MAX_PLACES:
            self.places[key] = text
        else:
            self.more += 1

    def clear(self) -> None:
        self.places.clear()
        self.more = 0

    def problem(self, newest: str = "") -> str:
        """One place in words, `newest` if it is given, and how many others there are; "" if nothing is bad."""
        told = newest or next(iter(self.places.values()), "")
        counted = _key(told) in self.places or self.more > 0  # `newest` too: beyond MAX_PLACES it is one of `more`
        others = self.more + len(self.places) - counted
        return told + (f" (and {others} more {'place' if others == 1 else 'places'})" if others else "")

    def settle(self, problem: str) -> None:
        """Tells the journal where this copy changed its state. One that stays degraded is not told again."""
        before, self.degraded = self.degraded, problem
        if bool(problem) == bool(before):
            return
        own = FaultPlace(stripe=self.stripe, file=str(self.path))
        if problem:
            place = fault_place(problem)
            extra = fields_of("drive-degraded", DRIVE_DEGRADED, own if place.file is None else place)
            log.error("drive %s is degraded: %s", self.name, problem, extra=extra)
        else:
            log.info("drive %s is well again", self.name, extra=fields_of("drive-healed", DRIVE_HEALED, own))


class _Drive:
    def __init__(self, stripe: int, path: Path, mirror: Path | None) -> None:
        self.stripe = stripe
        self.copy = _Copy(stripe, path, str(path.parent))
        self.mirror = _Copy(stripe, mirror, f"{mirror.parent} (mirror of stripe {stripe})") if mirror else None
        self.counters: DriveCounters | None = None
        self.seen: deque[tuple[float, int]] = deque()  # (time, bytes read by then), oldest first
        self._noted: tuple[str, int] = ("", 0)  # of the core's errors, the last that was taken as news

    def rate(self) -> float:
        (begun, before), (now, read) = self.seen[0], self.seen[-1]
        return (read - before) / (now - begun) if now > begun else 0.0

    def copies(self) -> list[_Copy]:
        return [self.copy] if self.mirror is None else [self.copy, self.mirror]

    def copy_of(self, text: str) -> _Copy:
        """The file that `text` names; the stripe's own if it names none."""
        is_mirror = self.mirror is not None and fault_place(text).file == str(self.mirror.path)
        return self.mirror if is_mirror and self.mirror is not None else self.copy

    def core_error(self) -> str:
        """Why the core does not trust the stripe, "" if it does."""
        if self.counters is None or not self.counters.degraded:
            return ""
        return self.counters.last_error or "an extent could not be read"

    def note_news(self) -> None:
        """Notes the core's last error unless it has been: counters that were taken before a drive was opened anew may
        arrive after it was found well."""
        assert self.counters is not None
        error = self.counters.last_error, self.counters.errors + self.counters.checksum_errors
        if self.counters.degraded and error[0] and error != self._noted:
            self._noted = error
            self.copy.note(error[0])

    def settle(self) -> None:
        """The core's last error first, it is the newest."""
        self.copy.settle(self.copy.problem(self.core_error()))
        if self.mirror is not None:
            self.mirror.settle(self.mirror.problem())


class Drives:
    """`files`: the stripe files by number; `mirrors`: theirs, None where there is none. `clock` is in seconds and never
    goes back."""

    def __init__(
        self,
        files: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
        mirrors: Sequence[Path | None] | None = None,
    ) -> None:
        pairs = zip(files, mirrors or [None] * len(files), strict=True)
        self._drives = [_Drive(stripe, path, mirror) for stripe, (path, mirror) in enumerate(pairs)]
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
                drive.note_news()
                drive.settle()

    def found_bad(self, stripe: int, text: str) -> None:
        """A place of this stripe or of its mirror does not hold what was written; `text` names it as the core's errors
        do."""
        with self._lock:
            drive = self._drives[stripe]
            drive.copy_of(text).note(text)
            drive.settle()

    def bad_places(self) -> list[BadPlace]:
        """Every place that is known to be bad. A stripe that the core does not trust has one at least."""
        with self._lock:
            found = []
            for drive in self._drives:
                texts = list(drive.copy.places.values()) or list(filter(None, [drive.core_error()]))
                found += [BadPlace(drive.stripe, text) for text in texts]
                if drive.mirror is not None:
                    found += [BadPlace(drive.stripe, text, mirror=True) for text in drive.mirror.places.values()]
            return found

    def healed(self, stripe: int, mirror: bool = False) -> None:
        """Every known bad place of this stripe, or of its mirror, has been read and was right. The core's own verdict
        on a stripe stays until an update."""
        with self._lock:
            drive = self._drives[stripe]
            copy = drive.mirror if mirror else drive.copy
            assert copy is not None
            copy.clear()
            drive.settle()

    def views(self) -> list[DriveView]:
        """The drives by number; empty until the core has been looked at."""
        with self._lock:
            return [
                DriveView(
                    drive.stripe,
                    drive.copy.path,
                    drive.counters,
                    drive.rate(),
                    drive.copy.degraded,
                    drive.mirror.path if drive.mirror else None,
                    drive.mirror.degraded if drive.mirror else "",
                )
                for drive in self._drives
                if drive.counters is not None
            ]

    def remarks(self) -> list[str]:
        """One text for each drive that is degraded."""
        with self._lock:
            copies = [copy for drive in self._drives for copy in drive.copies()]
            return [f"drive {copy.name}: {copy.degraded}" for copy in copies if copy.degraded]
