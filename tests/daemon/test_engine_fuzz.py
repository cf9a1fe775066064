"""Random lives of an engine against a model of it: turns, cancels, restarts, crashes, lost pages, deletions.

The model is a list of tokens per session. Whatever happens, a session holds what was committed to it, every answer is
the one that its whole history gives, and nothing stays open.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from colibri.daemon.errors import ContextExceededError, SessionBusyError
from colibri.daemon.generation import Generation, GenerationState, SamplingSpec
from testkit.engine import EVER, Bench
from testkit.fake_model import FakeModel, continuation
from testkit.sessions import spoil

SESSIONS = ("alpha", "beta", "gamma")
sessions = st.sampled_from(SESSIONS)


def small_model() -> FakeModel:
    return FakeModel(max_context=320, kv_pages=9, max_rows=3, pass_tokens=70, positions_per_step=30)


class EngineLife(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.crashes = 0
        self.bench = Bench(self.root, small_model(), prefill_budget_us=1)  # one page restored per step
        self.history: dict[str, list[int]] = {}
        self.pending: dict[str, tuple[Generation, list[int]]] = {}
        self.stateless: list[tuple[Generation, list[int], SamplingSpec]] = []
        for session in SESSIONS:
            self.bench.engine.create_session(session)
            self.history[session] = []

    @rule(session=sessions, length=st.integers(1, 100), first=st.sampled_from([0, 300]), count=st.integers(1, 40))
    def turn(self, session: str, length: int, first: int, count: int) -> None:
        given = [first + n for n in range(length)]
        try:
            generation = self.bench.submit(given, session, max_tokens=count)
        except SessionBusyError:
            assert session in self.pending
        except ContextExceededError:
            self.wait(session)  # the turn before is over, or this one had been refused as busy: its tokens count
            assert len(self.history[session]) + length + count > 320
        else:
            if session in self.pending:  # the turn before is over: it must be known before the next is judged
                self.settle(session, over=generation)
            self.pending[session] = (generation, given)

    @rule(length=st.integers(1, 150), first=st.integers(0, 500), seed=st.integers(0, 3))
    def alone(self, length: int, first: int, seed: int) -> None:
        given = [first + n for n in range(length)]
        sampling = SamplingSpec(temperature=float(seed % 2), seed=seed)
        self.stateless.append((self.bench.submit(given, sampling=sampling, max_tokens=8), given, sampling))

    @rule(session=sessions)
    def cancel(self, session: str) -> None:
        if session in self.pending:
            self.bench.engine.cancel(self.pending[session][0].name)

    @rule(session=sessions)
    def wait(self, session: str) -> None:
        if session in self.pending:
            self.settle(session)

    def settle(self, session: str, over: Generation | None = None) -> None:
        """Takes a finished turn into the history. `over`: a later turn of the session that has begun already."""
        generation, given = self.pending.pop(session)
        view = generation.result(EVER)
        assert view.state in (GenerationState.SUCCEEDED, GenerationState.CANCELLED, GenerationState.PAUSED)
        history, produced = self.history[session], generation.tokens()
        assert produced == continuation([*history, *given], len(produced))
        assert view.durable_offset == len(produced)
        if produced:
            self.history[session] = [*history, *given, *produced]
        if over is None:
            assert self.bench.engine.session_tokens(session) == self.history[session]

    def settle_all(self) -> None:
        for session in list(self.pending):
            self.settle(session)
        for generation, given, sampling in self.stateless:
            view = generation.result(EVER)
            tokens = generation.tokens()
            assert tokens == continuation(given, len(tokens), sampling)
            assert view.state is GenerationState.PAUSED or len(tokens) == 8
        self.stateless.clear()

    def check_sessions(self) -> None:
        for session, history in self.history.items():
            assert self.bench.engine.session_tokens(session) == history

    @rule()
    def restart(self) -> None:
        self.bench.stop()
        self.bench.model = small_model()
        ended = self.bench.engine
        self.bench.start()
        assert ended is not self.bench.engine
        self.settle_all()
        self.check_sessions()

    @rule()
    def crash(self) -> None:
        """Goes on with what is on the drive now: at least what is durable now, at most a token or two more."""
        durable = {session: turn[0].view().durable_offset for session, turn in self.pending.items()}
        self.bench.store.flush()
        self.crashes += 1
        crashed = self.bench.crash(self.root / f"crash-{self.crashes}", small_model(), prefill_budget_us=1)
        self.bench.stop()
        self.stateless.clear()
        self.bench = crashed
        for session, (_, given) in self.pending.items():
            tokens, before = crashed.engine.session_tokens(session), self.history[session]
            if tokens == before:
                assert durable[session] == 0
                continue
            start = len(before) + len(given)
            assert len(tokens) >= start + max(1, durable[session])
            assert tokens == [*before, *given, *continuation([*before, *given], len(tokens) - start)]
            self.history[session] = tokens
        self.pending.clear()
        self.check_sessions()

    @rule(session=sessions, page=st.integers(0, 3), data=st.binary(max_size=40))
    def damage_a_page(self, session: str, page: int, data: bytes) -> None:
        self.bench.stop()
        links = sorted(self.bench.root.glob(f"sessions/*/{session}/kv/*.kvp"))
        if page < len(links):
            spoil(links[page], data)
        self.bench.model = small_model()
        self.bench.start()
        self.settle_all()
        self.check_sessions()

    @rule(session=sessions)
    def delete(self, session: str) -> None:
        self.bench.engine.delete_session(session, force=True)
        self.pending.pop(session, None)
        self.bench.engine.create_session(session)
        self.history[session] = []

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.settle_all()
            self.bench.stop()
            assert list((self.bench.root / "quarantine").glob("*tokens.log")) == []
            shutil.rmtree(self.root)


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
