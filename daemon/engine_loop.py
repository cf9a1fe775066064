"""The engine's thread: one step of the model after the other, as long as anything runs.

Owns the model and every sequence: nobody else touches them, but for cancelling. Between two steps it carries out what
was asked of it, closes and restores sequences, and hands finished pages to the store; it never writes to a drive itself
and never waits for one that writes. While nothing runs it gives upkeep small pieces of time. Each turn is atomic: until
its first token, its session is as it was before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from colibri.daemon.errors import DaemonError, EngineFailedError
from colibri.daemon.generation import FinishReason, GenerationState
from colibri.daemon.live_sequences import RETRY_SECONDS, LiveSequences
from colibri.daemon.meters import EngineCounters
from colibri.daemon.model_port import ModelPort, PrefillPort, RowPort, SequencePort
from colibri.daemon.running_turns import RunningTurns
from colibri.daemon.scheduler import Pass, Phase, Plan, Scheduler
from colibri.daemon.sessions import Session
from colibri.daemon.store.store import SessionStore
from colibri.daemon.turn import Turn

log = logging.getLogger("colibri.daemon.engine")

BOUNDARY_SECONDS = 5.0  # that a step of tokens has at the end; on good drives it takes a fraction of that


class Upkeep(Protocol):
    """Work on the model beside the generations, on the engine's thread. What it raises is logged and ends it."""

    def stepped(self) -> None:
        """After each step; takes next to no time."""

    def idle(self) -> float | None:
        """A short piece of work while nothing runs: whoever comes now waits for it. Returns after how many seconds
        there is more to do, None if not before the next step."""

    def end(self) -> None:
        """After the last step."""


class NoUpkeep:
    """Nothing to do."""

    def stepped(self) -> None:
        pass

    def idle(self) -> float | None:
        return None

    def end(self) -> None:
        pass


class EngineLoop:
    """`lock` covers `scheduler`, the turns and the commands; all else belongs to the thread. `retain_seconds` is how
    long after its end a generation can be asked for. `prefill_budget_us` bounds how long decoding waits for a
    prompt."""

    def __init__(
        self,
        model: ModelPort,
        store: SessionStore,
        scheduler: Scheduler,
        prefill_budget_us: int,
        retain_seconds: float,
        upkeep: Upkeep | None = None,
    ) -> None:
        self.model, self.store, self.scheduler = model, store, scheduler
        self.sequences = LiveSequences(model, store)
        self.counters = EngineCounters()
        self._turns = RunningTurns(scheduler, self.sequences, self.counters, retain_seconds)
        self.lock = self._turns.lock
        self.failure: DaemonError | None = None
        self._upkeep: Upkeep = upkeep or NoUpkeep()
        self._budget_us = prefill_budget_us
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
        self._turns.by_name[turn.name] = turn
        self._turns.publish_queue()
        self.lock.notify_all()

    def cancel(self, name: str) -> None:
        """Ends a turn: a waiting one at once, a running one at its next work item."""
        with self.lock:
            turn = self._turns.by_name.get(name)
            if turn is None:
                return
            turn.cancel_requested = True
            if self.scheduler.phase(name) is Phase.QUEUED:
                self._turns.forget(turn)
                self._turns.release(turn, GenerationState.CANCELLED, FinishReason.CANCELLED)
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
        """Pauses everything at its next token boundary, saves it and ends the thread; whether it ended in time.

        A token that does not come within BOUNDARY_SECONDS, as from a drive that hardly answers, is given up: its
        sequence is then what it was before it.
        """
        boundary = BOUNDARY_SECONDS if timeout is None else min(timeout, BOUNDARY_SECONDS)
        with self.lock:
            self._draining = True
            self._cancel_stepping(prompts_only=True)
            self.lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join(boundary)
            if self._thread.is_alive():
                with self.lock:
                    self._cancel_stepping(prompts_only=False)
                self._thread.join(None if timeout is None else timeout - boundary)
        return not self._thread.is_alive()

    def _cancel_stepping(self, *, prompts_only: bool) -> None:
        """Under the lock. A prompt has no boundary worth waiting for."""
        for turn in self._turns.by_name.values():
            if turn.stepping and turn.sequence is not None and (turn.cursor is not None or not prompts_only):
                turn.sequence.cancel()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._once():
                pass
            self.sequences.save_all()
            self._tend(self._upkeep.end)
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
        self._wait_for_work()
        with self.lock:
            commands, self._commands = self._commands, deque()
            evicted, admitted = self.scheduler.take_evicted(), self.scheduler.take_admitted()
            self._turns.publish_queue()
            turns = list(self._turns.by_name.values())
            draining = self._draining
        for command in commands:
            command()
        for session in evicted:
            self.sequences.evict(session)
        if draining:
            for turn in turns:
                self._turns.finish(turn, GenerationState.PAUSED)
            return False
        for name in admitted:
            self._begin(self._turns.by_name[name])
        for turn in turns:
            self._end_if_asked(turn)
        self._restore()
        with self.lock:
            plan = self.scheduler.plan()
        if plan:
            self._step(plan)
            self._tend(self._upkeep.stepped)
        self._save_pages()
        return True

    def _wait_for_work(self) -> None:
        """Returns when there is something to do. Until then upkeep gets its time, and pages of idle sessions that did
        not fit into the store's queue are offered again."""
        while not self._busy():
            self.counters.clock.idle()
            pause = self._tend(self._upkeep.idle)
            with self.lock:
                if self._busy():
                    return
                unsaved = self.sequences.unsaved
                pauses = [seconds for seconds in (RETRY_SECONDS if unsaved else None, pause) if seconds is not None]
                self.lock.wait(min(pauses) if pauses else None)
            if unsaved:
                return

    def _busy(self) -> bool:
        return bool(self._commands or self._turns.by_name or self._draining)

    def _tend(self, work: Callable[[], float | None]) -> float | None:
        """Upkeep is only ever for speed: what goes wrong in it must not end anything else."""
        try:
            return work()
        except Exception:
            log.exception("upkeep failed; there is none until the next start")
            self._upkeep = NoUpkeep()
            return None

    def _end_if_asked(self, turn: Turn) -> None:
        if turn.name not in self._turns.by_name:
            return
        if turn.cancel_requested:
            self._turns.finish(turn, GenerationState.CANCELLED, FinishReason.CANCELLED)
        elif turn.overdue:
            self._turns.finish(turn, GenerationState.SUCCEEDED, FinishReason.TIME_LIMIT)

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
            self._turns.fail(turn, error)
            return
        turn.generation.update(state=GenerationState.PREFILLING, queue_position=0, usage=turn.usage)
        if not turn.restoring:
            self._ready(turn)

    def _restore(self) -> None:
        """Imports stored pages for as long as a prompt may hold up those that decode."""
        until = time.monotonic_ns() + self._budget_us * 1000
        for turn in list(self._turns.by_name.values()):
            while turn.restoring and time.monotonic_ns() < until and not turn.cancel_requested:
                try:
                    self._restore_page(turn)
                except Exception as error:
                    self._turns.fail(turn, error)
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
        decoding = [(turn, self._row(turn)) for turn in map(self._turns.by_name.__getitem__, plan.decode)]
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
        turn = self._turns.by_name[item.key]
        if turn.cursor is None:
            sequence = self._sequence(turn)
            tokens = turn.prompt[sequence.length : sequence.length + item.positions]
            try:
                turn.cursor = self.model.prefill(sequence, tokens, turn.spec.sampling)
            except Exception as error:
                self._turns.fail(turn, error)
                return turn, None
            turn.cursor_positions = item.positions
        return turn, turn.cursor

    @staticmethod
    def _sequence(turn: Turn) -> SequencePort:
        assert turn.sequence is not None
        return turn.sequence

    def _decoded(self, turn: Turn, row: RowPort) -> None:
        if row.error is not None:
            self._turns.failed(turn, row.error)
            return
        turn.count(row.counts)
        self.counters.experts(row.counts)
        self._turns.produced(turn, row.next_token)

    def _prefilled(self, turn: Turn, cursor: PrefillPort) -> None:
        if cursor.error is not None:
            turn.close_cursor()
            self._turns.failed(turn, cursor.error)
            return
        sequence = self._sequence(turn)
        if not cursor.done:
            turn.generation.update(prompt_tokens_done=sequence.length + cursor.positions_done)
            return
        turn.count(cursor.counts)
        self.counters.experts(cursor.counts)
        token, positions = cursor.next_token, turn.cursor_positions
        turn.close_cursor()
        self.counters.prompt(positions)
        with self.lock:
            last = self.scheduler.prefilled(turn.name, positions)
        turn.generation.update(prompt_tokens_done=sequence.length, usage=turn.usage)
        if last:
            self._turns.produced(turn, token)

    def _fail_all(self, error: DaemonError) -> None:
        with self.lock:
            self.failure = error
            turns = list(self._turns.by_name.values())
        for turn in turns:
            try:
                self._turns.finish(turn, GenerationState.FAILED, FinishReason.ERROR, error)
            except Exception:
                log.critical("%s cannot be ended in order", turn.name, exc_info=True)
                self._turns.release(turn, GenerationState.FAILED, FinishReason.ERROR, error)

    def _save_pages(self) -> None:
        for turn in list(self._turns.by_name.values()):
            if turn.session is not None and turn.sequence is not None and not turn.restoring:
                tokens = turn.session.tokens if turn.produced else turn.prompt
                self.sequences.save_full(turn.session, tokens, turn.chain)
        self.sequences.save_idle()
