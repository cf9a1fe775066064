"""The real model, store and engine behind the server: opens, loads, starts and ends them, in the only order that works.

The state folder is opened first, for its lock: a second daemon must be refused before it allocates anything.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from colibri.core import core
from colibri.core.errors import CoreError, NoMemoryError, StorageError
from colibri.daemon.config import Config
from colibri.daemon.core_model import CoreModel
from colibri.daemon.engine import Engine, EngineOptions, page_identity
from colibri.daemon.engine_api import EngineApi
from colibri.daemon.errors import StoreError
from colibri.daemon.generation import LoopWake
from colibri.daemon.machine import anonymous_bytes
from colibri.daemon.opening import EXIT_CONFIG, EXIT_TEMPORARY, Opened, StartError
from colibri.daemon.stats import RuntimeView
from colibri.daemon.store.folder import StateFolder
from colibri.daemon.store.store import SessionStore
from colibri.daemon.store.writer import Durability

log = logging.getLogger("colibri.daemon.runtime")


def buffered_names(stats: core.ModelStats, stripes: Sequence[Path]) -> list[str]:
    """The stripes that are read through the page cache. `stripes`: their files, by number."""
    named = [f"stripe {i} ({path})" for i, path in enumerate(stripes) if stats.buffered_stripes >> i & 1]
    return named or ([] if stats.direct_active else ["a stripe after the 64th"])


def buffered_remark(direct: str, buffered: Sequence[str]) -> str:
    """What to say about `buffered` stripes that nobody asked to read through the page cache, "" if all is as asked."""
    if direct != "auto" or not buffered:
        return ""
    return f"the file system refuses O_DIRECT: experts are read through the page cache from {', '.join(buffered)}"


def faults_remark(read_errors: int, checksum_errors: int) -> str:
    """How many reads of experts have failed since the start, "" if none has."""
    if not read_errors and not checksum_errors:
        return ""
    return f"since the start {read_errors} failed reads and {checksum_errors} failed checksums of experts"


class CoreRuntime:
    """Implements server.Runtime. Made before anything is allocated; raises StartError if the state folder is taken."""

    def __init__(self, config: Config, opened: Opened) -> None:
        self._config = config
        self._opened = opened
        self._model: core.Model | None = None
        self._engine: Engine | None = None
        self._store: SessionStore | None = None
        self._buffered = ""
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
        buffered = buffered_names(self._model.stats(), self._opened.container.stripe_paths)
        self._buffered = buffered_remark(self._config.direct, buffered)
        if self._buffered:
            log.warning("%s", self._buffered)

    def look(self) -> RuntimeView:
        table = self._opened.table
        remarks: tuple[str, ...] = ()
        if self._engine is not None:
            assert self._model is not None
            stats = self._model.stats()
            remarks = tuple(filter(None, (self._buffered, faults_remark(stats.read_errors, stats.checksum_errors))))
        return RuntimeView(
            remarks=remarks,
            planned_bytes=table.planned,
            experts=table.experts,
            expert_slots=table.expert_slots,
        )

    def expert_heat(self) -> bytes:
        return b""

    def session_bytes(self) -> int:
        return self._folder.session_bytes()

    def reload(self) -> None:
        pass

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
            self._engine = Engine(model, self._store, options, wake)
        except StoreError as error:
            raise StartError(str(error)) from error
        self._engine.start()
        return self._engine

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
        if self._store is not None:
            self._store.close()
        else:
            self._folder.close()
        if self._model is not None:
            self._model.close()
