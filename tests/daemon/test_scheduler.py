"""The scheduler against a simple model: nothing is forgotten, starved, admitted without pages, or planned twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from colibri.daemon.errors import ContextExceededError, QueueFullError
from colibri.daemon.scheduler import Limits, Pass, Phase, Scheduler, pages_for

LIMITS = Limits(max_rows=4, max_prefills=1, pass_tokens=100, max_context=640, kv_pages=10, max_queue=2)


def scheduler(**changes: int) -> Scheduler:
    return Scheduler(Limits(**{**LIMITS.__dict__, **changes}))


def started(s: Scheduler, key: str, positions: int, prompt: int, session: str | None = None) -> None:
    s.enqueue(key, positions, session)
    assert s.take_admitted() == [key]
    s.start_prefill(key, prompt)


class TestTheContext:
    @pytest.mark.parametrize("prompt", [62, 63, 64, 65, 1000])
    @pytest.mark.parametrize("max_tokens", [1, 16, None])
    def test_a_prompt_and_its_output_fit_or_are_refused_with_both_numbers(
        self, prompt: int, max_tokens: int | None
    ) -> None:
        s = scheduler(max_context=64)
        if prompt + (max_tokens or 1) <= 64:
            assert s.token_limit(prompt, max_tokens) == (max_tokens or 64 - prompt)
        else:
            with pytest.raises(ContextExceededError) as caught:
                s.token_limit(prompt, max_tokens)
            assert caught.value.metadata["prompt_tokens"] == str(prompt)
            assert caught.value.metadata["limit"] == "64"
            assert f"{prompt} tokens" in str(caught.value)

    def test_the_kv_pages_bound_the_context_too(self) -> None:
        assert Limits(1, 1, 1, max_context=1000, kv_pages=3).context == 192


class TestTheQueue:
    def test_first_come_first_served_with_positions(self) -> None:
        s = scheduler(max_rows=1)
        for key in ("a", "b", "c"):
            s.enqueue(key, 64)
        assert (s.running, s.queued) == (("a",), ("b", "c"))
        assert [s.queue_position(key) for key in ("a", "b", "c")] == [0, 1, 2]
        s.remove("b")
        assert s.queue_position("c") == 1
        s.remove("a")
        assert s.running == ("c",)

    def test_a_full_queue_fails_at_once_and_changes_nothing(self) -> None:
        s = scheduler(max_rows=1)
        for key in ("a", "b", "c"):
            s.enqueue(key, 64)
        with pytest.raises(QueueFullError, match="the queue holds 2"):
            s.enqueue("d", 64)
        assert (s.running, s.queued) == (("a",), ("b", "c"))

    def test_without_a_queue_what_can_run_at_once_runs(self) -> None:
        s = scheduler(max_queue=0)
        for key in "abcd":
            s.enqueue(key, 128)
        with pytest.raises(QueueFullError):
            s.enqueue("e", 64)

    def test_a_large_one_waits_for_pages_and_is_not_overtaken(self) -> None:
        s = scheduler()
        s.enqueue("a", 6 * 64)
        s.enqueue("large", 5 * 64)
        s.enqueue("small", 64)
        assert (s.running, s.queued) == (("a",), ("large", "small"))
        s.remove("a")
        assert s.take_admitted() == ["large", "small"]

    def test_cancelled_between_admission_and_start(self) -> None:
        s = scheduler()
        s.enqueue("a", 64)
        s.remove("a")
        assert s.take_admitted() == []


class TestSteps:
    def test_prompts_are_cut_into_passes_in_order_while_others_decode(self) -> None:
        s = scheduler()
        started(s, "a", 128, 10)
        s.prefilled("a", 10)
        started(s, "b", 256, 250)
        started(s, "c", 64, 5)
        for positions, last in ((100, False), (100, False), (50, True)):
            assert s.plan().decode == ("a",)
            assert s.plan().prefills == (Pass("b", positions),)
            assert s.plan() == s.plan()
            assert s.prefilled("b", positions) is last
        assert s.plan().decode == ("a", "b")
        assert s.plan().prefills == (Pass("c", 5),)

    def test_a_prompt_that_becomes_ready_does_not_push_out_one_that_is_under_way(self) -> None:
        s = scheduler()
        for key in ("restoring", "ready"):
            s.enqueue(key, 256)
        s.start_prefill("ready", 150)
        assert s.plan().prefills == (Pass("ready", 100),)
        s.start_prefill("restoring", 20)
        assert s.plan().prefills == (Pass("ready", 100),)
        s.prefilled("ready", 100)
        assert s.plan().prefills == (Pass("ready", 50),)

    def test_several_cursors_where_there_are_workspaces(self) -> None:
        s = scheduler(max_prefills=2)
        for key in "abc":
            started(s, key, 64, 20)
        assert [p.key for p in s.plan().prefills] == ["a", "b"]


class TestIdleSequences:
    def test_the_one_unused_for_longest_goes_first_and_only_when_needed(self) -> None:
        s = scheduler()
        for key in ("one", "two", "three"):
            started(s, key, 3 * 64, 64, session=key)
            s.remove(key, idle_positions=3 * 64)
        assert s.pages_used == 9
        s.enqueue("a", 64)
        assert s.take_evicted() == []
        s.enqueue("b", 2 * 64)
        assert s.take_evicted() == ["one"]
        s.enqueue("c", 4 * 64)
        assert s.take_evicted() == ["two"]
        assert s.idle == ("three",)

    def test_a_session_that_comes_back_keeps_its_own_sequence(self) -> None:
        s = scheduler()
        for key in ("one", "two"):
            started(s, key, 5 * 64, 64, session=key)
            s.remove(key, idle_positions=5 * 64)
        s.enqueue("again", 7 * 64, session="one")
        assert s.take_evicted() == ["two"]
        assert s.take_admitted() == ["again"]
        assert s.pages_used == 7


class Model(RuleBasedStateMachine):
    """Random submits, steps and cancels; the model is a list of what was accepted, in order."""

    keys = Bundle("keys")

    @initialize(rows=st.integers(1, 4), prefills=st.integers(1, 2), pages=st.integers(1, 12), queue=st.integers(0, 3))
    def begin(self, rows: int, prefills: int, pages: int, queue: int) -> None:
        self.limits = Limits(rows, prefills, 50, 500, pages, queue)
        self.s = Scheduler(self.limits)
        self.order: list[str] = []  # accepted and not over
        self.pages: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.idle: dict[str, int] = {}
        self.admitted: list[str] = []
        self.started: list[str] = []
        self.decoding: set[str] = set()
        self.serial = 0

    @rule(target=keys, prompt=st.integers(1, 300), output=st.integers(1, 300), session=st.sampled_from("xyz"))
    def submit(self, prompt: int, output: int, session: str) -> object:
        try:
            limit = self.s.token_limit(prompt, output)
        except ContextExceededError:
            assert prompt + output > self.limits.context
            return multiple()
        busy = {key[0] for key in self.order}
        key = f"{session if session not in busy else '-'}{self.serial}"
        self.serial += 1
        before = (self.s.queued, self.s.running, self.s.idle)
        try:
            self.s.enqueue(key, prompt + limit, session if key[0] == session else None)
        except QueueFullError:
            assert len(self.s.queued) >= self.limits.max_queue
            assert before == (self.s.queued, self.s.running, self.s.idle)
            return multiple()
        self.order.append(key)
        self.pages[key], self.prompt[key] = pages_for(prompt + limit), prompt
        return key

    @rule()
    def admit(self) -> None:
        for session in self.s.take_evicted():
            del self.idle[session]
        for key in self.s.take_admitted():
            assert key in self.order
            self.idle.pop(key[0], None)
            self.admitted.append(key)

    @rule(choice=st.integers(0, 3))
    def start(self, choice: int) -> None:
        """KV gets ready in any order: some are restored from pages first."""
        self.admit()
        if self.admitted:
            key = self.admitted.pop(choice % len(self.admitted))
            self.started.append(key)
            self.s.start_prefill(key, self.prompt[key])

    @rule(share=st.integers(0, 3))
    def step(self, share: int) -> None:
        self.admit()
        plan = self.s.plan()
        assert set(plan.decode) == self.decoding
        prefilling = [key for key in self.started if key not in self.decoding]
        assert [p.key for p in plan.prefills] == prefilling[: self.limits.max_prefills]
        assert all(0 < p.positions <= self.limits.pass_tokens for p in plan.prefills)
        for done in plan.prefills[:share]:
            self.prompt[done.key] -= done.positions
            assert self.s.prefilled(done.key, done.positions) is (self.prompt[done.key] == 0)
            if self.prompt[done.key] == 0:
                self.decoding.add(done.key)

    @rule(key=consumes(keys), keep=st.booleans())
    def end(self, key: str, keep: bool) -> None:
        """Finished or cancelled, in any phase."""
        running = key in self.decoding
        keep = keep and running and key[0] != "-"
        self.s.remove(key, idle_positions=self.pages[key] * 64 if keep else 0)
        self.order.remove(key)
        for phase in (self.admitted, self.started):
            if key in phase:
                phase.remove(key)
        self.decoding.discard(key)
        if keep:
            self.idle[key[0]] = self.pages[key]

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "s"):
            return
        assert len(self.s.running) <= self.limits.max_rows
        assert len(self.s.queued) <= self.limits.max_queue
        assert self.s.pages_used <= self.limits.kv_pages
        reserved = sum(self.pages[key] for key in self.s.running)
        assert reserved + sum(self.idle[session] for session in self.s.idle) == self.s.pages_used

    @invariant()
    def first_come_first_served(self) -> None:
        if not hasattr(self, "s"):
            return
        assert list(self.s.running) + list(self.s.queued) == self.order
        if self.s.queued:  # the head waits for a reason
            reserved = sum(self.pages[key] for key in self.s.running)
            head = self.pages[self.s.queued[0]]
            assert len(self.s.running) == self.limits.max_rows or reserved + head > self.limits.kv_pages
        assert all(self.s.phase(key) is Phase.QUEUED for key in self.s.queued)


TestAgainstTheModel = Model.TestCase
TestAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
