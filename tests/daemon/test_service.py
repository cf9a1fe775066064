"""Generate and its kin over a real socket: events, idempotency, cancelling, disconnects, deadlines, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2
from testkit.fake_model import FakeModel, continuation
from testkit.service import (
    VOCAB,
    Daemon,
    ScriptedModel,
    blocked,
    daemon,
    first,
    refused,
    request,
    rest,
    run,
    text_of,
    tokens_of,
    user,
)
from testkit.tiny_tokenizer import EMOJI

Generation = types_pb2.Generation


def slow(seconds: float = 0.05, **fields: Any) -> FakeModel:
    return FakeModel(vocab_size=VOCAB, item_seconds=seconds, **fields)


async def state_of(running: Daemon, name: str, wanted: Callable[[types_pb2.Generation], bool]) -> types_pb2.Generation:
    """Asks until a generation is as wanted."""
    async with asyncio.timeout(10):
        while True:
            found: types_pb2.Generation = await running.inference.GetGeneration(
                inference_pb2.GetGenerationRequest(name=name)
            )
            if wanted(found):
                return found
            await asyncio.sleep(0.01)


def ended(generation: types_pb2.Generation) -> bool:
    return generation.state >= Generation.STATE_PAUSED


def test_a_generation_from_start_to_finish(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            events = await running.generate(tokens=[5, 6, 7], max_tokens=20)
            assert tokens_of(events) == continuation([5, 6, 7], 20, vocab=VOCAB)
            started, finished = events[0].started, events[-1].finished
            assert started.name == finished.name
            assert started.sampling.temperature == 0
            assert started.sampling.top_p == 1
            assert started.seed == started.sampling.seed == 1
            assert finished.state == Generation.STATE_SUCCEEDED
            assert finished.finish_reason == types_pb2.FINISH_REASON_MAX_TOKENS
            assert finished.usage.prompt_tokens == 3
            assert finished.usage.completion_tokens == 20
            assert finished.usage.cached_prompt_tokens == 0
            assert finished.usage.expert_hits == 3 + 19 * 3
            assert finished.usage.expert_loads == 2 + 19
            assert finished.usage.expert_bytes_read == 8192 + 19 * 4096
            for name in ("queue_time", "prefill_time", "decode_time", "time_to_first_token"):
                assert getattr(finished.usage, name).ToNanoseconds() > 0, name
            assert finished.HasField("expire_time")
            again = await running.inference.GetGeneration(inference_pb2.GetGenerationRequest(name=finished.name))
            assert again == finished

    run(work)


def test_the_seed_is_drawn_told_and_reproduces(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            asked = request([5, 6], sampling={"temperature": 0.5})
            asked.sampling.ClearField("seed")
            drawn = [event async for event in running.inference.Generate(asked)]
            seed = drawn[0].started.seed
            again = await running.generate(tokens=[5, 6], sampling={"temperature": 0.5, "seed": seed})
            assert tokens_of(again) == tokens_of(drawn)
            other = await running.generate(tokens=[5, 6], sampling={"temperature": 0.5, "seed": seed ^ 1})
            assert tokens_of(other) != tokens_of(drawn)

    run(work)


def test_the_same_request_id_attaches_and_another_body_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            asked = request([5, 6, 7])
            one = [event async for event in running.inference.Generate(asked)]
            two = [event async for event in running.inference.Generate(asked)]
            assert one[0].started.name == two[0].started.name
            assert tokens_of(one) == tokens_of(two)
            assert running.runtime.model.prefilled == 3
            asked.stop.max_tokens = 6
            refusal = await refused(running.inference.Generate(asked).read())
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")

    run(work)


# ---- text


def ids(running: Daemon, text: str) -> list[int]:
    return running.text.encode(text, False)


def test_c10_characters_that_are_split_over_tokens_arrive_whole(tmp_path: Path) -> None:
    async def work() -> None:
        model = ScriptedModel()
        async with daemon(tmp_path, model) as running:
            whole = f"a{EMOJI}b漢c"
            model.script = ids(running, whole)
            assert len(model.script) > len(whole)
            for count in range(1, len(model.script) + 1):
                events = await running.generate(tokens=[5], max_tokens=count)
                shown = text_of(events)
                assert shown == running.text.decode(model.script[:count])
                assert whole.startswith(shown.removesuffix("\ufffd"))
            assert shown == whole

    run(work)


@pytest.mark.parametrize(
    ("stops", "shown", "kept"),
    [
        (["bc"], "a", 3),
        (["bcde"], "a", 5),
        (["f"], "abcde", 6),
        (["cd", "bcd"], "a", 4),
        (["xyz"], "abcdefabc", 9),
    ],
)
def test_c11_stop_strings_over_token_borders(tmp_path: Path, stops: list[str], shown: str, kept: int) -> None:
    async def work() -> None:
        model = ScriptedModel()
        async with daemon(tmp_path, model) as running:
            model.script = [token for letter in "abcdefabc" for token in ids(running, letter)]
            events = await running.generate(text="abcdef bc", max_tokens=9, stop={"sequences": stops})
            finished = events[-1].finished
            assert text_of(events) == shown
            assert finished.next_offset == kept
            if kept == 9:
                assert finished.finish_reason == types_pb2.FINISH_REASON_MAX_TOKENS
            else:
                assert finished.finish_reason == types_pb2.FINISH_REASON_STOP_SEQUENCE
                assert finished.stop_match.sequence in stops
            with_stop = await running.generate(text="x", max_tokens=9, stop={"sequences": ["bc"], "include_stop": True})
            assert text_of(with_stop) == "abc"

    run(work)


def test_end_and_stop_ids_end_a_generation_and_say_so(tmp_path: Path) -> None:
    async def work() -> None:
        model = ScriptedModel()
        async with daemon(tmp_path, model) as running:
            eos = running.text.eos_ids
            model.script = [*ids(running, "ab"), eos[1], *ids(running, "c")]
            events = await running.generate(tokens=[5], max_tokens=9, stop={"ignore_eos": False})
            assert text_of(events) == "ab"
            assert events[-1].finished.finish_reason == types_pb2.FINISH_REASON_EOS
            assert events[-1].finished.stop_match.token_id == eos[1]
            assert events[-1].finished.usage.completion_tokens == 3
            ignored = await running.generate(tokens=[5], max_tokens=4)
            assert text_of(ignored) == "abc"
            letter = ids(running, "b")[0]
            stopped = await running.generate(tokens=[5], max_tokens=9, stop={"token_ids": [letter]})
            assert text_of(stopped) == "a"
            assert stopped[-1].finished.finish_reason == types_pb2.FINISH_REASON_STOP_SEQUENCE
            assert stopped[-1].finished.stop_match.token_id == letter
            shown = await running.generate(tokens=[5], max_tokens=9, stop={"token_ids": [letter], "include_stop": True})
            assert text_of(shown) == "ab"

    run(work)


def test_text_and_chat_become_the_ids_that_the_other_methods_show(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            rendered = await running.inference.RenderChat(inference_pb2.RenderChatRequest(chat=user("Hi")))
            assert rendered.text == "<bos><turn>user\nHi<end_turn>\n<turn>assistant\n"
            assert rendered.renderer == "jinja:chat_template.jinja"
            events = await running.generate(chat=user("Hi"))
            assert tokens_of(events) == continuation(list(rendered.ids), 5, vocab=VOCAB)
            assert text_of(events) == running.text.decode(tokens_of(events))
            split = await running.inference.Tokenize(inference_pb2.TokenizeRequest(text="Hi é", add_bos=True))
            assert split.ids[0] == running.text.tokenizer.bos_id
            joined = await running.inference.Detokenize(inference_pb2.DetokenizeRequest(ids=split.ids))
            assert joined.text == "<bos>Hi é"
            given = types_pb2.Input(text="Hi é", add_bos=True)
            asked = request([])
            asked.input.CopyFrom(given)
            events = [event async for event in running.inference.Generate(asked)]
            assert tokens_of(events) == continuation(list(split.ids), 5, vocab=VOCAB)

    run(work)


# ---- cancelling, leaving, deadlines


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("how", ["leave", "cancel"])
def test_c01_a_generation_ends_wherever_it_is_and_frees_its_place(tmp_path: Path, when: str, how: str) -> None:
    async def work() -> None:
        model = slow(max_rows=1)
        async with daemon(tmp_path, model) as running:
            other = running.inference.Generate(request([9] * 10, max_tokens=400)) if when == "queued" else None
            if other is not None:
                await first(other, "delta")
            call = running.inference.Generate(request([5] * (90 if when == "prefill" else 5), max_tokens=100))
            name = (await first(call, "started")).started.name
            if when == "prefill":
                await state_of(running, name, lambda found: found.state == Generation.STATE_PREFILLING)
            if when == "decode":
                await first(call, "delta")
            if how == "leave":
                call.cancel()
                found = await state_of(running, name, ended)
            else:
                ask = inference_pb2.CancelGenerationRequest(name=name)
                found = await running.inference.CancelGeneration(ask)
                assert await running.inference.CancelGeneration(ask) == found
                assert (await rest(call))[-1].finished.state == Generation.STATE_CANCELLED
            assert found.state == Generation.STATE_CANCELLED
            assert found.finish_reason == types_pb2.FINISH_REASON_CANCELLED
            assert found.next_offset < 100
            if other is not None:
                other.cancel()
            loop = asyncio.get_running_loop()
            began = loop.time()
            await running.generate(tokens=[1, 2], max_tokens=2)
            assert loop.time() - began < 1

    run(work)


def test_a_generation_with_two_viewers_outlives_the_first_to_leave(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, slow(0.02)) as running:
            asked = request([5, 6], max_tokens=30)
            one, two = running.inference.Generate(asked), running.inference.Generate(asked)
            name = (await first(one, "started")).started.name
            assert (await first(two, "started")).started.name == name
            one.cancel()
            assert (await rest(two))[-1].finished.state == Generation.STATE_SUCCEEDED

    run(work)


def test_a_session_s_generation_and_one_told_to_continue_go_on_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, slow(0.02)) as running:
            session = await running.session()
            kept = request([7], max_tokens=8, on_disconnect=inference_pb2.DISCONNECT_POLICY_CONTINUE)
            for asked in (request([5, 6], session=session, max_tokens=8), kept):
                call = running.inference.Generate(asked)
                name = (await first(call, "started")).started.name
                call.cancel()
                found = await state_of(running, name, ended)
                assert found.state == Generation.STATE_SUCCEEDED
                assert found.next_offset == 8

    run(work)


def test_c06_a_deadline_that_has_passed_costs_nothing_and_a_short_one_stops_the_work(tmp_path: Path) -> None:
    async def work() -> None:
        model = slow(0.1)
        async with daemon(tmp_path, model) as running:
            for timeout in (0, 1e-9):
                with pytest.raises(grpc.aio.AioRpcError) as failed:  # `started` may still have come through
                    async for _ in running.inference.Generate(request([5] * 50), timeout=timeout):
                        pass
                assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await asyncio.sleep(0.2)
            assert model.prefilled == 0
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in running.inference.Generate(request([5] * 90, max_tokens=50), timeout=0.3):
                    pass
            assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert running.runtime.engine is not None
            async with asyncio.timeout(1):
                while running.runtime.engine.stats().running:
                    await asyncio.sleep(0.01)
            assert model.prefilled == 0
            events = await running.generate(tokens=[1], max_tokens=1)
            assert events[-1].finished.state == Generation.STATE_SUCCEEDED

    run(work)


def test_a_time_limit_of_the_server_finishes_and_keeps_the_output(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, slow(0.05)) as running:
            asked = request([5], max_tokens=100)
            asked.stop.max_duration.nanos = 300_000_000
            events = [event async for event in running.inference.Generate(asked)]
            assert events[-1].finished.finish_reason == types_pb2.FINISH_REASON_TIME_LIMIT
            assert 0 < events[-1].finished.next_offset < 20

    run(work)


def test_c04_health_and_heartbeats_while_a_prompt_takes_long(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2

    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)
        gate = blocked(model)
        async with daemon(tmp_path, model) as running:
            watchers = [running.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(20)]
            for watcher in watchers:
                assert (await watcher.read()).status == health_pb2.HealthCheckResponse.SERVING
            call = running.inference.Generate(request([5] * 80, output={"heartbeat": {"nanos": 100_000_000}}))
            loop = asyncio.get_running_loop()
            slowest = 0.0
            for _ in range(20):
                began = loop.time()
                await running.health.Check(health_pb2.HealthCheckRequest())
                slowest = max(slowest, loop.time() - began)
                await asyncio.sleep(0.05)
            assert slowest < 0.5
            gate.set()
            events = [event async for event in call]
            assert sum(event.WhichOneof("event") == "progress" for event in events) >= 5
            assert events[-1].finished.state == Generation.STATE_SUCCEEDED
            for watcher in watchers:
                watcher.cancel()

    run(work)
