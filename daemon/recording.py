"""A recording of the routing of a running daemon (`trace`), for `colibrid trace replay`.

Owns where it is written (a new file each time, so that a restart overwrites nothing) and when it begins and ends. A
recording that fails ends alone: generations go on, and the status says so. Used on the engine's thread, but for what
says otherwise.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from colibri.core.errors import CoreError, StorageError
from colibri.daemon.engine_loop import Upkeep

log = logging.getLogger("colibri.daemon.trace")

LOOK_SECONDS = 1.0


class TracePort(Protocol):
    """What the model offers; between steps only."""

    def trace(self, path: Path | None) -> None: ...
    def trace_error(self) -> Exception | None: ...


def free_path(path: Path) -> Path:
    """`path`, or the first of path.1, path.2 ... that is not there."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(1)))
    return next(name for name in names if not name.is_symlink() and not name.exists())


class Recording:
    """Implements engine_loop.Upkeep around another. `clock` is in seconds and never goes back."""

    def __init__(
        self, model: TracePort, wanted: Path, inner: Upkeep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model, self._inner, self._clock = model, inner, clock
        self._wanted = wanted
        self._running = False
        self._looked_at = clock()
        self._unseen = False  # steps since the last look, whose blocks may still be on their way to the drive
        self.path = wanted
        self.failure = ""  # any thread

    def begin(self) -> None:
        """Before the engine starts, on whatever thread starts it.

        Raises CoreError, OSError where no file can be made; a drive that is full or fails is no reason not to serve.
        """
        self.path = free_path(self._wanted)
        try:
            self._model.trace(self.path)
        except StorageError as error:
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                raise
            self._fail(error)
            return
        self._running = True
        log.info("routing is recorded in %s", self.path)

    def stepped(self) -> None:
        self._inner.stepped()
        self._unseen = self._running
        self._look()

    def idle(self) -> float | None:
        wait = self._inner.idle()
        self._look()
        if not self._unseen:
            return wait
        mine = max(0.0, self._looked_at + LOOK_SECONDS - self._clock())
        return mine if wait is None else min(wait, mine)

    def _look(self) -> None:
        if self._unseen and self._clock() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._clock()
            self._unseen = False
            self._fail(self._model.trace_error())

    def end(self) -> None:
        self._inner.end()
        self.stop()

    def stop(self) -> None:
        """Writes the end; once is enough. After the engine's thread has ended, from any thread."""
        if not self._running:
            return
        self._running = self._unseen = False
        try:
            self._model.trace(None)
        except CoreError as error:
            self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        if error is not None and not self.failure:
            self.failure = f"the recording of routing has ended: {error}"
            log.error("%s", self.failure)
