"""The engine's front: what the service calls. Token ids only; text, network and policy are the service's.

Owns admission: every field of a request is checked here before anything changes, a request id starts one generation
and no more, a session serves one generation at a time. The work itself is EngineLoop's. Calls of the front are made one
at a time (`_front`), because they may load a session from the drive, for which no step waits.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from colibri.daemon.engine_api import EngineStats, SessionView
from colibri.daemon.engine_loop import EngineLoop, Upkeep
from colibri.daemon.errors import (
    DaemonError,
    DiskFullError,
    DrainingError,
    GenerationNotFoundError,
    InvalidFieldError,
    PositionMismatchError,
    RequestIdReusedError,
    SessionBusyError,
    SessionCorruptError,
    SessionNotFoundError,
    TokenOutOfRangeError,
    UnsupportedFieldError,
)
from colibri.daemon.generation import FinishReason, Generation, GenerationSpec, LoopWake
from colibri.daemon.model_port import PAGE_POSITIONS, ModelPort
from colibri.daemon.retained import RetainedGenerations
from colibri.daemon.scheduler import Limits, Scheduler
from colibri.daemon.sessions import Session, SessionTable
from colibri.daemon.store.pages import PageChain, PageIdentity
from colibri.daemon.store.store import SessionStore
from colibri.daemon.turn import Turn, read_back


@dataclass(frozen=True)
class EngineOptions:
    """`prefill_budget_us`: how long a prompt may hold up those that decode, per step. `retain_seconds`: how long a
    finished generation can be asked for."""

    max_queue: int = 64
    prefill_budget_us: int = 200_000
    retain_seconds: float = 86400.0
    max_retained: int = 1000


def page_identity(model: ModelPort) -> PageIdentity:
    """What binds stored pages to this model; for opening its SessionStore."""
    return PageIdentity(model.content_id, model.numerics_id, model.page_sections(), model.kv_page_bytes)


class Engine:
    """Implements EngineApi. `wake` carries changes of generations to the event loop; `upkeep` gets time while nothing
    runs."""

    def __init__(
        self,
        model: ModelPort,
        store: SessionStore,
        options: EngineOptions | None = None,
        wake: LoopWake | None = None,
        upkeep: Upkeep | None = None,
    ) -> None:
        options = options or EngineOptions()
        limits = Limits(
            model.max_rows,
            model.max_prefills,
            model.pass_tokens,
            model.max_context,
            model.kv_pages,
            options.max_queue,
        )
        self._model, self._store, self._wake = model, store, wake
        self._scheduler = Scheduler(limits)
        self._loop = EngineLoop(
            model, store, self._scheduler, options.prefill_budget_us, options.retain_seconds, upkeep
        )
        self._table = SessionTable(store, limits.context)
        self._retained = RetainedGenerations(options.retain_seconds, options.max_retained)
        self._front = threading.Lock()
        self._draining = False

    def start(self) -> None:
        self._loop.start()

    # ---- generations

    def submit(self, spec: GenerationSpec) -> Generation:
        spec = replace(spec, request_id=spec.request_id or str(uuid.uuid4()))
        with self._front:
            known = self._known(spec.request_id, spec.session, spec.body_hash)
            if known is not None:
                return known
            if self._draining:
                raise DrainingError("the daemon is stopping")
            self._check_fields(spec)
            session = self._table.get(spec.session) if spec.session is not None else None
            if session is not None:
                self._check_session(session, spec)
            return self._enqueue(spec, session)

    def find(self, request_id: str, session: str | None, body_hash: bytes) -> Generation | None:
        with self._front:
            return self._known(request_id, session, body_hash)

    def _known(self, request_id: str, session_id: str | None, body_hash: bytes) -> Generation | None:
        with self._loop.lock:
            found = self._retained.find_request(request_id, body_hash)
        if found is not None or session_id is None or session_id not in self._table.ids():
            return found
        session = self._table.get(session_id)
        for logged in session.logged:
            if logged.start.get("request_id") == request_id:
                found = read_back(session, logged)
                if found.body_hash != body_hash:
                    raise RequestIdReusedError(
                        f"request id {request_id} was used for another request ({found.name})",
                        request_id=request_id,
                        generation=found.name,
                    )
                return found
        return None

    def _check_fields(self, spec: GenerationSpec) -> None:
        if not spec.input_ids:
            raise InvalidFieldError("the input has no tokens", field="input")
        vocab = self._model.vocab_size
        for name, ids in (("input", spec.input_ids), ("stop.token_ids", sorted(spec.stop_token_ids))):
            for index, token in enumerate(ids):
                if not 0 <= token < vocab:
                    raise TokenOutOfRangeError(
                        f"{name}[{index}] is {token}; the vocabulary has {vocab} ids",
                        field=name,
                        index=index,
                        token=token,
                        limit=vocab,
                    )
        if spec.max_tokens is not None and spec.max_tokens < 1:
            raise InvalidFieldError(f"max_tokens is {spec.max_tokens}; it is at least 1", field="stop.max_tokens")
        if spec.max_duration is not None and not spec.max_duration > 0:
            raise InvalidFieldError(f"max_duration is {spec.max_duration} s", field="stop.max_duration")
        sampling = spec.sampling
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise InvalidFieldError(f"temperature is {sampling.temperature}", field="sampling.temperature")
        if not 0 < sampling.top_p <= 1:
            raise InvalidFieldError(f"top_p is {sampling.top_p}; it is in (0, 1]", field="sampling.top_p")
        if not 0 <= sampling.top_k < 2**32:
            raise InvalidFieldError(f"top_k is {sampling.top_k}", field="sampling.top_k")
        if not 0 <= sampling.seed < 2**64:
            raise InvalidFieldError(f"seed is {sampling.seed}", field="sampling.seed")
        if spec.expected_position is not None and spec.session is None:
            raise UnsupportedFieldError(
                "expected_position needs a session; this call has none", field="expected_position"
            )

    def _check_session(self, session: Session, spec: GenerationSpec) -> None:
        stored, position = session.stored, len(session.tokens)
        if session.active:
            raise SessionBusyError(
                f"session {session.id} is busy with {session.active}",
                session=session.id,
                active_generation=session.active,
            )
        self._store.check_content(stored)
        if stored.log.error and (stored.log.broken or not self._store.retry(stored)):
            kind = SessionCorruptError if stored.log.broken else DiskFullError
            raise kind(
                f"session {session.id} cannot be continued: {stored.log.error}; {stored.log.durable_position} of its "
                f"{position} tokens are on the drive",
                session=session.id,
                position=stored.log.durable_position,
            )
        mark = stored.meta.corrupt
        if mark is not None and not (spec.position_named and spec.expected_position == position):
            raise SessionCorruptError(
                f"session {session.id}: {self._table.loss(session)}. Continue from there by naming expected_position "
                f"{position}",
                session=session.id,
                position=position,
            )
        if spec.expected_position not in (None, position):
            raise PositionMismatchError(
                f"session {session.id} is at position {position}, not at {spec.expected_position}",
                session=session.id,
                position=position,
                expected_position=spec.expected_position,
            )

    def _enqueue(self, spec: GenerationSpec, session: Session | None) -> Generation:
        prompt = [*session.tokens, *spec.input_ids] if session is not None else list(spec.input_ids)
        limit = self._scheduler.token_limit(len(prompt), spec.max_tokens)
        reason = FinishReason.CONTEXT_FULL if spec.max_tokens is None else FinishReason.MAX_TOKENS
        parent = f"sessions/{session.id}/" if session is not None else ""
        name = f"{parent}generations/g-{uuid.uuid4()}"
        generation = Generation(name, spec, len(prompt), self._wake.notify if self._wake is not None else None)
        with self._loop.lock:
            self._scheduler.check_queue(len(prompt) + limit, spec.session)
        if session is not None and session.stored.meta.corrupt is not None:
            self._acknowledge(session)
        identity = self._store.identity
        chain = (
            session.chain.fork(len(session.tokens) // PAGE_POSITIONS) if session is not None else PageChain(identity)
        )
        turn = Turn(generation, spec, session, prompt, chain, limit, reason)
        with self._loop.lock:
            self._loop.add(turn, len(prompt) + limit)
            self._retained.add(generation)
            if session is not None:
                session.active = name
        return generation

    def _acknowledge(self, session: Session) -> None:
        try:
            self._store.acknowledge(session.stored)
        except OSError as error:
            raise DiskFullError(
                f"session {session.id}: its log cannot be written: {error}", session=session.id
            ) from error

    def cancel(self, name: str) -> Generation:
        generation = self.get(name)
        self._loop.cancel(name)
        return generation

    def get(self, name: str) -> Generation:
        with self._loop.lock:
            try:
                return self._retained.get(name)
            except GenerationNotFoundError:
                kind, _, rest = name.partition("/")
                if kind != "sessions":
                    raise
        with self._front:
            session = self._table.get(rest.partition("/")[0])
            for logged in session.logged:
                if logged.start.get("generation") == name:
                    return read_back(session, logged)
        raise GenerationNotFoundError(f"there is no generation {name!r}", name=name)

    def generations(self) -> list[Generation]:
        with self._loop.lock:
            return self._retained.all()

    # ---- sessions

    def create_session(
        self,
        session: str | None = None,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> SessionView:
        with self._front:
            if self._draining:
                raise DrainingError("the daemon is stopping")
            return self._table.view(self._table.create(session, display_name, labels or {}, request_id))

    def session(self, session: str) -> SessionView:
        with self._front:
            return self._table.view_of(session)

    def sessions(self) -> list[SessionView]:
        with self._front:
            return [self._table.view_of(session) for session in self._table.ids()]

    def session_tokens(self, session: str, first: int = 0, end: int | None = None) -> list[int]:
        with self._front:
            return self._table.get(session).tokens[first:end].tolist()

    def delete_session(self, session: str, etag: str = "", force: bool = False) -> None:
        while not self._delete_idle(session, etag, force):
            pass

    def _delete_idle(self, session: str, etag: str, force: bool) -> bool:
        """Deletes a session; or, if a generation had to be ended first, waits for that and answers False."""
        with self._front:
            loaded = self._table.peek(session)
            if loaded is None or not loaded.active:
                self._delete(session, etag)
                return True
            active = loaded.active
            if not force:
                raise SessionBusyError(
                    f"session {session} is busy with {active}", session=session, active_generation=active
                )
            self._table.check_etag(loaded, etag)
        self.cancel(active).result()
        return False

    def _delete(self, session: str, etag: str) -> None:
        if session not in self._table.ids():
            raise SessionNotFoundError(f"there is no session {session!r}", session=session)
        if etag:
            self._table.check_etag(self._table.get(session), etag)
        loaded = self._table.peek(session)
        if loaded is not None:
            self._loop.call(lambda: self._loop.close_idle(loaded))
        self._table.delete(session)

    # ---- the whole

    @property
    def failure(self) -> DaemonError | None:
        """Why the engine's thread has ended by itself, None while all is well."""
        return self._loop.failure

    def stats(self) -> EngineStats:
        loop = self._loop
        with loop.lock:
            queued, running = len(self._scheduler.queued), len(self._scheduler.running)
            pages = self._scheduler.pages_used
        degraded = [f"session {s.id}: {e}" for s in self._table.loaded() for e in (s.log_error, s.stored.kv_error) if e]
        if loop.failure is not None:
            degraded.append(loop.failure.message)
        counters = loop.counters
        return EngineStats(
            queued=queued,
            running=running,
            decode_tokens=counters.decode_tokens,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens_per_second=counters.decode_rate.per_second(),
            prefill_tokens_per_second=counters.prefill_rate.per_second(),
            expert_hits=counters.expert_hits,
            expert_loads=counters.expert_loads,
            expert_bytes=counters.expert_bytes,
            core_ns=counters.clock.core_ns,
            between_ns=counters.clock.between_ns,
            steps=counters.clock.steps,
            live_sequences=len(loop.sequences),
            kv_pages_used=pages,
            draining=self._draining,
            degraded=tuple(degraded),
        )

    def between_steps(self, work: Callable[[], None]) -> None:
        self._loop.call(work)

    def drain(self, timeout: float | None = None) -> bool:
        with self._front:
            self._draining = True
        return self._loop.stop(timeout)
