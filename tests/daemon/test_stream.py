"""One view of a generation: order of events, offsets, coalescing, heartbeats, text across token borders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from colibri.daemon.chat import TextModel
from colibri.daemon.generation import (
    FinishReason,
    Generation,
    GenerationSpec,
    GenerationState,
    LoopWake,
    SamplingSpec,
)
from colibri.daemon.stream import MAX_DELTA_TOKENS, GenerationStream, ViewOptions
from colibri.v1 import types_pb2
from testkit.tiny_tokenizer import EMOJI, write_tokenizer

VOCAB = 300
DONE = {"state": GenerationState.SUCCEEDED, "finish_reason": FinishReason.MAX_TOKENS}
Events = list[types_pb2.GenerateEvent]
Act = Callable[[Generation], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = tmp_path_factory.mktemp("text")
    write_tokenizer(folder, VOCAB)
    return TextModel.open(folder, vocab_rows=VOCAB)


def follow(act: Act, options: ViewOptions, spec: GenerationSpec | None = None) -> Events:
    """The events of a view of a generation to which `act` happens."""

    async def run() -> Events:
        wake = LoopWake(asyncio.get_running_loop())
        given = spec or GenerationSpec("r", (1,), SamplingSpec(seed=5))
        generation = Generation("generations/g", given, 7, wake.notify)
        acting = asyncio.create_task(act(generation))
        await asyncio.sleep(0)  # the generation is under way when the view begins
        try:
            return [event async for event in GenerationStream(generation, options).events()]
        finally:
            await acting
            wake.close()

    return asyncio.run(asyncio.wait_for(run(), 20))


def kinds(events: Events) -> list[str]:
    return [event.WhichOneof("event") or "" for event in events]


def text_of(events: Events) -> str:
    return "".join(event.delta.text for event in events)


def tokens_of(events: Events) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


def only_tokens(heartbeat: float = 5) -> ViewOptions:
    return ViewOptions(None, True, heartbeat)


def at_once(tokens: Sequence[int]) -> Act:
    async def act(generation: Generation) -> None:
        for token in tokens:
            generation.append(token, state=GenerationState.DECODING)
        generation.update(**DONE)

    return act


def one_by_one(tokens: Sequence[int]) -> Act:
    async def act(generation: Generation) -> None:
        for token in tokens:
            generation.append(token, state=GenerationState.DECODING)
            await asyncio.sleep(0.005)
        generation.update(**DONE)

    return act


def test_started_is_first_finished_last_and_offsets_join_up() -> None:
    events = follow(one_by_one(range(20, 30)), only_tokens())
    assert kinds(events)[0] == "started"
    assert kinds(events)[-1] == "finished"
    assert events[0].started.start_position == 7
    assert events[0].started.seed == 5
    assert tokens_of(events) == list(range(20, 30))
    expected = 0
    for event in events:
        if event.WhichOneof("event") == "delta":
            assert event.delta.offset == expected
            expected += event.delta.token_count
        assert event.next_offset == expected
    assert events[-1].finished.finish_reason == types_pb2.FINISH_REASON_MAX_TOKENS


def test_everything_that_is_ready_goes_into_one_message() -> None:
    assert kinds(follow(at_once(range(100)), only_tokens())) == ["started", "delta", "finished"]


def test_a_long_answer_is_caught_up_with_in_pieces() -> None:
    events = follow(at_once([3] * (2 * MAX_DELTA_TOKENS + 1)), only_tokens())
    assert [event.delta.token_count for event in events[1:-1]] == [MAX_DELTA_TOKENS, MAX_DELTA_TOKENS, 1]


def test_silence_is_broken_by_the_clock_not_by_the_engine() -> None:
    async def act(generation: Generation) -> None:
        await asyncio.sleep(0.33)
        generation.update(**DONE)

    events = follow(act, only_tokens(heartbeat=0.1))
    assert kinds(events).count("progress") >= 3
    assert {event.progress.state for event in events[1:-1]} == {types_pb2.Generation.STATE_QUEUED}


def test_progress_tells_queue_place_prompt_and_rate() -> None:
    async def act(generation: Generation) -> None:
        generation.update(queue_position=2)
        await asyncio.sleep(0.05)
        generation.update(state=GenerationState.PREFILLING, queue_position=0, prompt_tokens_total=100)
        for done in range(10, 60, 10):
            await asyncio.sleep(0.1)
            generation.update(prompt_tokens_done=done)
        generation.update(**DONE)

    events = [event.progress for event in follow(act, only_tokens()) if event.WhichOneof("event") == "progress"]
    assert events[0].queue_position == 2
    assert any(event.state == types_pb2.Generation.STATE_PREFILLING for event in events)
    last = events[-1]
    assert 0 < last.prompt_tokens_done < last.prompt_tokens_total == 100
    assert 50 < last.tokens_per_second < 150
    assert last.eta.ToTimedelta().total_seconds() == pytest.approx(
        (100 - last.prompt_tokens_done) / last.tokens_per_second, rel=0.01
    )


def test_progress_of_a_prompt_is_not_a_flood() -> None:
    async def act(generation: Generation) -> None:
        generation.update(state=GenerationState.PREFILLING, prompt_tokens_total=500)
        for done in range(100):
            generation.update(prompt_tokens_done=done)
            await asyncio.sleep(0.002)
        generation.update(**DONE)

    assert kinds(follow(act, only_tokens())).count("progress") <= 6


def test_durable_offsets_are_told(text: TextModel) -> None:
    async def act(generation: Generation) -> None:
        generation.append(40, state=GenerationState.DECODING)
        generation.update(durable_offset=1)
        await asyncio.sleep(0.02)
        generation.append(41)
        generation.update(**DONE)
        generation.update(durable_offset=2)

    events = follow(act, ViewOptions(text.output(), False, 5))
    assert events[1].durable_offset == 1
    assert events[-1].durable_offset == events[-1].finished.durable_offset == 2


# ---- text


@pytest.mark.parametrize("act", [at_once, one_by_one])
@pytest.mark.parametrize("words", ["plain words", f"a{EMOJI}b", f"{EMOJI}{EMOJI}", "漢字 é"])
def test_c10_text_is_whole_characters_and_complete(
    text: TextModel, act: Callable[[Sequence[int]], Act], words: str
) -> None:
    events = follow(act(text.encode(words)), ViewOptions(text.output(at_start=False), False, 5))
    assert text_of(events) == words
    assert "�" not in text_of(events)


def test_c10_an_answer_that_ends_inside_a_character_ends_in_the_replacement(text: TextModel) -> None:
    ids = text.encode(f"a{EMOJI}")[:-1]
    events = follow(one_by_one(ids), ViewOptions(text.output(), False, 5))
    assert text_of(events) == "a�"
    assert kinds(events)[-2:] == ["delta", "finished"]
    assert events[-2].delta.offset == events[-2].next_offset == len(ids)
    assert events[-2].delta.token_count == 0


def test_a_paused_answer_does_not_say_what_is_still_open(text: TextModel) -> None:
    ids = text.encode(f"a{EMOJI}")[:-1]

    async def act(generation: Generation) -> None:
        for token in ids:
            generation.append(token, state=GenerationState.DECODING)
        generation.update(state=GenerationState.PAUSED)

    events = follow(act, ViewOptions(text.output(), False, 5))
    assert text_of(events) == "a"
    assert events[-1].finished.state == types_pb2.Generation.STATE_PAUSED


def test_c11_text_is_held_while_it_may_become_a_stop_but_tokens_count(text: TextModel) -> None:
    ids = text.encode("abSTxSTOPyy")
    events = follow(one_by_one(ids), ViewOptions(text.output(["STOP"], at_start=False), True, 5))
    assert text_of(events) == "abSTx"
    assert tokens_of(events) == ids
    shown = ""
    for event in events:
        shown += event.delta.text
        assert "abSTx".startswith(shown)


def test_the_stop_is_shown_on_request_and_stop_ids_are_hidden(text: TextModel) -> None:
    events = follow(
        at_once(text.encode("abSTOPc")), ViewOptions(text.output(["STOP"], include_stop=True, at_start=False), False, 5)
    )
    assert text_of(events) == "abSTOP"
    last = text.encode("c")[0]
    events = follow(at_once(text.encode("abc")), ViewOptions(text.output(at_start=False), False, 5, frozenset({last})))
    assert text_of(events) == "ab"
