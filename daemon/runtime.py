"""The real model, store and engine behind the server: opens, loads, starts and ends them, in the only order that works.

The state folder is opened first, for its lock: a second daemon must be refused before it allocates anything.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import numpy as np

from colibri.core import core
from colibri.core.errors import CoreError, NoMemoryError, StorageError
from colibri.daemon.config import Config
from colibri.daemon.core_errors import daemon_error
from colibri.daemon.core_model import CoreModel
from colibri.daemon.drive_care import DriveCare
from colibri.daemon.drives import Drives, DriveView
from colibri.daemon.engine import Engine, EngineOptions, page_identity
from colibri.daemon.engine_api import EngineApi
from colibri.daemon.engine_loop import NoUpkeep, Upkeep
from colibri.daemon.errors import StoreError
from colibri.daemon.generation import LoopWake
from colibri.daemon.heat_file import Heat, HeatFile
from colibri.daemon.journal import WEAK_VERIFY, fields_of
from colibri.daemon.learned_pins import LearnedPins
from colibri.daemon.lookahead import lookahead_message
from colibri.daemon.lost_files import LostFiles
from colibri.daemon.machine import anonymous_bytes
from colibri.daemon.opening import EXIT_CONFIG, EXIT_TEMPORARY, Opened, StartError, pins_wanted
from colibri.daemon.recording import Recording
from colibri.daemon.scrub_file import ScrubFile
from colibri.daemon.stats import RuntimeView
from colibri.daemon.store.folder import StateFolder
from colibri.daemon.store.store import SessionStore
from colibri.daemon.store.writer import Durability

log = logging.getLogger("colibri.daemon.runtime")

MIB = 1 << 20


def buffered_remark(direct: str, drives: Sequence[DriveView]) -> str:
    """What to say about stripes that nobody asked to read through the page cache, "" if all is as asked."""
    buffered = [str(drive) for drive in drives if not drive.counters.direct]
    if direct != "auto" or not buffered:
        return ""
    return f"the file system refuses O_DIRECT: experts are read through the page cache from {', '.join(buffered)}"


def verify_remark(verify: str) -> str:
    """What to say about a weaker check of experts than the full one, "" for that."""
    if verify == "first":
        return "experts are checked only when they are read for the first time (verify = first)"
    return "experts are not checked at all (verify = never)" if verify == "never" else ""


def heat_bytes(heat: Heat) -> bytes:
    """One byte per expert, 255 for the hottest of all; zeros while nothing is hot."""
    most = float(heat.max(initial=0.0))
    scaled = np.rint(heat * (255 / most if most else 0.0)).astype(np.uint8)
    return bytes(scaled)


class CoreRuntime:
    """Implements server.Runtime. Made before anything is allocated; raises StartError if the state folder is taken."""

    def __init__(self, config: Config, opened: Opened) -> None:
        self._config = config
        self._opened = opened
        self._model: core.Model | None = None
        self._engine: Engine | None = None
        self._store: SessionStore | None = None
        self._drives = Drives(opened.container.stripe_paths, mirrors=opened.container.mirror_paths)
        self._lost = LostFiles(opened.container, config.stripes)
        self._care: DriveCare | None = None
        self._pins: LearnedPins | None = None
        self._recording: Recording | None = None
        self._buffered = ""
        self._not_reopened = ""  # any thread
        try:
            self._folder = StateFolder(config.state, opened.container.content_id, opened.facts.name)
        except StoreError as error:
            raise StartError(str(error), EXIT_TEMPORARY if "pid" in error.metadata else EXIT_CONFIG) from error

    def load(self) -> None:
        """Allocates and touches all memory, then reads the dense weights. Raises StartError."""
        try:
            self._model = core.Model(self._opened.container, self._opened.options)
            self._model.load()
        except (StorageError, NoMemoryError) as error:
            raise StartError(f"the model cannot be loaded: {error}", EXIT_TEMPORARY) from error
        except CoreError as error:
            raise StartError(f"the model cannot be loaded: {error}") from error
        self._drives.update(self._model.drive_stats())
        self._buffered = buffered_remark(self._config.direct, self._drives.views())
        if self._buffered:
            log.warning("%s", self._buffered)
        if remark := verify_remark(self._config.verify):
            log.warning("%s", remark, extra=fields_of("weak-verify", WEAK_VERIFY))

    def look(self) -> RuntimeView:
        table, lookahead, read = self._opened.table, None, 0
        if self._engine is not None:
            assert self._model is not None
            self._drives.update(self._model.drive_stats())
            stats = self._model.stats()
            lookahead, read = lookahead_message(self._opened.options.lookahead, stats), stats.expert_bytes
        fraction = self._care.fraction if self._care is not None else None
        warming = self._pins is not None and self._pins.warming
        doing = [f"reading hot experts ahead, {self._warmed() / MIB:,.0f} MiB by now"] if warming else []
        if fraction is not None:
            doing.append(f"scrub {fraction:.0%} done")
        return RuntimeView(
            drives=self._drives.views(),
            remarks=self._remarks(),
            doing=tuple(doing),
            planned_bytes=table.planned,
            experts=table.experts,
            expert_slots=table.expert_slots,
            warming=warming,
            scrub_fraction=fraction,
            lookahead=lookahead,
            expert_read_bytes=read,
        )

    def _warmed(self) -> int:
        """Bytes of experts read since the start; until the first request, all of them ahead of it."""
        return sum(drive.counters.read_bytes for drive in self._drives.views())

    def _remarks(self) -> tuple[str, ...]:
        if self._engine is None:
            return ()
        care = self._care.failure if self._care is not None else ""
        pins = self._pins.failure if self._pins is not None else ""
        trace = self._recording.failure if self._recording is not None else ""
        lost = (
            *self._lost.remarks(),
            self._not_reopened,
            self._buffered,
            verify_remark(self._config.verify),
        )
        return (*filter(None, (*lost, care, pins, trace)), *self._drives.remarks())

    def expert_heat(self) -> bytes:
        assert self._engine is not None
        assert self._model is not None
        model, found = self._model, list[Heat]()
        try:
            self._engine.between_steps(lambda: found.append(model.export_heat()))
        except CoreError:
            return b""  # the daemon stops: the model is closed
        return heat_bytes(found[0])

    def session_bytes(self) -> int:
        return self._folder.session_bytes()

    def reload(self) -> None:
        try:
            self._reopen()
        except CoreError as error:
            raise daemon_error(error) from error
        finally:
            if self._care is not None:
                self._care.retry_now()
            if lost := self._opened.container.warnings:
                log.warning("reload: what was lost at the start is used again after a restart: %s", "; ".join(lost))

    def _reopen(self) -> None:
        """Raises CoreError for the first stripe that cannot be opened, and remembers it until all of them can be; the
        others are tried all the same. The daemon goes on reading the file that it has."""
        assert self._engine is not None
        assert self._model is not None
        try:
            self._engine.between_steps(self._model.reopen_stripes)
            self._not_reopened = ""
        except CoreError as error:
            self._not_reopened = f"a stripe cannot be opened again, reload or restart once it is back: {error}"
            raise
        finally:
            self._drives.update(self._model.drive_stats())

    def load_progress(self) -> tuple[int, int]:
        if self._model is None:
            return 0, self._opened.dense_bytes
        stats = self._model.stats()
        return stats.load_bytes_done, stats.load_bytes_total

    def start(self, wake: LoopWake) -> EngineApi:
        """Raises StartError."""
        assert self._model is not None
        model = CoreModel(self._model, self._opened.options, self._opened.container.content_id)
        options = EngineOptions(max_queue=self._config.queue_limit, retain_seconds=self._config.retention)
        try:
            durability = cast(Durability, self._config.fsync)  # checked by config.py
            self._store = SessionStore(self._folder, page_identity(model), self._opened.facts.name, durability)
            self._engine = Engine(model, self._store, options, wake, self._make_upkeep(self._model))
        except StoreError as error:
            raise StartError(str(error)) from error
        self._engine.start()
        self._care = self._make_care(self._engine)
        self._care.start()
        return self._engine

    def _make_upkeep(self, model: core.Model) -> Upkeep:
        """What the engine's thread does beside the generations. Raises StartError."""
        table, upkeep = self._opened.table, cast(Upkeep, NoUpkeep())
        if pins_wanted(self._config.pins, table.expert_slots, table.experts):
            folder, content = self._folder, self._opened.container.content_id
            self._pins = LearnedPins(model, HeatFile(folder.root, folder.quarantine, content, table.experts))
            self._pins.begin()
            upkeep = self._pins
        if self._config.trace is None:
            return upkeep
        recording = Recording(model, self._config.trace, upkeep)
        try:
            recording.begin()
        except (CoreError, OSError) as error:
            raise StartError(f"trace {recording.path}: {error}") from error
        self._recording = recording
        return recording

    def _make_care(self, engine: Engine) -> DriveCare:
        steps = 0

        def busy() -> bool:
            """Also if something ran and ended since the last look."""
            nonlocal steps
            stats = engine.stats()
            before, steps = steps, stats.steps
            return stats.running + stats.queued > 0 or steps != before

        container = self._opened.container
        file = ScrubFile(self._folder.root, container.manifest.layout.uuid, len(container.stripe_paths))
        rate = self._config.scrub * 1e6
        return DriveCare(container, self._drives, file, rate, busy, self._reopen, look_for_lost=self._lost.look)

    def work_done(self) -> int:
        """The core's work items; before the engine runs, bytes of memory touched and of weights read: with a big
        arena the touching alone takes minutes."""
        if self._engine is None:
            return anonymous_bytes() + self.load_progress()[0]
        assert self._model is not None
        return self._model.stats().heartbeat

    def failure(self) -> BaseException | None:
        return self._engine.failure if self._engine is not None else None

    def close(self) -> None:
        """After the engine has drained. Writes what is queued and gives everything back."""
        if self._care is not None:
            self._care.close()
        if self._pins is not None:
            self._pins.close()
        if self._recording is not None:
            self._recording.stop()
        if self._store is not None:
            self._store.close()
        else:
            self._folder.close()
        if self._model is not None:
            self._model.close()
