"""`colibri-pack scrub`: one pass of colibri.core.scrub over a container at a bounded rate, for a drive that serves.

Verify reads as fast as it can and everything; a scrub leaves the drives to others and looks at stripes and mirrors.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from colibri.core.container_folders import ContainerFolders
from colibri.core.direct_file import DirectFile
from colibri.core.scrub import Finding, Scrub
from colibri.packer.check_records import check_record, layer_records
from colibri.packer.progress import Reporter
from colibri.packer.remains import Remains


class Pace:
    """Sleeps so that bytes come no faster than `rate` per second; 0 is no bound."""

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._due = clock()

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes are due. Time in which nothing was read is not made up for."""
        if self._rate:
            now = self._clock()
            self._due = max(self._due, now) + count / self._rate
            self._sleep(self._due - now)


@dataclass
class Scrubbing:
    """What a scrub found.

    `findings` are extents that do not hold what was written, `faults` what is damaged or lost beyond single extents,
    `warnings` what is lost and can be done without.
    """

    faults: list[str]
    warnings: list[str]
    findings: list[Finding] = field(default_factory=list)
    read_bytes: int = 0

    @property
    def told(self) -> list[str]:
        """All of it, a line each; empty if the container is in order."""
        return [*self.faults, *self.warnings, *map(str, self.findings)]


def scrub(primary: Path, stripes: list[Path], pace: Pace, reporter: Reporter) -> Scrubbing:
    """Read every extent that is left, of damaged and incomplete containers too.

    Raises ContainerError where there is no manifest to check against, or a lock is held.
    """
    with ContainerFolders(primary, stripes, partial=True) as folders:
        remains = Remains(folders)
        done = Scrubbing(remains.faults, remains.warnings)
        for text in (*done.faults, *(f"warning: {text}" for text in done.warnings)):
            reporter.note(text)
        work = _by_records if remains.extent_crcs is None else _by_extents
        for count in work(remains, done, reporter):
            done.read_bytes += count
            reporter.advance(count)
            pace.spend(count)
        return done


def _by_extents(remains: Remains, done: Scrubbing, reporter: Reporter) -> Iterator[int]:
    """Read extent by extent; give the bytes of each."""
    with Scrub(remains) as steps:
        for step in steps:
            if step.finding is not None:
                done.findings.append(step.finding)
                reporter.note(str(step.finding))
            yield step.bytes


def _by_records(remains: Remains, done: Scrubbing, reporter: Reporter) -> Iterator[int]:
    """Read record by record, where the extents' CRC-32Cs are lost; give the bytes of each."""
    with ExitStack() as stack:
        files: dict[Path, DirectFile] = {}

        def read(path: Path, offset: int, count: int) -> Iterator[memoryview]:
            if path not in files:
                files[path] = stack.enter_context(DirectFile(path))
            return files[path].pieces(offset, count)

        for records in layer_records(remains):
            for record in records:
                checked = check_record(record, remains.copies, read)
                done.faults += checked.faults
                for text in checked.faults:
                    reporter.note(text)
                yield checked.bytes
