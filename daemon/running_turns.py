"""The turns that are under way: their place in the queue, the tokens that they produce, and their ends.

Owns what becomes of a sampled token (is it the last one, its record in the log) and how a turn ends, well or not: its
sequence stays with the session if it holds what was committed, the log gets the end, and only then readers learn of it.
Nothing here waits for a drive. `lock` covers `scheduler` and `turns`; all else belongs to the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time

from colibri.daemon.core_errors import daemon_error, is_cancelled
from colibri.daemon.errors import DaemonError, EngineFailedError
from colibri.daemon.fault_log import FaultLog
from colibri.daemon.generation import FinishReason, GenerationState
from colibri.daemon.live_sequences import LiveSequences
from colibri.daemon.meters import EngineCounters
from colibri.daemon.scheduler import Scheduler
from colibri.daemon.sessions import HeldRecords
from colibri.daemon.store.token_log import Kind, LoggedGeneration, encode_json
from colibri.daemon.store.writer import AppendResult, Entry
from colibri.daemon.turn import Turn, end_record, start_record

log = logging.getLogger("colibri.daemon.engine")


class RunningTurns:
    """`by_name`: turns that wait or run. `retain_seconds`: how long after its end a generation can be asked for."""

    def __init__(
        self, scheduler: Scheduler, sequences: LiveSequences, counters: EngineCounters, retain_seconds: float
    ) -> None:
        self.lock = threading.Condition()
        self.by_name: dict[str, Turn] = {}
        self._scheduler, self._sequences, self._counters = scheduler, sequences, counters
        self._faults = FaultLog()
        self._retain_seconds = retain_seconds

    def publish_queue(self) -> None:
        """Tells those that wait their place, under the lock."""
        for position, name in enumerate(self._scheduler.queued, 1):
            generation = self.by_name[name].generation
            if generation.view().queue_position != position:
                generation.update(queue_position=position)

    def failed(self, turn: Turn, error: Exception) -> None:
        """A cancel that nobody asked for was meant for an earlier item of this sequence: the item runs again."""
        if not is_cancelled(error):
            self.fail(turn, error)

    def fail(self, turn: Turn, error: Exception) -> None:
        self._faults.failed(turn.name, error)
        self.finish(turn, GenerationState.FAILED, FinishReason.ERROR, daemon_error(error))

    # ---- tokens

    def produced(self, turn: Turn, token: int) -> None:
        """Takes a sampled token: kept in any case, and perhaps the last."""
        turn.pending = token
        turn.token()
        self._counters.token()
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
            self.finish(turn, state, reason, error, stop_token)

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

        self._sequences.append(session, HeldRecords(entries, len(session.tokens), False, on_result))

    # ---- the end of a turn

    def finish(
        self,
        turn: Turn,
        state: GenerationState,
        reason: FinishReason = FinishReason.UNSPECIFIED,
        error: DaemonError | None = None,
        stop_token: int | None = None,
    ) -> None:
        """Ends a turn: its sequence stays with the session if its KV is that of committed tokens, its log gets the end,
        and then, once that is durable, readers learn of it and the session is free."""
        turn.close_cursor()
        session, idle = turn.session, 0
        if session is None:
            if turn.sequence is not None:
                turn.sequence.close()
        elif session.sequence is not None:
            length = session.sequence.length
            untouched = turn.sequence is None or (not turn.restoring and length == turn.kv_before)
            if turn.produced or (untouched and length <= len(session.tokens)):
                idle = length
                self._sequences.keep(session)
            if not idle:
                self._sequences.drop(session, keep_prompt=state is GenerationState.PAUSED)
        turn.sequence = None
        with self.lock:
            self.forget(turn, idle)
        if session is None or not turn.produced:
            self.release(turn, state, reason, error, stop_token)
            return
        end = session.logged[-1].end = end_record(turn, state, reason, stop_token, error)

        def on_result(result: AppendResult) -> None:
            if result.durable:
                turn.generation.update(durable_offset=turn.produced)
            self.release(turn, state, reason, error, stop_token)

        entry = Entry(Kind.GEN_END, payload=encode_json(end))
        self._sequences.append(session, HeldRecords([entry], len(session.tokens), True, on_result))

    def forget(self, turn: Turn, idle_positions: int = 0) -> None:
        """Takes a turn out of the schedule; under the lock."""
        self._scheduler.remove(turn.name, idle_positions)
        del self.by_name[turn.name]
        self.publish_queue()

    def release(
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
