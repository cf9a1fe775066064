"""The few file operations on which durability rests, each with the fsync that it needs.

Owns whole-file writes that appear under their name only when complete, directory syncs, bounded reads, and the
quarantine folder. Every error of the operating system leaves here as OSError with the path in it; none is swallowed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from pathlib import Path

log = logging.getLogger("colibri.daemon.store")

TEMPORARY = ".tmp-"
DELETED = ".deleted-"


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, however short the single writes are."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def read_all(path: Path, limit: int) -> bytes:
    """The whole file. Raises OSError if it is longer than `limit` bytes: a file is hostile until checked."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise OSError(f"{path}: {size} bytes where at most {limit} were expected")
        pieces = []
        while piece := os.read(fd, max(size, 4096)):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Makes creations, renames and removals in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Creates one folder below an existing one, durably; fine if it is there."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def write_new(path: Path, *parts: bytes | memoryview, sync: bool = True) -> None:
    """Writes and syncs a file that does not exist yet; on an error nothing of it is left. Without `sync` a power cut
    may leave anything of it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            offset = 0
            for part in parts:
                write_all(fd, part, offset)
                offset += len(part)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Replaces `path` by these bytes: whoever looks sees the old file or the whole new one, also after a power cut."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    write_new(temporary, *parts)
    os.rename(temporary, path)
    sync_folder(path.parent)


class Quarantine:
    """Keeps what failed a check, with the reason beside it. Pages can be computed again, so only the newest
    `max_pages` of them stay; logs are never removed."""

    def __init__(self, folder: Path, max_pages: int = 16) -> None:
        self.folder = folder
        self._max_pages = max_pages
        make_folder(folder)

    def copy(self, path: Path, data: bytes, reason: str) -> Path:
        """Keeps a copy of `data`, which was read from `path`."""
        target = self._target(path)
        write_atomic(target, data)
        self._explain(target, path, reason)
        return target

    def move(self, path: Path, reason: str) -> Path:
        """Takes the file itself away, so that a retry cannot meet it again."""
        target = self._target(path)
        os.rename(path, target)
        sync_folder(path.parent)
        self._explain(target, path, reason)
        self._trim()
        return target

    def _target(self, path: Path) -> Path:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return self.folder / f"{stamp}-{secrets.token_hex(4)}-{path.parent.name}-{path.name}"

    def _explain(self, target: Path, path: Path, reason: str) -> None:
        log.error("quarantined %s as %s: %s", path, target.name, reason)
        note = {"file": str(path), "reason": reason, "time": time.time()}
        write_atomic(target.with_name(target.name + ".reason.json"), json.dumps(note, indent=1).encode())

    def _trim(self) -> None:
        pages = sorted(self.folder.glob("*.kvp"))
        for page in pages[: -self._max_pages]:
            log.warning("quarantine holds more than %d pages; removing %s", self._max_pages, page.name)
            page.unlink(missing_ok=True)
            page.with_name(page.name + ".reason.json").unlink(missing_ok=True)
