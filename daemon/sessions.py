"""Sessions in memory: loaded when somebody asks, kept while they are used, never two of one.

Owns the table of sessions and what a session is while the daemon runs: its committed tokens, its files, the sequence
that holds its KV, and who is using it. Refuses ids that are not ids. The engine's front (engine.py) holds one lock
around every call into the table; the engine thread owns `sequence`, `saved_pages`, `held` and, while a turn runs,
`tokens`.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from colibri.daemon.engine_api import SessionState, SessionView
from colibri.daemon.errors import (
    EtagMismatchError,
    InvalidFieldError,
    SessionCorruptError,
    SessionExistsError,
    SessionNotFoundError,
    StoreError,
)
from colibri.daemon.model_port import PAGE_POSITIONS, SequencePort
from colibri.daemon.store.folder import SESSION_ID
from colibri.daemon.store.meta import SessionMeta
from colibri.daemon.store.pages import PageChain, PageName
from colibri.daemon.store.store import SessionStore, StoredSession
from colibri.daemon.store.token_log import LoggedGeneration
from colibri.daemon.store.writer import AppendResult, Entry


@dataclass(frozen=True)
class HeldRecords:
    """The arguments of SessionStore.append."""

    entries: list[Entry]
    position: int
    commit: bool
    on_result: Callable[[AppendResult], None]


@dataclass
class Session:
    """`tokens` are the committed ones. `active`: the name of the generation that is using it, "" when idle.
    `saved_pages`: full pages on disk or on their way; `tail`: the partial page behind them, likewise. `held`: records
    that must not come into the log before pages which the store has not been given yet."""

    stored: StoredSession
    tokens: array[int]
    logged: list[LoggedGeneration]
    chain: PageChain
    active: str = ""
    sequence: SequencePort | None = None
    saved_pages: int = 0
    tail: PageName | None = None
    held: deque[HeldRecords] = field(default_factory=deque)
    last_used: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return self.stored.meta.session

    @property
    def log_error(self) -> str:
        return self.stored.log.error

    @property
    def settled(self) -> bool:
        """Everything it has is on disk and nobody uses it: it may be forgotten and loaded again."""
        log = self.stored.log
        busy = self.active or self.sequence is not None or self.held or self.stored.pending
        return not (busy or log.error or log.backlog or log.position != len(self.tokens))

    def state(self) -> SessionState:
        if self.stored.meta.corrupt is not None:
            return SessionState.CORRUPT
        if self.sequence is not None:
            return SessionState.LIVE
        return SessionState.STORED if self.stored.kv_position or not self.tokens else SessionState.TOKENS_ONLY

    def page_names(self, positions: int) -> list[PageName]:
        """The pages that hold the first `positions` positions of the committed tokens, in order."""
        names = [self.chain.name(self.tokens, index) for index in range(positions // PAGE_POSITIONS)]
        if rest := positions % PAGE_POSITIONS:
            names.append(self.chain.name(self.tokens, len(names), rest))
        return names


class SessionTable:
    """Every method is called under the engine's front lock. `max_settled`: sessions kept in memory that need not be."""

    def __init__(self, store: SessionStore, context_limit: int, max_settled: int = 32) -> None:
        self._store = store
        self._context_limit = context_limit
        self._max_settled = max_settled
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # unused for longest first

    def get(self, session: str) -> Session:
        """Raises SessionNotFoundError, SessionCorruptError, StoreError."""
        found = self._sessions.get(session)
        if found is None:
            stored, content = self._store.load(session)
            used = stored.log.path.stat().st_mtime
            tokens, chain = array("I", content.tokens), PageChain(self._store.identity)
            found = Session(stored, tokens, content.generations, chain, last_used=used)
            self._sessions[session] = found
        self._sessions.move_to_end(session)
        self._forget_settled(found)
        return found

    def loaded(self) -> list[Session]:
        return list(self._sessions.values())

    def peek(self, session: str) -> Session | None:
        """A session that is in memory; its place in the order does not change."""
        return self._sessions.get(session)

    def create(self, session: str | None, display_name: str, labels: Mapping[str, str], request_id: str) -> Session:
        if session is None and request_id:
            session = "s-" + hashlib.sha256(request_id.encode()).hexdigest()[:32]  # the same call, the same session
        session = session or f"s-{uuid.uuid4()}"
        if not SESSION_ID.fullmatch(session):
            raise InvalidFieldError(
                f"session id {session!r} is not of the form {SESSION_ID.pattern}", field="session_id"
            )
        if session in self._store.ids():
            return self._same(session, display_name, labels, request_id)
        identity = self._store.identity
        meta = SessionMeta(
            session,
            identity.content_id,
            identity.numerics_id,
            time.time(),
            display_name,
            dict(labels),
            request_id,
        )
        created = Session(self._store.create(meta), array("I"), [], PageChain(identity))
        self._sessions[session] = created
        return created

    def _same(self, session: str, display_name: str, labels: Mapping[str, str], request_id: str) -> Session:
        found = self.get(session)
        meta = found.stored.meta
        if (meta.display_name, meta.labels, meta.request_id) == (display_name, dict(labels), request_id):
            return found
        raise SessionExistsError(f"session {session!r} exists with other fields", session=session)

    def check_etag(self, session: Session, etag: str) -> None:
        if etag and etag != session.stored.meta.etag:
            raise EtagMismatchError(
                f"session {session.id} has etag {session.stored.meta.etag}, not {etag}", etag=session.stored.meta.etag
            )

    def delete(self, session: str) -> None:
        """Removes the files too. Raises SessionNotFoundError, StoreError."""
        if session not in self._store.ids():
            raise SessionNotFoundError(f"there is no session {session!r}", session=session)
        self._store.delete(session)
        self._sessions.pop(session, None)

    def ids(self) -> list[str]:
        return self._store.ids()

    def view(self, session: Session) -> SessionView:
        stored, meta = session.stored, session.stored.meta
        position = len(session.tokens)
        return SessionView(
            session=meta.session,
            display_name=meta.display_name,
            labels=meta.labels,
            state=session.state(),
            content_id=meta.content_id,
            numerics_id=meta.numerics_id,
            position=position,
            durable_position=min(stored.log.durable_position, position),
            kv_position=min(stored.kv_position, position),
            context_limit=self._context_limit,
            disk_bytes=stored.disk_bytes,
            etag=meta.etag,
            create_time=meta.create_time,
            last_used_time=session.last_used,
            active_generation=session.active,
            degraded="; ".join(filter(None, (self.loss(session), session.log_error, stored.kv_error))),
        )

    def loss(self, session: Session) -> str:
        """What a CORRUPT session lost and where the damaged file is kept; "" of any other."""
        mark = session.stored.meta.corrupt
        if mark is None:
            return ""
        kept = self._store.folder.quarantine.folder / mark.quarantined
        return f"{mark.reason}; {len(session.tokens)} tokens are readable, the damaged file is kept as {kept}"

    def view_of(self, session: str) -> SessionView:
        """Also of a session whose files cannot be read: it is shown as CORRUPT, with the reason."""
        try:
            return self.view(self.get(session))
        except (SessionCorruptError, StoreError) as error:
            return self._unreadable(session, str(error))

    def _unreadable(self, session: str, reason: str) -> SessionView:
        return SessionView(
            session=session,
            display_name="",
            labels={},
            state=SessionState.CORRUPT,
            content_id="",
            numerics_id="",
            position=0,
            durable_position=0,
            kv_position=0,
            context_limit=self._context_limit,
            disk_bytes=0,
            etag="",
            create_time=0.0,
            last_used_time=0.0,
            active_generation="",
            degraded=reason,
        )

    def _forget_settled(self, keep: Session) -> None:
        excess = len(self._sessions) - self._max_settled
        if excess > 0:
            settled = [s for s in self._sessions.values() if s is not keep and s.settled]
            for session in settled[:excess]:
                del self._sessions[session.id]
