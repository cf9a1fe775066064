"""Learned pins: what routing taught the cache outlives the daemon.

Owns when heat is taken from the model, stored and given back. At the start it is imported before the first step; then,
in moments in which nothing runs, the model reads its hottest experts piece by piece, so that READY waits for none of
it and a request waits for one piece at most. Between steps it is exported every few minutes, and at the end; the file
is written by a thread of its own. Used on the engine's thread, but for what says otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from colibri.core.errors import CoreError
from colibri.daemon.heat_file import Heat, HeatFile

log = logging.getLogger("colibri.daemon.pins")

EXPORT_SECONDS = 300.0
WARM_BUDGET_US = 10_000  # a piece of warming up: what a request may have to wait for it


class HeatPort(Protocol):
    """What the model offers; between steps only."""

    def export_heat(self) -> Heat: ...
    def import_heat(self, heat: Heat) -> None: ...
    def warm(self, budget_us: int) -> bool:
        """Reads absent experts, hottest first, for about `budget_us`; whether there is more to read."""


class LearnedPins:
    """Implements engine_loop.Upkeep. `clock` is in seconds and never goes back."""

    def __init__(
        self,
        model: HeatPort,
        file: HeatFile,
        every: float = EXPORT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._file = model, file
        self._every, self._clock = every, clock
        self._exported_at = clock()
        self._learned = False  # something since the last export
        self._warming = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="heat")
        self._written: Future[None] | None = None
        self._failure = ""

    @property
    def warming(self) -> bool:
        """Whether experts are still to be read ahead; any thread."""
        return self._warming

    @property
    def failure(self) -> str:
        """Why heat is not being stored, "" while it is; any thread."""
        return self._failure

    def begin(self) -> None:
        """Before the engine starts, on whatever thread starts it. Heat that the model refuses is not used."""
        heat = self._file.load()
        if heat is not None and heat.any():
            try:
                self._model.import_heat(heat)
            except CoreError as error:
                log.warning("%s is not used: %s; pins are learned anew", self._file.path, error)
                return
            self._warming = True
            log.info("pins: heat of %d experts taken over from %s", int((heat > 0).sum()), self._file.path)

    def stepped(self) -> None:
        self._learned = self._warming = True
        if self._clock() - self._exported_at >= self._every:
            self._export()

    def idle(self) -> float | None:
        if self._warming:
            self._warming = self._model.warm(WARM_BUDGET_US)
        if self._warming:
            return 0.0
        return max(0.0, self._exported_at + self._every - self._clock()) if self._export_if_due() else None

    def end(self) -> None:
        if self._learned:
            self._export()

    def close(self) -> None:
        """Waits until what was exported is stored."""
        self._writer.shutdown()

    def _export_if_due(self) -> bool:
        """Whether an export is still to come."""
        if self._learned and self._clock() - self._exported_at >= self._every:
            self._export()
        return self._learned

    def _export(self) -> None:
        self._exported_at = self._clock()
        if self._written is not None and not self._written.done():
            return  # the drive is slower than we learn; the next one has it all
        self._learned = False
        self._written = self._writer.submit(self._save, self._model.export_heat())

    def _save(self, heat: Heat) -> None:
        try:
            self._file.save(heat)
        except OSError as error:
            if not self._failure:
                log.warning("%s cannot be written: %s; learned pins are not kept", self._file.path, error)
            self._failure = f"learned pins are not stored: {error.strerror or error}"
        else:
            self._failure = ""
