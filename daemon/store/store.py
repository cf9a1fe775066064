"""Sessions on disk: create, load, append, pages, delete.

Owns one folder per session (`meta.json`, `tokens.log`, and `kv/` with a hard link to every page that the session uses;
a page without links but its own is nobody's and goes). Loading never trusts a byte: a torn tail is cut off and said, a
damaged log is copied to quarantine and its readable prefix kept and marked CORRUPT, a bad page goes to quarantine and
the pages before it are used. Writing is the writer thread's, see writer.py for what a full or failing drive means; the
syncer's thread makes pages durable and removes what they replace.
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
from colibri.daemon.store.page_files import PageFiles
from colibri.daemon.store.pages import BadPageError, PageChain, PageIdentity, PageName
from colibri.daemon.store.syncer import Syncer
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
TOKEN_BYTES = 4  # of one id in the log


@dataclass
class StoredSession:
    """One session's files. `links`: page file -> bytes, written, perhaps not synced yet; `waiting`: pages still to be
    written, already readable; `kv_position`: positions whose pages are synced; `pending`: pages and removals that are
    not finished; `kv_error`: why no more KV is stored, "" while it is; `kv_full`: only since the drive was full. The
    dictionaries are changed under `lock` and key by key, so any thread may look at them."""

    meta: SessionMeta
    folder: Path
    log: LogFile
    links: dict[str, int]
    waiting: dict[str, bytes] = field(default_factory=dict)
    kv_position: int = 0
    kv_error: str = ""
    kv_full: bool = False
    pending: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def disk_bytes(self) -> int:
        return self.log.bytes + sum(list(self.links.values()))


class SessionStore:
    """The state folder of one running model. Methods may be called from any thread; calls that concern one session
    come from one thread at a time. A `root` that is open (and locked) already is taken over. Raises StoreError when the
    folder cannot be used at all. `max_waiting_bytes`: pages that may wait in memory to be written; one always may."""

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
        self._pages = PageFiles(self.folder, identity)
        self._writer = Writer(durability, max_waiting_bytes)
        self._syncer = Syncer(self._pages.sync)
        self._ids = set(self.folder.session_ids())
        self._lock = threading.Lock()

    def close(self) -> None:
        """Writes and syncs what is queued, then gives the folder back. Idempotent."""
        self._writer.close()
        self._syncer.close()
        self.folder.close()

    def flush(self) -> None:
        """Waits until everything queued so far is on the drive."""
        self._writer.flush()
        self._syncer.flush()

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
            files.sync_folder(folder / KV_FOLDER)
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
        stored.kv_position = self._secure_pages(stored, content.tokens)
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

        self._behind_pages(run)
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
                if not stored.kv_error:
                    stored.kv_error, stored.kv_full = f"metadata cannot be written: {error}", error.errno in DISK_FULL
                log.error("session %s: %s", meta.session, stored.kv_error)

        self._behind_pages(run)

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
        link = self._pages.link(stored.folder, name)
        page = self._read_page(stored, name, link)
        if page is None:
            stored.kv_position = min(stored.kv_position, name.first)
        elif not self._pages.synced(link):  # a killed daemon wrote it: from here on this one builds on it
            self._sync_page(stored, name)
        return page

    def put_page(self, stored: StoredSession, name: PageName, page: bytes) -> None:
        """Queues a page. An error ends KV persistence for this session (stored.kv_error), until `store_again` if the
        drive was full; nothing else."""
        with stored.lock:
            stored.waiting[name.file] = page
            stored.pending += 1
        self._writer.submit_page(stored.log, lambda: self._put_page(stored, name), self.identity.file_bytes)

    def store_again(self, stored: StoredSession) -> bool:
        """Lets pages be stored again that a full drive refused: nothing of them is there, so writing them anew is safe,
        which it is not after any other error. Whether there was such an end; what is missing is the caller's to put."""
        with stored.lock:
            if not stored.kv_full:
                return False
            stored.kv_error, stored.kv_full = "", False
        log.info("session %s: KV is stored again", stored.meta.session)
        return True

    def keep_pages(self, stored: StoredSession, names: Iterable[PageName]) -> None:
        """Forgets this session's pages but these, which are those of its committed tokens in order: superseded tails,
        other numerics, prompts that came to nothing. Their links are removed once these pages are durable."""
        kept = list(names)
        keep = {name.file for name in kept}
        with stored.lock:
            if stored.kv_error:
                return
            dropped = [file for file in (*stored.links, *stored.waiting) if file not in keep]
            for file in dropped:
                stored.links.pop(file, None)
                stored.waiting.pop(file, None)
            stored.pending += 1
        self._behind_pages(lambda: self._prune(stored, kept, dropped))

    def _behind_pages(self, run: Callable[[], None]) -> None:
        """Runs `run` when all pages queued before are durable, where no log waits for it."""
        self._writer.submit(lambda: self._syncer.then(run))

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
            lost = len(data) - image.valid_bytes
            reason = f"{image.detail}; what follows, {lost} bytes or at most {lost // TOKEN_BYTES} tokens, is lost"
            copy = self.folder.quarantine.copy(path, data, reason)
            meta = meta.marked(CorruptMark(len(content.tokens), reason, copy.name))
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

    # ---- pages that a dead daemon left

    def _secure_pages(self, stored: StoredSession, tokens: Sequence[int]) -> int:
        """Positions of `tokens` whose pages are on the drive. What was written and perhaps never synced is checked, for
        a power cut may have left its name only, and synced now."""
        position = 0
        for name in self.cached_pages(stored, tokens, None):
            link = self._pages.link(stored.folder, name)
            try:
                if not self._pages.synced(link):
                    if self._read_page(stored, name, link) is None:
                        break
                    self._pages.sync(link)
            except OSError as error:
                self._set_aside(stored, name, link, str(error))
                break
            position = name.first + name.positions
        return position

    def _read_page(self, stored: StoredSession, name: PageName, link: Path) -> bytes | None:
        try:
            return self._pages.read(link, name)
        except (BadPageError, OSError) as error:
            self._set_aside(stored, name, link, str(error))
            return None

    def _set_aside(self, stored: StoredSession, name: PageName, link: Path, reason: str) -> None:
        with stored.lock:
            stored.links.pop(name.file, None)
        try:
            self._pages.set_aside(link, f"session {stored.meta.session}, positions from {name.first}: {reason}")
        except OSError as error:
            log.error("session %s: bad page %s (%s) cannot be moved: %s", stored.meta.session, link, reason, error)

    # ---- pages, on the writer thread

    def _put_page(self, stored: StoredSession, name: PageName) -> None:
        try:
            if self._write_page(stored, name):
                self._sync_page(stored, name)
        finally:
            with stored.lock:
                stored.pending -= 1

    def _write_page(self, stored: StoredSession, name: PageName) -> bool:
        """Whether the session has the page now. It has not where the page was dropped while it waited."""
        page = stored.waiting.get(name.file)
        if page is None:
            return False
        written = False
        try:
            if not stored.kv_error:
                if name.file not in stored.links:
                    self._pages.write(stored.folder, name, page)
                written = True
        except OSError as error:
            self._end_kv(stored, name, error, full=error.errno in DISK_FULL)
        finally:
            with stored.lock:
                if written and name.file in stored.waiting:
                    stored.links[name.file] = self.identity.file_bytes
                stored.waiting.pop(name.file, None)
        return name.file in stored.links

    def _sync_page(self, stored: StoredSession, name: PageName) -> None:
        with stored.lock:
            stored.pending += 1
        self._syncer.page(self._pages.link(stored.folder, name), lambda error: self._page_synced(stored, name, error))

    def _end_kv(self, stored: StoredSession, name: PageName, error: OSError, full: bool = False) -> None:
        again = "; tried again with the next turn" if full else ", nor tried again until the daemon is started anew"
        with stored.lock:
            stored.kv_error = f"KV from position {name.first} on is not stored: {error.strerror or error}{again}"
            stored.kv_full = full
        log.error("session %s: %s", stored.meta.session, stored.kv_error)

    # ---- pages, on the syncer's thread

    def _page_synced(self, stored: StoredSession, name: PageName, error: OSError | None) -> None:
        with stored.lock:
            stored.pending -= 1
            if name.file not in stored.links:  # dropped meanwhile
                return
            if error is None:
                if name.first <= stored.kv_position:
                    stored.kv_position = max(stored.kv_position, name.first + name.positions)
                return
            del stored.links[name.file]
        if stored.kv_full or not stored.kv_error:
            self._end_kv(stored, name, error)
        try:
            self._pages.unlink(self._pages.link(stored.folder, name))
        except OSError as failure:
            log.error("session %s: page %s cannot be removed: %s", stored.meta.session, name.file, failure)

    def _prune(self, stored: StoredSession, kept: list[PageName], dropped: list[str]) -> None:
        with stored.lock:
            stored.pending -= 1
            if not stored.kv_error:
                stored.kv_position = 0
                for name in kept:
                    if name.file not in stored.links:
                        break
                    stored.kv_position = name.first + name.positions
        for file in dropped if not stored.kv_error else ():
            with stored.lock:  # nobody takes it up again in this moment
                if file in stored.links or file in stored.waiting:
                    continue
                try:
                    self._pages.unlink(stored.folder / KV_FOLDER / file)
                except OSError as error:
                    log.warning("session %s: page %s cannot be removed: %s", stored.meta.session, file, error)

    def _delete(self, folder: Path) -> None:
        gone = folder.with_name(f"{files.DELETED}{secrets.token_hex(8)}")
        os.rename(folder, gone)
        files.sync_folder(gone.parent)
        for link in list(gone.glob(f"{KV_FOLDER}/*")):
            self._pages.unlink(link)
        shutil.rmtree(gone)
