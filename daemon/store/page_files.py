"""The files of KV pages: written at once, made durable afterwards, believed only when checked.

Owns how a page comes under its name, from where it goes on to the drive, and how it leaves. A page is written whole
before it has its name, so that whoever is killed leaves no half page; it is synced later, so that nobody waits. A power
cut in between can leave a page with its name and without its bytes: the checksums tell. A page file is writable by its
owner until its bytes were synced and read-only from then on. That bit is set after the sync, so it never promises too
much; a page without it is checked before anything is built on its being there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import threading
from pathlib import Path

from colibri.daemon.store import files
from colibri.daemon.store.folder import KV_FOLDER, StateFolder
from colibri.daemon.store.pages import BadPageError, PageIdentity, PageName, decode_page, encode_header

log = logging.getLogger("colibri.daemon.store")

SYNCED_MODE = 0o400


class PageFiles:
    """The shared pages of one state folder and the sessions' links to them. Any thread may call. `lock`: while somebody
    looks for a shared page and links it, nobody removes it."""

    def __init__(self, folder: StateFolder, identity: PageIdentity) -> None:
        self._folder, self._identity = folder, identity
        self._lock = threading.Lock()
        self._written: set[str] = set()  # by this process, and not synced yet
        self._failed: set[int] = set()  # inodes whose sync failed: a second one would succeed and mean nothing

    @staticmethod
    def link(session: Path, name: PageName) -> Path:
        return session / KV_FOLDER / name.file

    @staticmethod
    def synced(path: Path) -> bool:
        """Whether the bytes of this page are known to be on the drive. Raises OSError."""
        return not path.stat().st_mode & stat.S_IWUSR

    def write(self, session: Path, name: PageName, page: bytes) -> None:
        """Puts the page among the shared ones, unless a good one is there, and links it to the session: a killed
        process has it now, a power cut may take it. Raises OSError."""
        shared, link = self._folder.page(name.file), self.link(session, name)
        with self._lock:
            if self._is_good(shared, name):
                _link(shared, link)
                return
        shared.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = shared.with_name(f"{files.TEMPORARY}{secrets.token_hex(8)}")
        files.write_new(temporary, encode_header(self._identity, name, page), page, sync=False)
        with self._lock:
            self._failed.discard(temporary.stat().st_ino)
            os.rename(temporary, shared)
            self._written.add(name.file)
            _link(shared, link)

    def _is_good(self, shared: Path, name: PageName) -> bool:
        try:
            found = shared.stat()
            if found.st_size != self._identity.file_bytes or found.st_ino in self._failed:
                return False
            if found.st_mode & stat.S_IWUSR and name.file not in self._written:
                self.read(shared, name)  # another process died before it was synced
        except FileNotFoundError:
            return False
        except (BadPageError, OSError) as error:
            log.warning("page %s is not good and is written again: %s", shared, error)
            return False
        return True

    def read(self, path: Path, name: PageName) -> bytes:
        """The page in this file, every byte checked. Raises BadPageError, OSError."""
        return decode_page(self._identity, name, files.read_all(path, self._identity.file_bytes))

    def sync(self, link: Path) -> None:
        """Brings the bytes to the drive, and marks the file; the link is durable once its folder is synced too. Raises
        OSError, now and ever again."""
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if found.st_ino in self._failed:
                raise OSError(errno.EIO, "an earlier sync of this page failed", str(link))
            if found.st_mode & stat.S_IWUSR:
                try:
                    os.fdatasync(fd)
                except OSError:
                    self._failed.add(found.st_ino)
                    raise
                os.fchmod(fd, SYNCED_MODE)
        finally:
            os.close(fd)
        self._written.discard(link.name)

    def unlink(self, link: Path) -> None:
        """Removes one session's link, and the page with its last one. Raises OSError."""
        with self._lock:
            link.unlink(missing_ok=True)
            shared = self._folder.page(link.name)
            if shared.exists() and shared.stat().st_nlink == 1:
                self._written.discard(link.name)
                shared.unlink()

    def set_aside(self, link: Path, reason: str) -> None:
        """Moves a bad page to quarantine. It leaves the shared ones too, so that a good one can be written under its
        name again. Raises OSError."""
        with self._lock:
            shared = self._folder.page(link.name)
            if shared.exists() and link.exists() and shared.samefile(link):
                self._written.discard(link.name)
                shared.unlink()
        self._folder.quarantine.move(link, reason)


def _link(shared: Path, link: Path) -> None:
    """Makes `link` a name of the shared page, whatever it was before."""
    with contextlib.suppress(FileExistsError):
        os.link(shared, link)
        return
    if not link.samefile(shared):
        link.unlink()
        os.link(shared, link)
