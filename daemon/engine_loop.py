"""The engine's thread: one step of the model after the other, as long as anything runs.

Owns the model and every sequence: nobody else touches them, but for cancelling. Between two steps it carries out what
was asked of it, closes and restores sequences, and hands finished pages to the store; it never writes to a drive itself
and never waits for one that writes. Each turn is atomic: until its first token, its session is as it was before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from colibri.daemon.core_errors import daemon_error, is_cancelled
from colibri.daemon.errors import DaemonError, EngineFailedError
from colibri.daemon.fault_log import FaultLog
from colibri.daemon.generation import FinishReason, GenerationState
from colibri.daemon.live_sequences import RETRY_SECONDS, LiveSequences
from colibri.daemon.meters import EngineCounters
from colibri.daemon.model_port import ModelPort, PrefillPort, RowPort, SequencePort
from colibri.daemon.scheduler import Pass, Phase, Plan, Scheduler
from colibri.daemon.sessions import HeldRecords, Session
from colibri.daemon.store.store import SessionStore
from colibri.daemon.store.token_log import Kind, LoggedGeneration, encode_json
from colibri.daemon.store.writer import AppendResult, Entry
from colibri.daemon.turn import Turn, end_record, start_record

log = logging.getLogger("colibri.daemon.engine")


class EngineLoop:
    """`lock` covers `scheduler`, `turns` and `commands`; all else belongs to the thread. `retain_seconds` is how long
    after its end a generation can be asked for. `prefill_budget_us` bounds how long decoding waits for a prompt."""

    def __init__(
        self,
        model: ModelPort,
        store: SessionStore,
        scheduler: Scheduler,
        prefill_budget_us: int,
        retain_seconds: float,
    ) -> None:
        self.model, self.store, self.scheduler = model, store, scheduler
        self.sequences = LiveSequences(model, store)
        self.lock = threading.Condition()
        self.turns: dict[str, Turn] = {}
        self.counters = EngineCounters()
        self._faults = FaultLog()
        self.failure: DaemonError | None = None
        self._budget_us = prefill_budget_us
        self._retain_seconds = retain_seconds
        self._commands: deque[Callable[[], None]] = deque()
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, turn: Turn, positions: int) -> None:
        """Queues a turn, under the lock. Raises QueueFullError, EngineFailedError."""
        if self.failure is not None:
            raise self.failure
        self.scheduler.enqueue(turn.name, positions, turn.session.id if turn.session else None)
        self.turns[turn.name] = turn
        self._publish_queue()
        self.lock.notify_all()

    def cancel(self, name: str) -> None:
        """Ends a turn: a waiting one at once, a running one at its next work item."""
        with self.lock:
            turn = self.turns.get(name)
            if turn is None:
                return
            turn.cancel_requested = True
            if self.scheduler.phase(name) is Phase.QUEUED:
                self._forget(turn)
                self._release(turn, GenerationState.CANCELLED, FinishReason.CANCELLED)
            elif turn.stepping and turn.sequence is not None:
                turn.sequence.cancel()
            self.lock.notify_all()

    def call(self, work: Callable[[], None]) -> None:
        """Runs `work` on the engine's thread between two steps, and waits for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        with self.lock:
            if self.alive and not self._draining:
                self._commands.append(run)
                self.lock.notify_all()
                run_here = False
            else:
                run_here = True
        if run_here:
            if self._thread.ident is not None:
                self._thread.join()
            run()
        done.result()

    def stop(self, timeout: float | None) -> bool:
        """Pauses everything at its next token boundary, saves it and ends the thread; whether it ended in time."""
        with self.lock:
            self._draining = True
            for turn in self.turns.values():
                if turn.stepping and turn.cursor is not None and turn.sequence is not None:
                    turn.sequence.cancel()  # a prompt has no boundary worth waiting for
            self.lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._once():
                pass
            self.sequences.save_all()
        except Exception as error:
            log.critical("the engine failed", exc_info=True)
            self._fail_all(EngineFailedError(f"the engine failed: {error!r}"))
        finally:
            with self.lock:
                self._draining = True
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            self.sequences.close_all()

    def _once(self) -> bool:
        with self.lock:
            self._wait_for_work()
            commands, self._commands = self._commands, deque()
            evicted, admitted = self.scheduler.take_evicted(), self.scheduler.take_admitted()
            self._publish_queue()
            turns = list(self.turns.values())
            draining = self._draining
        for command in commands:
            command()
        for session in evicted:
            self.sequences.evict(session)
        if draining:
            for turn in turns:
                self._finish(turn, GenerationState.PAUSED)
            return False
        for name in admitted:
            self._begin(self.turns[name])
        for turn in turns:
            self._end_if_asked(turn)
        self._restore()
        with self.lock:
            plan = self.scheduler.plan()
        if plan:
            self._step(plan)
        self._save_pages()
        return True

    def _wait_for_work(self) -> None:
        while not (self._commands or self.turns or self._draining):
            self.counters.clock.idle()
            unsaved = self.sequences.unsaved
            self.lock.wait(RETRY_SECONDS if unsaved else None)
            if unsaved:
                return

    def _publish_queue(self) -> None:
        for position, name in enumerate(self.scheduler.queued, 1):
            generation = self.turns[name].generation
            if generation.view().queue_position != position:
                generation.update(queue_position=position)

    def _end_if_asked(self, turn: Turn) -> None:
        if turn.name not in self.turns:
            return
        if turn.cancel_requested:
            self._finish(turn, GenerationState.CANCELLED, FinishReason.CANCELLED)
        elif turn.overdue:
            self._finish(turn, GenerationState.SUCCEEDED, FinishReason.TIME_LIMIT)

    # ---- sequences

    def _begin(self, turn: Turn) -> None:
        """Gives an admitted turn its sequence: the session's live one, or a new one with pages to restore."""
        turn.admitted()
        session = turn.session
        try:
            if session is None:
                turn.sequence = self.model.sequence()
            else:
                if session.sequence is None:
                    turn.restoring.extend(self.sequences.open(session, turn.prompt, turn.chain))
                self.sequences.resume(session)
                turn.sequence = session.sequence
        except Exception as error:
            self._fail(turn, error)
            return
        turn.generation.update(state=GenerationState.PREFILLING, queue_position=0, usage=turn.usage)
        if not turn.restoring:
            self._ready(turn)

    def _restore(self) -> None:
        """Imports stored pages for as long as a prompt may hold up those that decode."""
        until = time.monotonic_ns() + self._budget_us * 1000
        for turn in list(self.turns.values()):
            while turn.restoring and time.monotonic_ns() < until and not turn.cancel_requested:
                try:
                    self._restore_page(turn)
                except Exception as error:
                    self._fail(turn, error)
                    break
                if not turn.restoring:
                    self._ready(turn)

    def _restore_page(self, turn: Turn) -> None:
        assert turn.session is not None
        if self.sequences.restore(turn.session, turn.restoring.popleft()):
            turn.generation.update(prompt_tokens_done=self._sequence(turn).length)
        else:
            turn.restoring.clear()

    def _ready(self, turn: Turn) -> None:
        turn.ready(self._sequence(turn).length)
        with self.lock:
            self.scheduler.start_prefill(turn.name, len(turn.prompt) - turn.kv_before)
        turn.generation.update(usage=turn.usage, prompt_tokens_done=turn.kv_before, re_prefilled=turn.re_prefilled)

    def close_idle(self, session: Session) -> None:
        """Closes the sequence of a session that is about to be deleted."""
        self.sequences.close(session)
        with self.lock:
            self.scheduler.forget_idle(session.id)

    # ---- the step

    def _step(self, plan: Plan) -> None:
        decoding = [(turn, self._row(turn)) for turn in map(self.turns.__getitem__, plan.decode)]
        prefilling = [(turn, cursor) for turn, cursor in map(self._cursor, plan.prefills) if cursor is not None]
        turns = [turn for turn, _ in decoding] + [turn for turn, _ in prefilling]
        with self.lock:
            for turn in turns:
                turn.stepping = not turn.cancel_requested
        rows = [row for turn, row in decoding if turn.stepping]
        cursors = [cursor for turn, cursor in prefilling if turn.stepping]
        self.counters.clock.begin(bool(rows))
        try:
            self.model.step(rows, cursors, self._budget_us)
        finally:
            self.counters.clock.end(bool(rows))
            with self.lock:
                stepped = [turn.stepping for turn in turns]
                for turn in turns:
                    turn.stepping = False
        ran = dict(zip((turn.name for turn in turns), stepped, strict=True))
        for turn, row in decoding:
            if ran[turn.name]:
                self._decoded(turn, row)
        for turn, cursor in prefilling:
            if ran[turn.name]:
                self._prefilled(turn, cursor)

    def _row(self, turn: Turn) -> RowPort:
        return self.model.row(self._sequence(turn), turn.pending, turn.spec.sampling)

    def _cursor(self, item: Pass) -> tuple[Turn, PrefillPort | None]:
        turn = self.turns[item.key]
        if turn.cursor is None:
            sequence = self._sequence(turn)
            tokens = turn.prompt[sequence.length : sequence.length + item.positions]
            try:
                turn.cursor = self.model.prefill(sequence, tokens, turn.spec.sampling)
            except Exception as error:
                self._fail(turn, error)
                return turn, None
            turn.cursor_positions = item.positions
        return turn, turn.cursor

    @staticmethod
    def _sequence(turn: Turn) -> SequencePort:
        assert turn.sequence is not None
        return turn.sequence

    def _decoded(self, turn: Turn, row: RowPort) -> None:
        if row.error is not None:
            self._failed(turn, row.error)
            return
        turn.count(row.counts)
        self.counters.experts(row.counts)
        self._produced(turn, row.next_token)

    def _prefilled(self, turn: Turn, cursor: PrefillPort) -> None:
        if cursor.error is not None:
            self._close_cursor(turn)
            self._failed(turn, cursor.error)
            return
        sequence = self._sequence(turn)
        if not cursor.done:
            turn.generation.update(prompt_tokens_done=sequence.length + cursor.positions_done)
            return
        turn.count(cursor.counts)
        self.counters.experts(cursor.counts)
        token, positions = cursor.next_token, turn.cursor_positions
        self._close_cursor(turn)
        self.counters.prompt(positions)
        with self.lock:
            last = self.scheduler.prefilled(turn.name, positions)
        turn.generation.update(prompt_tokens_done=sequence.length, usage=turn.usage)
        if last:
            self._produced(turn, token)

    def _failed(self, turn: Turn, error: Exception) -> None:
        """A cancel that nobody asked for was meant for an earlier item of this sequence: the item runs again."""
        if not is_cancelled(error):
            self._fail(turn, error)

    def _fail(self, turn: Turn, error: Exception) -> None:
        self._faults.failed(turn.name, error)
        self._finish(turn, GenerationState.FAILED, FinishReason.ERROR, daemon_error(error))

    def _close_cursor(self, turn: Turn) -> None:
        if turn.cursor is not None:
            turn.cursor.close()
            turn.cursor = None

    # ---- tokens

    def _produced(self, turn: Turn, token: int) -> None:
        """Takes a sampled token: kept in any case, and perhaps the last."""
        turn.pending = token
        turn.token()
        self.counters.token()
        error: DaemonError | None = None
        reason, stop_token = FinishReason.UNSPECIFIED, None
        try:
            text_stop = turn.spec.stop_check is not None and turn.spec.stop_check.push(token)
        except Exception as cause:
            log.exception("%s: the stop check failed", turn.name)
            text_stop, error = False, EngineFailedError(f"the stop check failed: {cause!r}")
        if error is not None:
            reason = FinishReason.ERROR
        elif token in turn.spec.eos_token_ids:
            reason, stop_token = FinishReason.EOS, token
        elif token in turn.spec.stop_token_ids:
            reason, stop_token = FinishReason.STOP_SEQUENCE, token
        elif text_stop:
            reason = FinishReason.STOP_SEQUENCE
        elif turn.produced >= turn.limit:
            reason = turn.limit_reason
        self._record(turn, token)
        turn.generation.append(token, state=GenerationState.DECODING, usage=turn.usage)
        if reason is not FinishReason.UNSPECIFIED:
            state = GenerationState.FAILED if error is not None else GenerationState.SUCCEEDED
            self._finish(turn, state, reason, error, stop_token)

    def _record(self, turn: Turn, token: int) -> None:
        """Commits the token to its session; the first one commits the turn's input too."""
        session = turn.session
        if session is None:
            return
        entries = [Entry(Kind.SAMPLED, (token,))]
        if turn.produced == 1:
            start = start_record(turn)
            begun = Entry(Kind.GEN_START, payload=encode_json(start))
            entries = [begun, Entry(Kind.INPUT, turn.spec.input_ids), *entries]
            session.tokens.extend(turn.spec.input_ids)
            session.chain = turn.chain
            session.logged.append(LoggedGeneration(start, turn.history, len(turn.prompt)))
        session.tokens.append(token)
        session.logged[-1].count += 1
        first, generation = len(turn.prompt), turn.generation

        def on_result(result: AppendResult) -> None:
            if result.durable:
                generation.update(durable_offset=result.position - first)

        self.sequences.append(session, HeldRecords(entries, len(session.tokens), False, on_result))

    # ---- the end of a turn

    def _finish(
        self,
        turn: Turn,
        state: GenerationState,
        reason: FinishReason = FinishReason.UNSPECIFIED,
        error: DaemonError | None = None,
        stop_token: int | None = None,
    ) -> None:
        """Ends a turn: its sequence stays with the session if its KV is that of committed tokens, its log gets the end,
        and then, once that is durable, readers learn of it and the session is free."""
        self._close_cursor(turn)
        session, idle = turn.session, 0
        if session is None:
            if turn.sequence is not None:
                turn.sequence.close()
        elif session.sequence is not None:
            length = session.sequence.length
            untouched = turn.sequence is None or (not turn.restoring and length == turn.kv_before)
            if turn.produced or (untouched and length <= len(session.tokens)):
                idle = length
                self.sequences.keep(session)
            if not idle:
                self.sequences.drop(session, keep_prompt=state is GenerationState.PAUSED)
        turn.sequence = None
        with self.lock:
            self._forget(turn, idle)
        if session is None or not turn.produced:
            self._release(turn, state, reason, error, stop_token)
            return
        end = session.logged[-1].end = end_record(turn, state, reason, stop_token, error)

        def on_result(result: AppendResult) -> None:
            if result.durable:
                turn.generation.update(durable_offset=turn.produced)
            self._release(turn, state, reason, error, stop_token)

        entry = Entry(Kind.GEN_END, payload=encode_json(end))
        self.sequences.append(session, HeldRecords([entry], len(session.tokens), True, on_result))

    def _forget(self, turn: Turn, idle_positions: int = 0) -> None:
        """Takes a turn out of the schedule; under the lock."""
        self.scheduler.remove(turn.name, idle_positions)
        del self.turns[turn.name]
        self._publish_queue()

    def _release(
        self,
        turn: Turn,
        state: GenerationState,
        reason: FinishReason,
        error: DaemonError | None = None,
        stop_token: int | None = None,
    ) -> None:
        """Frees the session first: whoever sees the end may start the next turn at once."""
        if turn.session is not None:
            turn.session.last_used = time.time()
            turn.session.active = ""
        if turn.generation.finished:
            return
        turn.generation.update(
            state=state,
            finish_reason=reason,
            error=error,
            stop_token=stop_token,
            usage=turn.usage,
            queue_position=0,
            expire_time=time.time() + self._retain_seconds,
        )

    def _fail_all(self, error: DaemonError) -> None:
        with self.lock:
            self.failure = error
            turns = list(self.turns.values())
        for turn in turns:
            try:
                self._finish(turn, GenerationState.FAILED, FinishReason.ERROR, error)
            except Exception:
                log.critical("%s cannot be ended in order", turn.name, exc_info=True)
                self._release(turn, GenerationState.FAILED, FinishReason.ERROR, error)

    def _save_pages(self) -> None:
        for turn in list(self.turns.values()):
            if turn.session is not None and turn.sequence is not None and not turn.restoring:
                tokens = turn.session.tokens if turn.produced else turn.prompt
                self.sequences.save_full(turn.session, tokens, turn.chain)
        self.sequences.save_idle()
