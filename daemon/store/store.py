"""Sessions on disk: create, load, append, pages, delete.

Owns one folder per session (`meta.json`, `tokens.log`, and `kv/` with a hard link to every page that the session uses;
a page without links but its own is nobody's and goes). Loading never trusts a byte: a torn tail is cut off and said, a
damaged log is copied to quarantine and its readable prefix kept and marked CORRUPT, a bad page goes to quarantine and
the pages before it are used. Writing is the writer thread's; see writer.py for what a full or failing drive means.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from colibri.daemon.errors import (
    ContentMismatchError,
    DiskFullError,
    SessionCorruptError,
    SessionNotFoundError,
    StoreError,
)
from colibri.daemon.model_port import PAGE_POSITIONS
from colibri.daemon.store import files
from colibri.daemon.store.folder import KV_FOLDER, LOG_FILE, META_FILE, StateFolder
from colibri.daemon.store.meta import CorruptMark, SessionMeta, decode_meta, encode_meta
from colibri.daemon.store.pages import BadPageError, PageChain, PageIdentity, PageName, decode_page, encode_header
from colibri.daemon.store.token_log import (
    HEADER_BYTES,
    MAX_LOG_BYTES,
    BadRecordError,
    Chain,
    Damage,
    LogContent,
    LogImage,
    UnknownVersionError,
    new_log,
    read_log,
    replay,
)
from colibri.daemon.store.writer import (
    DISK_FULL,
    AppendResult,
    Durability,
    Entry,
    LogFile,
    Writer,
    append_backlog,
)

log = logging.getLogger("colibri.daemon.store")

MAX_META_BYTES = 1 << 20


@dataclass
class StoredSession:
    """One session's files. `links`: page file -> bytes; `waiting`: pages on their way to the drive, already readable;
    `kv_error`: why no more KV is stored, "" while it is. The dictionaries are only changed key by key, so any thread
    may look at them."""

    meta: SessionMeta
    folder: Path
    log: LogFile
    links: dict[str, int]
    waiting: dict[str, bytes] = field(default_factory=dict)
    kv_position: int = 0
    kv_error: str = ""

    @property
    def disk_bytes(self) -> int:
        return self.log.bytes + sum(list(self.links.values()))


class SessionStore:
    """The state folder of one running model. Methods may be called from any thread; calls that concern one session
    come from one thread at a time. A `root` that is open (and locked) already is taken over. Raises StoreError when the
    folder cannot be used at all. `max_waiting_bytes`: pages that may wait for the drive, in memory; one always may."""

    def __init__(
        self,
        root: Path | StateFolder,
        identity: PageIdentity,
        model: str = "",
        durability: Durability = "token",
        max_waiting_bytes: int = 32 << 20,
    ) -> None:
        self.identity = identity
        self.durability = durability
        self.folder = root if isinstance(root, StateFolder) else StateFolder(root, identity.content_id, model)
        self._writer = Writer(durability, max_waiting_bytes)
        self._ids = set(self.folder.session_ids())
        self._lock = threading.Lock()

    def close(self) -> None:
        """Writes what is queued, then gives the folder back. Idempotent."""
        self._writer.close()
        self.folder.close()

    def flush(self) -> None:
        self._writer.flush()

    def ids(self) -> list[str]:
        with self._lock:
            return sorted(self._ids)

    # ---- create, load, delete

    def create(self, meta: SessionMeta) -> StoredSession:
        """Makes an empty session, complete or not at all. The id is free. Raises DiskFullError, StoreError."""
        folder = self.folder.session(meta.session)
        temporary = folder.with_name(f"{files.TEMPORARY}{secrets.token_hex(8)}")
        header, chain = new_log(meta.content_id)
        try:
            files.make_folder(folder.parent)
            temporary.mkdir(mode=0o700)
            try:
                (temporary / KV_FOLDER).mkdir(mode=0o700)
                files.write_new(temporary / META_FILE, encode_meta(meta))
                files.write_new(temporary / LOG_FILE, header)
                files.sync_folder(temporary)
                os.rename(temporary, folder)
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)  # opening the folder removes what stays
                raise
            files.sync_folder(folder.parent)
        except OSError as error:
            kind = DiskFullError if error.errno in DISK_FULL else StoreError
            raise kind(f"session {meta.session} cannot be created: {error}", session=meta.session) from error
        with self._lock:
            self._ids.add(meta.session)
        return StoredSession(meta, folder, LogFile(folder / LOG_FILE, chain, HEADER_BYTES, 0, 0), {})

    def load(self, session: str) -> tuple[StoredSession, LogContent]:
        """Reads and checks a session. Raises SessionNotFoundError; SessionCorruptError where its files cannot be read
        at all, StoreError where they are of another version: either way they are left as they are."""
        with self._lock:
            if session not in self._ids:
                raise SessionNotFoundError(f"there is no session {session!r}", session=session)
        folder = self.folder.session(session)
        try:
            data = files.read_all(folder / LOG_FILE, MAX_LOG_BYTES)
            meta = decode_meta(session, files.read_all(folder / META_FILE, MAX_META_BYTES))
            image, content = self._read(folder / LOG_FILE, data)
            meta = self._repair(folder, data, meta, image, content)
            links = {e.name: e.stat().st_size for e in os.scandir(folder / KV_FOLDER) if e.name.endswith(".kvp")}
            self._sync_log(folder / LOG_FILE, image.valid_bytes if image.chain is not None else len(data))
        except UnknownVersionError as error:
            raise StoreError(f"session {session}: {error}", session=session) from error
        except (OSError, ValueError) as error:
            raise SessionCorruptError(
                f"session {session} cannot be read: {error}", session=session, position=0
            ) from error
        position = len(content.tokens)
        chain = image.chain or Chain(b"", 0)
        logfile = LogFile(folder / LOG_FILE, chain, image.valid_bytes, position, position, broken=image.chain is None)
        stored = StoredSession(meta, folder, logfile, links)
        stored.kv_position = sum(page.positions for page in self.cached_pages(stored, content.tokens, None))
        return stored, content

    def delete(self, session: str) -> None:
        """Removes a session, readable or not, and the pages that only it used; done when it returns. Raises
        StoreError."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                self._delete(self.folder.session(session))
                done.set_result(None)
            except OSError as error:
                done.set_exception(StoreError(f"session {session} cannot be removed: {error}", session=session))

        self._writer.submit(run)
        done.result()
        with self._lock:
            self._ids.discard(session)

    def write_meta(self, stored: StoredSession, meta: SessionMeta) -> None:
        """Replaces the metadata, at once. Raises OSError."""
        files.write_atomic(stored.folder / META_FILE, encode_meta(meta))
        stored.meta = meta

    def acknowledge(self, stored: StoredSession) -> None:
        """Takes the CORRUPT mark away: the caller knows what was lost. A log whose header was lost starts anew. Raises
        OSError; then the mark stays."""
        if stored.log.broken:
            header, chain = new_log(stored.meta.content_id)
            files.write_atomic(stored.log.path, header)
            stored.log = LogFile(stored.log.path, chain, len(header), 0, 0)
        self.write_meta(stored, stored.meta.marked(None))

    def note_numerics(self, stored: StoredSession) -> None:
        """Queues the note that the session's KV is that of this model's numerics from now on."""
        meta = replace(stored.meta, numerics_id=self.identity.numerics_id)

        def run() -> None:
            try:
                self.write_meta(stored, meta)
            except OSError as error:
                stored.kv_error = stored.kv_error or f"metadata cannot be written: {error}"
                log.error("session %s: %s", meta.session, stored.kv_error)

        self._writer.submit(run)

    def check_content(self, stored: StoredSession) -> None:
        """Raises ContentMismatchError if the session belongs to another model."""
        mine, other = self.identity.content_id, stored.meta.content_id
        if other != mine:
            raise ContentMismatchError(
                f"session {stored.meta.session} belongs to content {other[:16]} ({self.folder.model_of(other)}); this "
                f"daemon serves {mine[:16]} ({self.folder.model_of(mine)})",
                session=stored.meta.session,
                session_content_id=other,
                content_id=mine,
            )

    # ---- the log

    def append(
        self,
        stored: StoredSession,
        entries: list[Entry],
        position: int,
        commit: bool,
        on_result: Callable[[AppendResult], None],
    ) -> None:
        self._writer.append(stored.log, entries, position, commit, on_result)

    def retry(self, stored: StoredSession) -> bool:
        """Tries again what a full disk refused, and waits for it; whether the log is complete now."""
        done: Future[bool] = Future()

        def run() -> None:
            written = append_backlog(stored.log, sync=self.durability != "off")
            done.set_result(written)

        self._writer.submit(run)
        return done.result()

    # ---- pages

    def has_room(self) -> bool:
        return self._writer.has_room(self.identity.file_bytes)

    def cached_pages(self, stored: StoredSession, tokens: Sequence[int], chain: PageChain | None) -> list[PageName]:
        """The pages on disk that hold the KV of a prefix of `tokens`: full ones, then perhaps one partial. `chain`:
        that of these tokens, to save hashing them again."""
        chain = chain or PageChain(self.identity)
        pages: list[PageName] = []
        for index in range(-(-len(tokens) // PAGE_POSITIONS)):
            most = min(PAGE_POSITIONS, len(tokens) - index * PAGE_POSITIONS)
            for positions in range(most, 0, -1):
                name = chain.name(tokens, index, positions)
                if name.file in stored.links or name.file in stored.waiting:
                    pages.append(name)
                    break
            else:
                break
            if pages[-1].positions < PAGE_POSITIONS:
                break
        return pages

    def read_page(self, stored: StoredSession, name: PageName) -> bytes | None:
        """A page, checked; None if it fails, and then it is out of the way and cannot be met again."""
        waiting = stored.waiting.get(name.file)
        if waiting is not None:
            return waiting
        path = stored.folder / KV_FOLDER / name.file
        try:
            return decode_page(self.identity, name, files.read_all(path, self.identity.file_bytes))
        except (BadPageError, OSError) as error:
            self._set_aside(stored, name, path, str(error))
        stored.kv_position = min(stored.kv_position, name.first)
        return None

    def put_page(self, stored: StoredSession, name: PageName, page: bytes) -> None:
        """Queues a page. An error ends KV persistence for this session (stored.kv_error); nothing else."""
        stored.waiting[name.file] = page
        self._writer.submit(lambda: self._put_page(stored, name, page), self.identity.file_bytes)

    def keep_pages(self, stored: StoredSession, names: Iterable[PageName]) -> None:
        """Queues the removal of this session's links to all pages but these, which are those of its committed tokens in
        order: superseded tails, other numerics, prompts that came to nothing."""
        keep = list(names)
        self._writer.submit(lambda: self._keep_pages(stored, keep))

    # ---- reading a log

    def _read(self, path: Path, data: bytes) -> tuple[LogImage, LogContent]:
        image = read_log(data)
        try:
            return image, replay(image.records)
        except BadRecordError as error:
            log.error("%s: %s", path, error)
            cut = read_log(data[: error.offset])  # the chain up to the last record that makes sense
            return LogImage(
                image.content_id, cut.records, error.offset, Damage.CORRUPT, str(error), cut.chain
            ), error.content

    def _repair(
        self, folder: Path, data: bytes, meta: SessionMeta, image: LogImage, content: LogContent
    ) -> SessionMeta:
        """Cuts off what is not valid, after damage only behind a copy and a mark that outlives this process."""
        path = folder / LOG_FILE
        if image.content_id and image.content_id != meta.content_id:
            raise ValueError(
                f"log and metadata name different content ({image.content_id[:16]}, {meta.content_id[:16]})"
            )
        if image.damage is None:
            return meta
        if image.damage is Damage.CORRUPT and (meta.corrupt is None or image.chain is not None):
            copy = self.folder.quarantine.copy(path, data, image.detail)
            meta = meta.marked(CorruptMark(len(content.tokens), image.detail, copy.name))
            files.write_atomic(folder / META_FILE, encode_meta(meta))
        if image.damage is Damage.TORN:
            log.warning("%s: %s; cut off, it was never acknowledged", path, image.detail)
        return meta

    @staticmethod
    def _sync_log(path: Path, valid_bytes: int) -> None:
        """Cuts off what is not valid. Synced even where nothing was cut: what the last daemon wrote may still be in the
        page cache alone, and from here on it is called durable."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != valid_bytes:
                os.ftruncate(fd, valid_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)

    # ---- pages, on the writer thread

    def _put_page(self, stored: StoredSession, name: PageName, page: bytes) -> None:
        try:
            self._store_page(stored, name, page)
        finally:
            stored.waiting.pop(name.file, None)

    def _store_page(self, stored: StoredSession, name: PageName, page: bytes) -> None:
        if stored.kv_error:
            return
        try:
            if name.file not in stored.links:
                self._publish(name, page)
                link = stored.folder / KV_FOLDER / name.file
                os.link(self.folder.page(name.file), link)
                files.sync_folder(link.parent)
                stored.links[name.file] = self.identity.file_bytes
        except OSError as error:
            stored.kv_error = f"KV from position {name.first} on is not stored: {error.strerror or error}"
            log.error("session %s: %s", stored.meta.session, stored.kv_error)
            return
        if name.first <= stored.kv_position:
            stored.kv_position = max(stored.kv_position, name.first + name.positions)

    def _publish(self, name: PageName, page: bytes) -> None:
        """Puts the page among the shared ones, unless it is there."""
        path = self.folder.page(name.file)
        files.make_folder(path.parent)
        if not path.exists() or path.stat().st_size != self.identity.file_bytes:
            files.write_atomic(path, encode_header(self.identity, name, page), page)

    def _keep_pages(self, stored: StoredSession, names: list[PageName]) -> None:
        if stored.kv_error:
            return
        keep = {name.file for name in names}
        for file in [file for file in list(stored.links) if file not in keep]:
            try:
                self._unlink(stored.folder / KV_FOLDER / file)
            except OSError as error:
                log.warning("session %s: page %s cannot be removed: %s", stored.meta.session, file, error)
                continue
            del stored.links[file]
        stored.kv_position = 0
        for name in names:
            if name.file not in stored.links:
                break
            stored.kv_position = name.first + name.positions

    def _unlink(self, link: Path) -> None:
        """Removes one session's link, and the page with its last one."""
        link.unlink(missing_ok=True)
        shared = self.folder.page(link.name)
        if shared.exists() and shared.stat().st_nlink == 1:
            shared.unlink()

    def _set_aside(self, stored: StoredSession, name: PageName, path: Path, reason: str) -> None:
        """A bad page leaves the shared ones too, so that a good one can be written under its name again."""
        stored.links.pop(name.file, None)
        shared = self.folder.page(name.file)
        try:
            if shared.exists() and path.exists() and shared.samefile(path):
                shared.unlink()
            self.folder.quarantine.move(path, f"session {stored.meta.session}, positions from {name.first}: {reason}")
        except OSError as error:
            log.error("session %s: bad page %s (%s) cannot be moved: %s", stored.meta.session, path, reason, error)

    def _delete(self, folder: Path) -> None:
        gone = folder.with_name(f"{files.DELETED}{secrets.token_hex(8)}")
        os.rename(folder, gone)
        files.sync_folder(gone.parent)
        for link in list(gone.glob(f"{KV_FOLDER}/*")):
            self._unlink(link)
        shutil.rmtree(gone)
