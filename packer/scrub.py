"""`colibri-pack scrub`: one pass of colibri.core.scrub over a container at a bounded rate, for a drive that serves.

Verify reads as fast as it can and everything; a scrub leaves the drives to others and looks at stripes and mirrors.
"""

import time
from collections.abc import Callable
from pathlib import Path

from colibri.core.container import open_container
from colibri.core.scrub import Finding, Scrub
from colibri.packer.progress import Reporter


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


def scrub(primary: Path, stripes: list[Path], pace: Pace, reporter: Reporter) -> tuple[list[Finding], list[str], int]:
    """Read every extent; return what was found, what the container lacks, and how many bytes were read.

    Raises ContainerError for a container that cannot be opened.
    """
    found = []
    with open_container(primary, stripes) as container, Scrub(container) as steps:
        for warning in container.warnings:
            reporter.note(f"warning: {warning}")
        for step in steps:
            if step.finding is not None:
                found.append(step.finding)
                reporter.note(str(step.finding))
            reporter.advance(step.bytes)
            pace.spend(step.bytes)
        return found, container.warnings, steps.done_bytes
