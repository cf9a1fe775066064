"""How far a pack is: a bar with bytes, rate and ETA on a terminal, a plain line now and then elsewhere.

Only counts and prints, to standard error; standard output is for results.
"""

import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from colibri.packer.wording import done_text, size_text

PLAIN_SECONDS = 10.0


class Reporter(Protocol):
    """What the packer tells while it works."""

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""

    def skip(self, count: int) -> None:
        """`count` bytes were done before: they count as done, not for the rate."""

    def note(self, text: str) -> None:
        """Say something worth a line."""


class Silent:
    """Tells nothing."""

    def advance(self, count: int) -> None:
        """Nothing."""

    def skip(self, count: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Bar:
    """A live bar from the first byte on; a context manager. One that does not get to its end leaves a line instead."""

    def __init__(self, what: str, total: int, stream: TextIO) -> None:
        self._what, self._total, self._done = what, total, 0
        self._console = Console(file=stream)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(what, total=total)

    def advance(self, count: int) -> None:
        """Move the bar."""
        self._done += count
        self._progress.start()
        self._progress.advance(self._task, count)

    def skip(self, count: int) -> None:
        """Move bar and end alike, so that the rate is that of this run."""
        self._done = count
        self._progress.start()
        self._progress.reset(self._task, completed=count)

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._progress.live.is_started:
            return
        cut = self._done < self._total
        if cut:
            self._progress.update(self._task, visible=False)
        self._progress.stop()
        if cut:
            self.note(_cut_text(self._what, self._done, self._total))


class Lines:
    """A line every ten seconds, and one at the end if anything was done; a context manager."""

    def __init__(self, what: str, total: int, stream: TextIO) -> None:
        self._what = what
        self._total = total
        self._stream = stream
        self._done = 0
        self._skipped = 0
        self._began = False
        self._begin = self._printed = time.monotonic()

    def advance(self, count: int) -> None:
        """Count, and print if the last line is old enough."""
        self._began = True
        self._done += count
        if time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._print()

    def skip(self, count: int) -> None:
        """Count without counting for the rate."""
        self._began = True
        self._done += count
        self._skipped += count

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    def _print(self) -> None:
        self._printed = time.monotonic()
        seconds = max(1e-9, self._printed - self._begin)
        rate = (self._done - self._skipped) / seconds
        eta = f", {(self._total - self._done) / rate:.0f} s left" if rate and self._done < self._total else ""
        self.note(f"{self._what}: {done_text(self._done, self._total)}, {size_text(rate)}/s{eta}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._began and self._done < self._total:
            self.note(_cut_text(self._what, self._done, self._total))
        elif self._began and kind is None:
            self._print()


def _cut_text(what: str, done: int, total: int) -> str:
    return f"{what}: ended at {done_text(done, total)}"


def reporter(what: str, total: int, stream: TextIO) -> Bar | Lines:
    """Return the reporter that suits the stream."""
    return Bar(what, total, stream) if stream.isatty() else Lines(what, total, stream)
