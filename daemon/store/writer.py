"""The thread that writes token logs and KV pages, so that no decode step ever waits for a drive.

Owns the order of writes: records of token logs first, synced before they are called durable; KV pages and everything
else behind them, one piece at a time. But a record waits for the pages that its session queued before it: whoever is
killed leaves a log that is never far ahead of its pages. A page is only written here, which is quick; syncer.py brings
it to the drive. Owns what a failed write means: a full disk keeps the records and tries again
with the next ones; after any other error the log is never written again, because after a failed fsync nobody knows what
is on the drive. The folder's layout belongs to store.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from colibri.daemon.store.files import write_all
from colibri.daemon.store.token_log import Chain, Kind, encode_tokens

log = logging.getLogger("colibri.daemon.store")

Durability = Literal["token", "turn", "off"]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Entry:
    """One record to append: token ids for INPUT and SAMPLED, a ready payload for the others."""

    kind: Kind
    tokens: tuple[int, ...] = ()
    payload: bytes = b""


@dataclass(frozen=True)
class AppendResult:
    """`position`: committed tokens up to which the log now reaches. `durable`: synced; else only written. `error`: why
    it is not even written, "" if it is."""

    position: int
    durable: bool
    error: str


@dataclass
class LogFile:
    """The writing end of one session's log. Its fields are the writer thread's; others only read the plain ones."""

    path: Path
    chain: Chain
    bytes: int  # valid bytes in the file
    position: int  # tokens written
    durable_position: int
    backlog: bytearray = field(default_factory=bytearray)  # records that a full disk did not take
    error: str = ""
    broken: bool = False  # never to be written again by this process
    pages_queued: int = 0
    pages_done: int = 0  # written, or given up


@dataclass(frozen=True)
class _Append:
    file: LogFile
    entries: list[Entry]
    position: int
    commit: bool
    on_result: Callable[[AppendResult], None]
    behind: int  # pages of its session that go first

    @property
    def ready(self) -> bool:
        return self.file.pages_done >= self.behind


@dataclass(frozen=True)
class _Job:
    run: Callable[[], None]
    bytes: int = 0
    file: LogFile | None = None  # the log of the session whose page this is


class Writer:
    """`max_page_bytes` bounds the pages that wait; `has_room` tells whether another may be queued."""

    def __init__(self, durability: Durability, max_page_bytes: int) -> None:
        self._durability = durability
        self._max_page_bytes = max_page_bytes
        self._appends: deque[_Append] = deque()
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    # ---- any thread

    def append(
        self,
        file: LogFile,
        entries: list[Entry],
        position: int,
        commit: bool,
        on_result: Callable[[AppendResult], None],
    ) -> None:
        """Appends records after which the session has `position` tokens, behind the pages it queued before. `commit`:
        the end of a turn. `on_result` is called on the writer thread, in order."""
        with self._changed:
            self._check_open()
            self._appends.append(_Append(file, entries, position, commit, on_result, file.pages_queued))
            self._changed.notify_all()

    def submit(self, run: Callable[[], None]) -> None:
        """Runs `run` behind all that was queued before; it reports its own errors."""
        with self._changed:
            self._check_open()
            self._jobs.append(_Job(run))
            self._changed.notify_all()

    def submit_page(self, file: LogFile, run: Callable[[], None], size: int) -> None:
        """Likewise a page of `size` bytes, of the session with this log: `run` writes it, without a sync."""
        with self._changed:
            self._check_open()
            file.pages_queued += 1
            self._jobs.append(_Job(run, size, file))
            self._waiting_bytes += size
            self._changed.notify_all()

    def has_room(self, size: int) -> bool:
        with self._changed:
            return self._waiting_bytes == 0 or self._waiting_bytes + size <= self._max_page_bytes

    def flush(self) -> None:
        """Waits until everything queued so far, and what follows from it, is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._appends or self._jobs or self._busy))

    def close(self) -> None:
        """Finishes what is queued and ends the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _check_open(self) -> None:
        if self._stopping:
            raise RuntimeError("the store is closed")

    # ---- the writer thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._appends or self._jobs or self._stopping)
                if not (self._appends or self._jobs):
                    return
                self._busy = True
                appends = [append for append in self._appends if append.ready]
                self._appends = deque(append for append in self._appends if not append.ready)
                job = self._jobs.popleft() if self._jobs else None
            self._guarded(functools.partial(self._write_logs, appends))
            if job is not None:
                self._guarded(job.run)
                with self._changed:
                    self._waiting_bytes -= job.bytes
                    if job.file is not None:
                        job.file.pages_done += 1

    @staticmethod
    def _guarded(work: Callable[[], None]) -> None:
        """A defect in one session's write must not end the thread that all others need."""
        try:
            work()
        except Exception:
            log.critical("the store's writer met an unexpected error", exc_info=True)

    def _write_logs(self, appends: list[_Append]) -> None:
        by_file: dict[int, list[_Append]] = {}
        for append in appends:
            by_file.setdefault(id(append.file), []).append(append)
        for group in by_file.values():
            try:
                self._write_log(group[0].file, group)
            except Exception as error:
                _give_up(group[0].file, group, error)

    def _write_log(self, file: LogFile, group: list[_Append]) -> None:
        """All that waits for one log in one write and at most one sync."""
        sync = self._durability == "token" or (self._durability == "turn" and any(a.commit for a in group))
        for entry in _merged(group):
            payload = encode_tokens(list(entry.tokens)) if entry.tokens else entry.payload
            file.backlog += file.chain.encode(entry.kind, payload)
        written = append_backlog(file, sync)
        if written:
            file.position = group[-1].position
            if sync:
                file.durable_position = file.position
        for append in group:
            position = append.position if written else file.position
            append.on_result(AppendResult(position, written and sync, file.error))


def _give_up(file: LogFile, group: list[_Append], error: Exception) -> None:
    """An error that nobody foresaw ends this log alone, and whoever waits for it is told: a turn must not wait for
    ever, and the other sessions' records are written all the same."""
    log.critical("%s: the token log cannot be written", file.path, exc_info=error)
    file.broken = True
    file.error = f"{file.path.name}: {error!r}"
    for append in group:
        append.on_result(AppendResult(file.position, False, file.error))


def _merged(group: list[_Append]) -> list[Entry]:
    """Neighbouring sampled tokens become one record: while a sync ran, several may have come."""
    merged: list[Entry] = []
    for entry in (entry for append in group for entry in append.entries):
        if entry.kind == Kind.SAMPLED and merged and merged[-1].kind == Kind.SAMPLED:
            merged[-1] = Entry(Kind.SAMPLED, merged[-1].tokens + entry.tokens)
        else:
            merged.append(entry)
    return merged


def append_backlog(file: LogFile, sync: bool) -> bool:
    """Writes what waits for this log; whether all of it is in the file (and synced, if asked). Sets file.error."""
    if file.broken:
        return False
    try:
        fd = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        return _refused(file, error)
    try:
        try:
            # A copy: whoever keeps the error keeps a view of what was written, and the backlog must be able to grow.
            write_all(fd, bytes(file.backlog), file.bytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # a piece that stays is a torn tail, which reading cuts off
                os.ftruncate(fd, file.bytes)
            return _refused(file, error)
        if sync:
            os.fdatasync(fd)
    except OSError as error:
        file.broken = True
        return _refused(file, error)
    finally:
        try:
            os.close(fd)
        except OSError as error:
            file.broken = True
            _refused(file, error)
    if file.broken:
        return False
    file.bytes += len(file.backlog)
    file.backlog.clear()
    file.error = ""
    return True


def _refused(file: LogFile, error: OSError) -> bool:
    if error.errno not in DISK_FULL:
        file.broken = True
    if not file.error:
        log.error("%s: the token log cannot be written: %s", file.path, error)
    file.error = f"{file.path.name}: {error.strerror or error}"
    return False
