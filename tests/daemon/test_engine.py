"""The engine on a model whose answers depend on every token: what is produced, how it ends, what is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.core.errors import CorruptError, StorageError
from colibri.daemon import errors
from colibri.daemon.generation import FinishReason, GenerationState, LoopWake, SamplingSpec
from testkit.engine import EVER, Bench, until
from testkit.fake_model import FakeModel, FakeSequence, continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.stop()


class StopAfter:
    """A stop matcher that fires on the n-th token."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, list[int]()

    def push(self, token: int) -> bool:
        self.seen.append(token)
        return len(self.seen) == self.count


class TestTheEnd:
    def test_after_max_tokens(self, bench: Bench) -> None:
        generation = bench.submit(PROMPT, max_tokens=7)
        view = generation.result(EVER)
        assert (view.state, view.finish_reason) == (GenerationState.SUCCEEDED, FinishReason.MAX_TOKENS)
        assert generation.tokens() == continuation(PROMPT, 7)
        assert (view.start_position, view.next_offset) == (8, 7)

    def test_on_any_eos_id_which_is_kept_and_named(self, bench: Bench) -> None:
        expected = continuation(PROMPT, 6)
        generation = bench.submit(PROMPT, max_tokens=50, eos_token_ids=frozenset({expected[3], 1, 2}))
        view = generation.result(EVER)
        assert (view.finish_reason, view.stop_token) == (FinishReason.EOS, expected[3])
        assert generation.tokens() == expected[:4]

    def test_on_a_stop_id(self, bench: Bench) -> None:
        expected = continuation(PROMPT, 6)
        view = bench.submit(PROMPT, max_tokens=50, stop_token_ids=frozenset({expected[0]})).result(EVER)
        assert (view.finish_reason, view.stop_token, view.next_offset) == (
            FinishReason.STOP_SEQUENCE,
            expected[0],
            1,
        )

    def test_on_the_token_that_completes_a_stop_text(self, bench: Bench) -> None:
        stop = StopAfter(3)
        generation = bench.submit(PROMPT, max_tokens=50, stop_check=stop)
        view = generation.result(EVER)
        assert (view.finish_reason, view.stop_token) == (FinishReason.STOP_SEQUENCE, None)
        assert generation.tokens() == stop.seen == continuation(PROMPT, 3)

    def test_a_stop_check_that_raises_fails_its_generation_only(self, bench: Bench) -> None:
        class Broken:
            def push(self, token: int) -> bool:
                raise KeyError(token)

        view = bench.submit(PROMPT, stop_check=Broken()).result(EVER)
        assert (view.state, view.finish_reason) == (GenerationState.FAILED, FinishReason.ERROR)
        assert bench.run(PROMPT) == continuation(PROMPT, 5)

    def test_when_the_context_is_full(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(max_context=64))
        generation = bench.submit(range(60), max_tokens=None)
        view = generation.result(EVER)
        assert (view.finish_reason, view.next_offset) == (FinishReason.CONTEXT_FULL, 4)
        bench.stop()

    def test_when_its_time_is_up_with_what_was_produced(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(item_seconds=0.02))
        generation = bench.submit(PROMPT, max_tokens=400, max_duration=0.3)
        view = generation.result(EVER)
        assert (view.state, view.finish_reason) == (GenerationState.SUCCEEDED, FinishReason.TIME_LIMIT)
        assert 0 < view.next_offset < 20
        assert generation.tokens() == continuation(PROMPT, view.next_offset)
        bench.stop()


class TestRequests:
    @pytest.mark.parametrize(
        ("fields", "kind", "named"),
        [
            ({"tokens": []}, errors.InvalidFieldError, "input"),
            ({"tokens": [1, 1000]}, errors.TokenOutOfRangeError, "input[1] is 1000"),
            ({"tokens": [-1]}, errors.TokenOutOfRangeError, "input[0] is -1"),
            ({"tokens": [2**31]}, errors.TokenOutOfRangeError, "2147483648"),
            ({"tokens": [1], "stop_token_ids": frozenset({5000})}, errors.TokenOutOfRangeError, "stop.token_ids"),
            ({"tokens": [1], "max_tokens": 0}, errors.InvalidFieldError, "max_tokens is 0"),
            ({"tokens": [1], "max_tokens": -1}, errors.InvalidFieldError, "max_tokens is -1"),
            ({"tokens": [1], "max_tokens": 512}, errors.ContextExceededError, "513 positions; the context has 512"),
            ({"tokens": [1] * 513}, errors.ContextExceededError, "513 tokens"),
            ({"tokens": [1], "max_duration": 0.0}, errors.InvalidFieldError, "max_duration"),
            ({"tokens": [1], "sampling": SamplingSpec(float("nan"))}, errors.InvalidFieldError, "temperature"),
            ({"tokens": [1], "sampling": SamplingSpec(-1.0)}, errors.InvalidFieldError, "temperature"),
            ({"tokens": [1], "sampling": SamplingSpec(1.0, top_p=0.0)}, errors.InvalidFieldError, "top_p"),
            ({"tokens": [1], "sampling": SamplingSpec(1.0, top_k=-3)}, errors.InvalidFieldError, "top_k"),
            ({"tokens": [1], "sampling": SamplingSpec(seed=2**64)}, errors.InvalidFieldError, "seed"),
            ({"tokens": [1], "expected_position": 3}, errors.UnsupportedFieldError, "expected_position"),
            ({"tokens": [1], "session": "nobody"}, errors.SessionNotFoundError, "nobody"),
        ],
    )
    def test_what_cannot_be_done_is_refused_by_name(
        self, bench: Bench, fields: dict[str, object], kind: type[errors.DaemonError], named: str
    ) -> None:
        with pytest.raises(kind) as caught:
            bench.submit(**fields)  # type: ignore[arg-type]
        assert named in str(caught.value)
        assert bench.engine.generations() == []
        assert bench.run(PROMPT) == continuation(PROMPT, 5)

    def test_the_same_request_is_the_same_generation(self, bench: Bench) -> None:
        first = bench.submit(PROMPT, request_id="r", body_hash=b"1")
        assert bench.submit(PROMPT, request_id="r", body_hash=b"1") is first
        first.result(EVER)
        assert bench.submit(PROMPT, request_id="r", body_hash=b"1") is first
        with pytest.raises(errors.RequestIdReusedError, match="used for another request"):
            bench.submit(PROMPT, request_id="r", body_hash=b"2")

    def test_finished_generations_are_kept_for_a_time(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, retain_seconds=0.2)
        generation = bench.submit(PROMPT)
        view = generation.result(EVER)
        assert bench.engine.get(generation.name) is generation
        assert view.expire_time is not None
        time.sleep(max(0.0, view.expire_time - time.time()) + 0.05)
        with pytest.raises(errors.GenerationNotFoundError):
            bench.engine.get(generation.name)
        bench.stop()

    def test_their_number_is_bounded(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, max_retained=3)
        for _ in range(6):
            bench.run(PROMPT, max_tokens=1)
        assert len(bench.engine.generations()) <= 4
        bench.stop()


class TestSeveralAtOnce:
    def test_each_gets_what_it_gets_alone(self, bench: Bench) -> None:
        prompts = [[10 * n + k for k in range(5 + 37 * n)] for n in range(5)]
        generations = [bench.submit(prompt, max_tokens=20) for prompt in prompts]
        for prompt, generation in zip(prompts, generations, strict=True):
            generation.result(EVER)
            assert generation.tokens() == continuation(prompt, 20)

    def test_sampling_depends_on_seed_and_position_only(self, bench: Bench) -> None:
        hot = SamplingSpec(temperature=1.0, seed=7)
        one = bench.submit(PROMPT, max_tokens=12, sampling=hot)
        bench.submit(PROMPT, max_tokens=12, sampling=SamplingSpec(temperature=1.0, seed=8)).result(EVER)
        assert one.result(EVER).sampling == hot
        assert one.tokens() == continuation(PROMPT, 12, hot)
        assert bench.run(PROMPT, max_tokens=12, sampling=hot) == one.tokens()

    def test_a_full_queue_is_refused_at_once_and_positions_are_shown(self, tmp_path: Path) -> None:
        gate = threading.Event()

        def wait() -> None:
            gate.wait(EVER)

        bench = Bench(tmp_path, FakeModel(max_rows=1, before_step=wait), max_queue=2)
        running = bench.submit(PROMPT)
        waiting = [bench.submit(PROMPT), bench.submit(PROMPT)]
        assert [g.view().queue_position for g in (running, *waiting)] == [0, 1, 2]
        with pytest.raises(errors.QueueFullError):
            bench.submit(PROMPT)
        bench.engine.cancel(waiting[0].name)
        assert waiting[0].result(EVER).state is GenerationState.CANCELLED
        assert waiting[1].view().queue_position == 1
        gate.set()
        assert waiting[1].result(EVER).state is GenerationState.SUCCEEDED
        bench.stop()

    def test_decoding_goes_on_while_a_long_prompt_is_read(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, FakeModel(positions_per_step=1, item_seconds=0.001))
        decoding = bench.submit(PROMPT, max_tokens=150)
        until(decoding, 1)
        long = bench.submit(range(300), max_tokens=3)
        decoding.result(EVER)
        assert long.view().state is GenerationState.PREFILLING
        assert 0 < long.view().prompt_tokens_done < 300
        long.result(EVER)
        assert long.tokens() == continuation(range(300), 3)
        bench.stop()


class TestCancel:
    @pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
    def test_takes_effect_within_one_item_and_frees_everything(self, tmp_path: Path, when: str) -> None:
        model = FakeModel(max_rows=1, item_seconds=0.2, positions_per_step=1000, pass_tokens=400)
        bench = Bench(tmp_path, model)
        first = bench.submit(range(400) if when == "prefill" else PROMPT, max_tokens=50)
        victim = bench.submit(PROMPT) if when == "queued" else first
        if when == "decode":
            until(first, 2)
        else:
            time.sleep(0.3)
        begun = time.monotonic()
        bench.engine.cancel(victim.name)
        view = victim.result(EVER)
        assert time.monotonic() - begun < 0.35
        assert (view.state, view.finish_reason) == (GenerationState.CANCELLED, FinishReason.CANCELLED)
        assert bench.engine.cancel(victim.name) is victim
        assert victim.tokens() == continuation(PROMPT, view.next_offset)
        assert (view.next_offset > 0) is (when == "decode")
        model.item_seconds = 0
        bench.engine.cancel(first.name)
        assert bench.run(PROMPT) == continuation(PROMPT, 5)
        bench.stop()

    def test_unknown_names_are_not_found(self, bench: Bench) -> None:
        for name in ("generations/g-1", "sessions/nobody/generations/g-1", "nonsense"):
            with pytest.raises((errors.GenerationNotFoundError, errors.SessionNotFoundError)):
                bench.engine.cancel(name)

    def test_a_stale_cancel_of_the_core_does_not_end_another_turn(self, bench: Bench) -> None:
        bench.engine.create_session("alpha")
        bench.run(PROMPT, "alpha")
        (sequence,) = bench.model.open_sequences
        sequence.cancelled = True  # a flag that came too late for the item it was meant for
        first = [*PROMPT, *continuation(PROMPT, 5)]
        assert bench.run([7], "alpha", max_tokens=3) == continuation([*first, 7], 3)


class TestFailures:
    @pytest.mark.parametrize(
        ("cause", "kind"),
        [
            (CorruptError("layer 3 expert 5: stripe 1 offset 4096"), errors.ExpertChecksumError),
            (StorageError("stripe 1 offset 4096: EIO"), errors.StorageUnavailableError),
            (RuntimeError("who knows"), errors.EngineFailedError),
        ],
    )
    @pytest.mark.parametrize("item", ["row", "prefill"])
    def test_only_the_generation_that_needed_it_fails(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        cause: Exception,
        kind: type[errors.DaemonError],
        item: str,
    ) -> None:
        def broken(running: str, sequence: FakeSequence) -> None:
            if running == item and (sequence.kv[:1] == [999] or (running == "prefill" and not healthy.is_set())):
                raise cause

        healthy = threading.Event()
        healthy.set()
        bench = Bench(tmp_path, FakeModel(before_item=broken, item_seconds=0.002))
        good = bench.submit(PROMPT, max_tokens=60)
        until(good, 2)
        if item == "prefill":
            healthy.clear()
        bad = bench.submit([999, 5], max_tokens=9)
        view = bad.result(EVER)
        healthy.set()
        assert view.state is GenerationState.FAILED
        assert type(view.error) is kind
        assert str(cause) in view.error.message
        assert f"{bad.name} failed: {cause}" in [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert bad.tokens() == continuation([999, 5], 1 if item == "row" else 0)
        assert good.result(EVER).state is GenerationState.SUCCEEDED
        assert good.tokens() == continuation(PROMPT, 60)
        bench.stop()

    def test_a_defect_in_the_loop_fails_what_runs_and_says_so(self, tmp_path: Path) -> None:
        def broken() -> None:
            raise ValueError("malformed call")

        model = FakeModel(before_step=broken)
        bench = Bench(tmp_path, model)
        view = bench.submit(PROMPT).result(EVER)
        assert view.state is GenerationState.FAILED
        assert "malformed call" in str(view.error)
        with pytest.raises(errors.EngineFailedError, match="malformed call"):
            bench.submit(PROMPT)
        assert any("malformed call" in reason for reason in bench.engine.stats().degraded)
        bench.stop()


class TestReaders:
    def test_many_read_at_their_own_pace(self, bench: Bench) -> None:
        generation = bench.submit(PROMPT, max_tokens=100)
        seen: list[list[int]] = [[] for _ in range(4)]

        def read(into: list[int]) -> None:
            view = generation.view()
            while True:
                into.extend(generation.tokens(len(into), view.next_offset))
                if view.state.finished:
                    return
                view = generation.wait_sync(view.version, EVER)

        threads = [threading.Thread(target=read, args=(into,)) for into in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(EVER)
        assert seen == [continuation(PROMPT, 100)] * 4

    def test_an_event_loop_is_woken(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)

        async def follow() -> list[int]:
            wake = LoopWake(asyncio.get_running_loop())
            bench.engine._wake = wake
            generation = bench.submit(PROMPT, max_tokens=50)
            got: list[int] = []
            view = generation.view()
            while not view.state.finished:
                got += generation.tokens(len(got), view.next_offset)
                view = await asyncio.wait_for(generation.wait(view.version), EVER)
            got += generation.tokens(len(got))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(generation.wait(generation.view().version), 0.05)
            assert generation._waiters == []
            wake.close()
            return got

        assert asyncio.run(follow()) == continuation(PROMPT, 50)
        bench.stop()

    def test_usage_and_stats_add_up(self, bench: Bench) -> None:
        view = bench.submit(range(250), max_tokens=10).result(EVER)
        usage = view.usage
        assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (250, 0, 10)
        assert (usage.expert_hits, usage.expert_loads) == (250 + 9 * 3, 3 * 2 + 9)
        assert 0 < usage.prefill_ns <= usage.time_to_first_token_ns
        assert usage.decode_ns > 0
        stats = bench.engine.stats()
        assert (stats.prefill_tokens, stats.decode_tokens, stats.expert_hits) == (250, 10, usage.expert_hits)
        assert stats.core_ns > 0
        assert stats.between_ns > 0
        assert stats.decode_tokens_per_second > 0
        assert (stats.queued, stats.running, stats.kv_pages_used) == (0, 0, 0)
