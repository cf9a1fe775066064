"""The state folder: its version, its lock, and where everything lies in it.

Owns the paths, `store.json`, and the promise that one daemon at a time uses the folder. Refuses a folder that another
daemon holds, one of another version, and one that cannot be written, each by name. What a crash left half-made
(temporary files, deletions under way, pages that no session refers to) is removed when the folder is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colibri.daemon.errors import StoreError
from colibri.daemon.store.files import DELETED, TEMPORARY, Quarantine, make_folder, read_all, write_atomic

log = logging.getLogger("colibri.daemon.store")

STORE_VERSION = 1
SESSION_ID = re.compile(r"[a-z][a-z0-9-]{3,62}")
LOG_FILE = "tokens.log"
META_FILE = "meta.json"
KV_FOLDER = "kv"
OWN_FOLDERS = (SESSIONS, PAGES, QUARANTINE) = ("sessions", "pages", "quarantine")


class StateFolder:
    """Open means locked; close gives the lock back. Raises StoreError."""

    def __init__(self, root: Path, content_id: str, model: str) -> None:
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise StoreError(f"state folder {root}: {error.strerror or error}", path=root) from error
        try:
            self._check_version(content_id, model)
            self.sessions = root / SESSIONS
            self.pages = root / PAGES
            make_folder(self.sessions)
            make_folder(self.pages)
            self.quarantine = Quarantine(root / QUARANTINE)
            self._remove_leftovers()
        except OSError as error:
            self.close()
            raise StoreError(f"state folder {root}: {error}", path=root) from error
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- places

    def session(self, session: str) -> Path:
        """Where a session lies; two levels, because one folder with very many entries gets slow or full."""
        return self.sessions / hashlib.sha256(session.encode()).hexdigest()[:2] / session

    def page(self, file: str) -> Path:
        return self.pages / file[:2] / file

    def session_ids(self) -> Iterator[str]:
        for folder in sorted(self.sessions.iterdir()):
            for entry in sorted(folder.iterdir()):
                if SESSION_ID.fullmatch(entry.name):
                    yield entry.name

    def session_bytes(self) -> int:
        """Bytes of all sessions: their logs and metadata, and each page once, however many of them use it. Files that
        go while they are counted do not count."""
        total = 0
        for pattern in (f"*/*/{LOG_FILE}", f"*/*/{META_FILE}"):
            total += sum(_size(path) for path in self.sessions.glob(pattern))
        return total + sum(_size(path) for path in self.pages.glob("*/*"))

    def model_of(self, content_id: str) -> str:
        """The name of the model that had this content id, if it was ever served from here."""
        known = self._description["models"].get(content_id)
        return str(known["model"]) if isinstance(known, dict) and "model" in known else "an unknown model"

    # ---- opening

    def _take_lock(self) -> int:
        path = self.root / "LOCK"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise StoreError(
                f"state folder {self.root} is in use by another daemon (process {holder})", path=self.root, pid=holder
            ) from None
        except OSError:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _check_version(self, content_id: str, model: str) -> None:
        path = self.root / "store.json"
        self._description: dict[str, Any] = {"version": STORE_VERSION, "models": {}}
        if path.exists():
            try:
                found = json.loads(read_all(path, 1 << 24))
                version, models = found["version"], found["models"]
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{path} is not the description of a state folder: {error}", path=path) from error
            if version != STORE_VERSION or not isinstance(models, dict):
                raise StoreError(
                    f"{path}: store version {version}; this program knows {STORE_VERSION}", path=path, version=version
                )
            self._description = found
        if content_id not in self._description["models"]:
            self._description["models"][content_id] = {"model": model, "first_served": time.time()}
            write_atomic(path, json.dumps(self._description, indent=1, sort_keys=True).encode())

    def _remove_leftovers(self) -> None:
        for entry in self.root.glob(f"{TEMPORARY}*"):
            entry.unlink()
        for folder in self.sessions.iterdir():
            for entry in folder.iterdir():
                if entry.name.startswith((TEMPORARY, DELETED)):
                    log.info("removing %s, left by an interrupted change", entry)
                    shutil.rmtree(entry)
                else:
                    for piece in entry.glob(f"{TEMPORARY}*"):
                        piece.unlink()
        for folder in self.pages.iterdir():
            for page in folder.iterdir():
                if page.stat().st_nlink == 1:  # also temporary files: no session refers to them
                    page.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
