"""Sessions across restarts, crashes and damage: nothing durable is lost, nothing is resumed wrongly or in silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri.daemon import engine_loop, errors
from colibri.daemon.engine_api import SessionState
from colibri.daemon.generation import GenerationState
from testkit.engine import EVER, Bench, until
from testkit.fake_model import FakeModel, continuation
from testkit.sessions import spoil

PROMPT = list(range(100, 190))  # one page and a part


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.engine.create_session("alpha")
    yield made
    made.stop()


def assert_set(event: threading.Event) -> None:
    assert event.wait(EVER)


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


class TestRestarts:
    def test_after_a_clean_stop_nothing_is_computed_again(self, bench: Bench) -> None:
        history: list[int] = []
        for given in (PROMPT, [1, 2, 3], list(range(40))):
            bench.restart()
            expected = answer(history, given)
            turn = bench.submit(given, "alpha")
            view = turn.result(EVER)
            assert turn.tokens() == expected
            before = len(history) - len(given) - 5
            assert view.usage.cached_prompt_tokens == max(0, before - 1)
            assert not view.re_prefilled
            assert bench.model.prefilled == len(given) + min(1, before)
        bench.restart()
        session = bench.engine.session("alpha")
        assert (session.position, session.kv_position) == (len(history), len(history) - 1)
        assert session.state is SessionState.STORED

    def test_a_stop_in_mid_answer_pauses_and_keeps(self, bench: Bench) -> None:
        bench.model.item_seconds = 0.005
        turn = bench.submit(PROMPT, "alpha", max_tokens=400)
        until(turn, 4)
        bench.stop()
        view = turn.view()
        assert view.state is GenerationState.PAUSED
        assert view.durable_offset == view.next_offset >= 4
        with pytest.raises(errors.DrainingError):
            bench.submit([1])
        bench.model = FakeModel()
        bench.start()
        found = bench.engine.get(turn.name)
        assert found.view().state is GenerationState.PAUSED
        assert found.tokens() == turn.tokens()
        assert found.view().usage == view.usage
        history = [*PROMPT, *turn.tokens()]
        expected = answer(history, [1])
        again = bench.submit([1], "alpha")
        assert again.result(EVER).usage.cached_prompt_tokens == len(history) - 5 - 2
        assert again.tokens() == expected

    def test_a_stop_gives_up_a_token_that_does_not_come(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_loop, "BOUNDARY_SECONDS", 0.2)
        turn = bench.submit(PROMPT, "alpha", max_tokens=400)
        until(turn, 4)
        bench.model.item_seconds = 2 * EVER
        bench.stop()
        assert turn.view().state is GenerationState.PAUSED
        kept = turn.tokens()
        assert kept == continuation(PROMPT, len(kept))
        bench.model = FakeModel()
        bench.start()
        expected = continuation([*PROMPT, *kept, 1], 5)
        assert bench.run([1], "alpha") == expected

    def test_a_stop_in_mid_prompt_leaves_the_session(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(positions_per_step=10, item_seconds=0.02))
        bench.engine.create_session("alpha")
        turn = bench.submit(range(300), "alpha")
        waiting = bench.submit(range(5))
        bench.stop()
        for generation in (turn, waiting):
            assert (generation.view().state, generation.tokens()) == (GenerationState.PAUSED, [])
        bench.model = FakeModel()
        bench.start()
        assert bench.engine.session_tokens("alpha") == []
        assert bench.engine.session("alpha").kv_position == 0
        assert bench.run([1], "alpha") == continuation([1], 5)
        bench.stop()

    def test_the_same_prompt_goes_on_where_the_stop_found_it(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(positions_per_step=10, item_seconds=0.02))
        bench.engine.create_session("alpha")
        history: list[int] = []
        bench.run(PROMPT, "alpha", max_tokens=2)
        answer(history, PROMPT, 2)
        turn = bench.submit(range(300), "alpha")
        while bench.model.prefilled < 90 + 150:
            turn.wait_sync(turn.view().version, EVER)
        bench.stop()
        bench.model = FakeModel()
        bench.start()
        victim = bench.submit(range(300), "alpha")
        bench.engine.cancel(victim.name)
        victim.result(EVER)
        bench.restart()
        assert bench.engine.session_tokens("alpha") == history
        expected = answer(history, list(range(300)))
        again = bench.submit(range(300), "alpha")
        assert again.result(EVER).usage.cached_prompt_tokens >= 91
        assert again.tokens() == expected
        bench.stop()

    def test_after_kill_at_most_a_page_and_a_position_are_computed_again(self, tmp_path: Path, bench: Bench) -> None:
        history: list[int] = []
        answer(history, PROMPT, 150)
        bench.model.item_seconds = 0.002
        turn = bench.submit(PROMPT, "alpha", max_tokens=400)
        until(turn, 150)
        crashed = bench.crash(tmp_path / "crashed")
        tokens = crashed.engine.session_tokens("alpha")
        assert len(tokens) >= 90 + 149
        assert tokens[: len(history)] == history[: len(tokens)]
        view = crashed.engine.get(turn.name).view()
        assert (view.state, view.next_offset) == (GenerationState.PAUSED, len(tokens) - 90)
        again = crashed.submit([1], "alpha")
        usage = again.result(EVER).usage
        assert usage.prompt_tokens - 1 - usage.cached_prompt_tokens <= 65
        assert again.tokens() == continuation([*tokens, 1], 5)
        crashed.stop()

    @pytest.mark.parametrize("tokens", [1, 2, 40, 130])
    def test_also_where_the_pages_are_slow_to_be_written(
        self, tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, tokens: int
    ) -> None:
        """There is room for one page at a time: what the log would tell of the others is held until they are there."""
        monkeypatch.setattr(bench.store._writer, "_max_page_bytes", 1)
        real = bench.store._pages.write

        def slow(*arguments: Any) -> None:
            time.sleep(0.01)
            real(*arguments)

        monkeypatch.setattr(bench.store._pages, "write", slow)
        turn = bench.submit(range(330), "alpha", max_tokens=170)
        view = turn.view()
        while view.durable_offset < tokens:
            view = turn.wait_sync(view.version, EVER)
        crashed = bench.crash(tmp_path / "crashed")
        history = crashed.engine.session_tokens("alpha")
        assert len(history) >= 330 + tokens
        assert usage_of(crashed, [1])[1] >= len(history) - 65
        crashed.stop()
        view = turn.result(EVER)
        assert view.durable_offset == view.next_offset == 170

    def test_tokens_flow_while_no_page_can_be_written(self, bench: Bench) -> None:
        """The engine does not wait: the answer is complete, and not called durable."""
        gate = threading.Event()
        bench.store._writer.submit(lambda: assert_set(gate))
        turn = bench.submit(range(200), "alpha", max_tokens=150)
        view = until(turn, 150)
        assert (view.next_offset, view.durable_offset, view.state.finished) == (150, 0, False)
        gate.set()
        assert turn.result(EVER).durable_offset == 150

    def test_tokens_become_durable_while_no_page_can_be_synced(self, bench: Bench) -> None:
        gate = threading.Event()
        bench.store._syncer.then(lambda: assert_set(gate))
        turn = bench.submit(range(200), "alpha", max_tokens=150)
        view = turn.result(EVER)
        assert (view.next_offset, view.durable_offset) == (150, 150)
        assert bench.engine.session("alpha").kv_position == 0
        gate.set()
        bench.store.flush()
        assert bench.engine.session("alpha").kv_position == 349

    def test_a_request_is_not_run_twice_because_of_a_restart(self, bench: Bench) -> None:
        turn = bench.submit(PROMPT, "alpha", request_id="r", body_hash=b"1")
        turn.result(EVER)
        bench.restart()
        again = bench.submit(PROMPT, "alpha", request_id="r", body_hash=b"1")
        assert (again.name, again.tokens(), again.finished) == (turn.name, turn.tokens(), True)
        with pytest.raises(errors.RequestIdReusedError):
            bench.submit(PROMPT, "alpha", request_id="r", body_hash=b"2")
        assert bench.engine.session("alpha").position == 95

    def test_a_bad_page_costs_time_only(self, bench: Bench) -> None:
        history: list[int] = []
        bench.run(list(range(200)), "alpha")
        answer(history, list(range(200)))
        bench.stop()
        pages = bench.store.cached_pages(bench.store.load("alpha")[0], history, None)
        path = bench.store.folder.page(pages[1].file)
        spoil(path, path.read_bytes()[:-1] + b"\xff")
        bench.model = FakeModel()
        bench.start()
        expected = answer(history, [1])
        turn = bench.submit([1], "alpha")
        view = turn.result(EVER)
        assert (view.usage.cached_prompt_tokens, view.re_prefilled) == (64, True)
        assert turn.tokens() == expected
        bench.restart()
        assert usage_of(bench, [2]) == (212, 210, False)

    def test_other_numerics_are_computed_again_and_said(self, bench: Bench) -> None:
        history: list[int] = []
        bench.run(PROMPT, "alpha")
        answer(history, PROMPT)
        bench.restart(FakeModel(numerics_id="1/i8/f16/64"))
        expected = answer(history, [1])
        turn = bench.submit([1], "alpha")
        view = turn.result(EVER)
        assert (view.usage.cached_prompt_tokens, view.re_prefilled, turn.tokens()) == (0, True, expected)
        bench.restart(FakeModel(numerics_id="1/i8/f16/64"))
        assert bench.engine.session("alpha").numerics_id == "1/i8/f16/64"
        assert usage_of(bench, [2]) == (102, 100, False)

    def test_other_content_is_refused_and_nothing_is_touched(self, bench: Bench) -> None:
        bench.run(PROMPT, "alpha")
        bench.restart(FakeModel(content_id="cd" * 32))
        with pytest.raises(errors.ContentMismatchError):
            bench.submit([1], "alpha")
        bench.restart()
        assert usage_of(bench, [1]) == (96, 94, False)

    def test_a_corrupt_log_is_refused_until_the_loss_is_named(self, bench: Bench) -> None:
        bench.run(PROMPT, "alpha")
        bench.run([1], "alpha")
        history = bench.engine.session_tokens("alpha")
        bench.stop()
        (path,) = bench.root.glob("sessions/*/alpha/tokens.log")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        bench.start()
        view = bench.engine.session("alpha")
        assert view.state is SessionState.CORRUPT
        (kept,) = (bench.root / "quarantine").glob("*tokens.log")
        assert f"{view.position} tokens are readable, the damaged file is kept as {kept}" in view.degraded
        for expected, named in ((None, True), (view.position + 1, True), (view.position, False)):
            with pytest.raises(errors.SessionCorruptError) as caught:
                bench.submit([1], "alpha", expected_position=expected, position_named=named)
            assert caught.value.metadata["position"] == str(view.position)
        tokens = bench.engine.session_tokens("alpha")
        assert tokens == history[: view.position]
        assert bench.run([2], "alpha", expected_position=view.position) == answer(tokens, [2])
        view = bench.engine.session("alpha")
        assert (view.state, view.degraded) == (SessionState.LIVE, "")
