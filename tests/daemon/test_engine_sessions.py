"""Sessions through the engine: turns are atomic, nothing is computed twice, nothing that was called durable is lost."""

from __future__ import annotations

import errno
import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri.core.errors import CorruptError
from colibri.daemon import errors
from colibri.daemon.engine_api import SessionState
from colibri.daemon.generation import FinishReason, GenerationState
from colibri.daemon.model_port import PAGE_POSITIONS
from colibri.daemon.store import writer as writer_module
from testkit.engine import EVER, Bench, until
from testkit.fake_model import FakeModel, continuation

PROMPT = list(range(100, 190))  # one page and a part


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.engine.create_session("alpha")
    yield made
    made.stop()


def answer(history: list[int], given: list[int], count: int = 5) -> list[int]:
    """Appends a turn to `history` as the model would; returns what it produced."""
    history += given
    produced = continuation(history, count)
    history += produced
    return produced


def usage_of(bench: Bench, given: list[int], session: str = "alpha", **fields: Any) -> tuple[int, int, bool]:
    """Runs a turn; (prompt tokens, cached ones, re-prefilled)."""
    view = bench.submit(given, session, **fields).result(EVER)
    assert view.state is GenerationState.SUCCEEDED, view.error
    return view.usage.prompt_tokens, view.usage.cached_prompt_tokens, view.re_prefilled


class TestTurns:
    def test_append_to_what_is_there(self, bench: Bench) -> None:
        history: list[int] = []
        for given in (PROMPT, [7], list(range(70))):
            assert bench.run(given, "alpha") == answer(history, given)
        view = bench.engine.session("alpha")
        assert bench.engine.session_tokens("alpha") == history
        assert (view.position, view.durable_position, view.state) == (len(history), len(history), SessionState.LIVE)
        assert bench.model.prefilled + bench.model.decoded == len(history) - 1

    def test_only_the_last_sampled_token_and_the_input_are_computed(self, bench: Bench) -> None:
        assert usage_of(bench, PROMPT) == (90, 0, False)
        assert usage_of(bench, [1, 2, 3]) == (98, 94, False)

    def test_every_token_is_durable_at_the_end(self, bench: Bench) -> None:
        view = bench.submit(PROMPT, "alpha").result(EVER)
        assert view.durable_offset == view.next_offset == 5

    def test_a_stateless_generation_leaves_nothing(self, bench: Bench) -> None:
        bench.run(PROMPT)
        assert bench.model.open_sequences == []
        assert [view.position for view in bench.engine.sessions()] == [0]

    def test_one_at_a_time(self, bench: Bench) -> None:
        bench.model.item_seconds = 0.01
        running = bench.submit(PROMPT, "alpha", max_tokens=100)
        until(running, 1)
        with pytest.raises(errors.SessionBusyError) as caught:
            bench.submit([1], "alpha")
        assert caught.value.metadata["active_generation"] == running.name
        assert bench.engine.session("alpha").active_generation == running.name
        with pytest.raises(errors.SessionBusyError):
            bench.engine.delete_session("alpha")
        bench.engine.cancel(running.name)
        running.result(EVER)
        bench.model.item_seconds = 0
        bench.submit([1], "alpha").result(EVER)

    def test_two_callers_never_interleave(self, bench: Bench) -> None:
        for round_ in range(20):
            before = bench.engine.session_tokens("alpha")
            results: list[Any] = []

            def call(given: list[int], position: int, results: list[Any] = results) -> None:
                try:
                    results.append(bench.submit(given, "alpha", expected_position=position, max_tokens=2).result(EVER))
                except (errors.SessionBusyError, errors.PositionMismatchError) as error:
                    results.append(error)

            threads = [threading.Thread(target=call, args=([n + 1, round_], len(before))) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(EVER)
            assert sum(isinstance(result, errors.DaemonError) for result in results) == 1
            after = bench.engine.session_tokens("alpha")
            possible = []
            for given in ([1, round_], [2, round_]):
                possible.append(list(before))
                answer(possible[-1], given, 2)
            assert after in possible

    def test_the_position_must_be_the_expected_one(self, bench: Bench) -> None:
        bench.run(PROMPT, "alpha")
        with pytest.raises(errors.PositionMismatchError) as caught:
            bench.submit([1], "alpha", expected_position=94)
        assert caught.value.metadata["position"] == "95"
        bench.run([1], "alpha", expected_position=95)


class TestATurnIsAtomic:
    def test_a_refused_turn_leaves_the_session_as_it_was(self, bench: Bench) -> None:
        history: list[int] = []
        bench.run(PROMPT, "alpha")
        answer(history, PROMPT)
        bench.store.flush()  # the last page's bytes are counted when it is written
        before = bench.engine.session("alpha")
        for tokens, max_tokens in (([1] * 600, 5), ([5000], 5), ([1], 0), ([], 5)):
            with pytest.raises(errors.DaemonError):
                bench.submit(tokens, "alpha", max_tokens=max_tokens)
            assert bench.engine.session("alpha") == before
        assert usage_of(bench, [4]) == (96, 94, False)
        answer(history, [4])
        assert bench.engine.session_tokens("alpha") == history

    @pytest.mark.parametrize("how", ["error", "cancel", "time"])
    @pytest.mark.parametrize("passes", [0, 1])
    def test_so_does_one_that_ends_before_its_first_token(self, tmp_path: Path, how: str, passes: int) -> None:
        def item(kind: str, _: object) -> None:
            if kind == "prefill" and armed.is_set() and bench.model.prefilled > before + passes * 50:
                if how == "error":
                    raise CorruptError("expert 3")
                reached.set()
                release.wait(EVER)

        armed, reached, release = threading.Event(), threading.Event(), threading.Event()
        bench = Bench(tmp_path, FakeModel(pass_tokens=100, positions_per_step=10, before_item=item))
        bench.engine.create_session("alpha")
        history: list[int] = []
        assert bench.run(PROMPT, "alpha") == answer(history, PROMPT)
        before = bench.model.prefilled
        if passes == 0:
            before -= 1
        armed.set()
        turn = bench.submit(range(250), "alpha", max_duration=0.3 if how == "time" else None)
        if how != "error":
            assert reached.wait(EVER)
            if how == "cancel":
                bench.engine.cancel(turn.name)
            else:
                threading.Event().wait(0.35)
            release.set()
        view = turn.result(EVER)
        armed.clear()
        assert (view.next_offset, view.error is not None) == (0, how == "error")
        assert view.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.TIME_LIMIT)
        assert bench.engine.session_tokens("alpha") == history
        assert bench.engine.session("alpha").active_generation == ""
        expected = answer(history, [4])
        again = bench.submit([4], "alpha")
        # A pass that was done also computed the one position of the history that had no KV yet.
        assert (again.result(EVER).usage.cached_prompt_tokens, again.tokens()) == (94 + passes, expected)
        bench.restart()
        assert bench.engine.session_tokens("alpha") == history
        bench.stop()

    def test_a_cancelled_turn_keeps_what_it_produced(self, bench: Bench) -> None:
        bench.model.item_seconds = 0.005
        turn = bench.submit(PROMPT, "alpha", max_tokens=300)
        until(turn, 3)
        bench.engine.cancel(turn.name)
        view = turn.result(EVER)
        bench.model.item_seconds = 0
        history: list[int] = []
        produced = answer(history, PROMPT, view.next_offset)
        assert turn.tokens() == produced
        assert bench.engine.session_tokens("alpha") == history
        assert view.durable_offset == view.next_offset
        assert bench.run([1], "alpha") == answer(history, [1])

    def test_a_failed_row_keeps_what_was_produced(self, tmp_path: Path) -> None:
        def item(kind: str, _: object) -> None:
            if kind == "row" and model.decoded == 3:
                model.before_item = lambda *_: None
                raise CorruptError("expert 9")

        model = FakeModel(before_item=item)
        bench = Bench(tmp_path, model)
        bench.engine.create_session("alpha")
        history: list[int] = []
        turn = bench.submit(PROMPT, "alpha", max_tokens=50)
        view = turn.result(EVER)
        assert (view.state, view.next_offset) == (GenerationState.FAILED, 4)
        assert turn.tokens() == answer(history, PROMPT, 4)
        assert bench.run([1], "alpha") == answer(history, [1])
        bench.stop()


class TestMemory:
    def test_idle_sessions_give_way_and_come_back(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(kv_pages=8))
        histories: dict[str, list[int]] = {f"session-{n}": [] for n in range(6)}
        for name in histories:
            bench.engine.create_session(name)
        for turn in range(3):
            for number, (name, history) in enumerate(histories.items()):
                given = [number, turn] if turn else list(range(number, number + 120))
                before = max(0, len(history) - 1)
                expected = answer(history, given)
                generation = bench.submit(given, name)
                view = generation.result(EVER)
                assert generation.tokens() == expected
                assert (view.usage.cached_prompt_tokens, view.re_prefilled) == (before, False)
        assert bench.engine.stats().kv_pages_used <= 8
        states = [view.state for view in bench.engine.sessions()]
        assert states.count(SessionState.LIVE) < 6
        bench.stop()

    def test_many_sessions_do_not_stay_in_memory(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(kv_pages=8))
        bench.engine._table._max_settled = 5
        for number in range(20):
            name = f"session-{number}"
            bench.engine.create_session(name)
            bench.run([number], name)
        bench.store.flush()
        bench.engine.sessions()
        assert len(bench.engine._table.loaded()) <= 5 + 8
        assert bench.run([1], "session-0") == continuation([0, *continuation([0], 5), 1], 5)
        bench.stop()


class TestGrowth:
    def test_calls_leave_nothing_behind(self, tmp_path: Path) -> None:
        """The memory of 300 calls, finished, cancelled and refused, beyond what is retained on purpose."""
        bench = Bench(tmp_path, max_retained=20)
        bench.engine.create_session("alpha")

        def calls(count: int) -> None:
            for number in range(count):
                bench.run([number % 7, 3], max_tokens=2)
                turn = bench.submit(range(40), max_tokens=300)
                bench.engine.cancel(turn.name)
                turn.result(EVER)
                with pytest.raises(errors.ContextExceededError):
                    bench.submit([1] * 600)

        calls(50)
        gc.collect()
        tracemalloc.start()
        calls(10)
        before = tracemalloc.get_traced_memory()[0]
        calls(100)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        bench.stop()
        assert after - before < 300 * 256


class TestTheTable:
    def test_creating_is_idempotent(self, bench: Bench) -> None:
        first = bench.engine.create_session("beta", "Name", {"a": "b"}, "request")
        assert bench.engine.create_session("beta", "Name", {"a": "b"}, "request") == first
        with pytest.raises(errors.SessionExistsError):
            bench.engine.create_session("beta", "Other", {"a": "b"}, "request")
        made = bench.engine.create_session(request_id="q")
        assert bench.engine.create_session(request_id="q") == made
        assert bench.engine.create_session().session != bench.engine.create_session().session

    @pytest.mark.parametrize("name", ["", "abc", "Abcd", "1abc", "a/../b", "a" * 64, "abcd\n", "äbcd"])
    def test_ids_are_checked(self, bench: Bench, name: str) -> None:
        if name == "":
            return
        with pytest.raises(errors.InvalidFieldError, match="session id"):
            bench.engine.create_session(name)

    def test_deleting(self, bench: Bench) -> None:
        bench.run(PROMPT, "alpha")
        etag = bench.engine.session("alpha").etag
        with pytest.raises(errors.EtagMismatchError):
            bench.engine.delete_session("alpha", etag="other")
        bench.engine.delete_session("alpha", etag=etag)
        assert bench.engine.sessions() == []
        assert bench.model.open_sequences == []
        assert list(bench.root.glob("pages/*/*")) == []
        calls: list[Callable[[str], object]] = [bench.engine.session, bench.engine.session_tokens]
        for call in [*calls, bench.engine.delete_session]:
            with pytest.raises(errors.SessionNotFoundError):
                call("alpha")
        bench.engine.create_session("alpha")
        assert usage_of(bench, PROMPT) == (90, 0, False)

    def test_deleting_while_it_generates(self, bench: Bench) -> None:
        bench.model.item_seconds = 0.01
        turn = bench.submit(PROMPT, "alpha", max_tokens=300)
        until(turn, 2)
        bench.engine.delete_session("alpha", force=True)
        assert turn.view().state is GenerationState.CANCELLED
        assert bench.engine.sessions() == []

    def test_an_unreadable_session_is_listed_and_can_be_deleted(self, bench: Bench) -> None:
        bench.stop()
        (path,) = bench.root.glob("sessions/*/alpha/meta.json")
        path.write_text("nonsense")
        bench.start()
        (view,) = bench.engine.sessions()
        assert (view.state, "meta.json" in view.degraded) == (SessionState.CORRUPT, True)
        bench.engine.delete_session("alpha")
        assert bench.engine.sessions() == []


class TestFullDisk:
    def test_generation_goes_on_and_the_next_turn_catches_up(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        history: list[int] = []
        bench.run([1], "alpha")
        answer(history, [1])
        with monkeypatch.context() as patched:
            patched.setattr(writer_module, "write_all", full)
            patched.setattr("colibri.daemon.store.files.write_new", full)
            turn = bench.submit(PROMPT, "alpha")
            view = turn.result(EVER)
            assert (view.state, view.next_offset, view.durable_offset) == (GenerationState.SUCCEEDED, 5, 0)
            assert turn.tokens() == answer(history, PROMPT)
            session = bench.engine.session("alpha")
            assert (session.position, session.durable_position) == (len(history), 6)
            assert "No space left" in session.degraded
            assert any("No space left" in reason for reason in bench.engine.stats().degraded)
            with pytest.raises(errors.DiskFullError, match="6 of its 101 tokens"):
                bench.submit([2], "alpha")
        assert bench.run([2], "alpha") == answer(history, [2])
        bench.store.flush()
        session = bench.engine.session("alpha")
        assert session.durable_position == len(history)
        assert (session.degraded, bench.engine.stats().degraded) == ("", ()), "KV is stored again too"
        assert session.kv_position >= PAGE_POSITIONS
        bench.restart()
        assert bench.engine.session("alpha").kv_position == len(history) - 1
        assert bench.engine.session_tokens("alpha") == history
        assert bench.run([3], "alpha") == answer(history, [3])
