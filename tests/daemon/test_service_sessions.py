"""Sessions through the service: create, list, delete, turns, and what must not happen to them (C12, C13, C14)."""

from __future__ import annotations

import asyncio
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

Session = types_pb2.Session
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('too late') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<end_turn>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


async def get(running: Daemon, name: str) -> types_pb2.Session:
    found: types_pb2.Session = await running.sessions.GetSession(inference_pb2.GetSessionRequest(name=name))
    return found


async def turn(running: Daemon, session: str, tokens: list[int], **fields: Any) -> types_pb2.Generation:
    return (await running.generate(tokens=tokens, session=session, **fields))[-1].finished


# ---- create, get, list, delete


def test_a_session_is_made_once_and_shown(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            wanted = Session(display_name="My chat", labels={"team": "a"})
            asked = inference_pb2.CreateSessionRequest(session_id="my-chat", session=wanted)
            made = await running.sessions.CreateSession(asked)
            assert made.name == "sessions/my-chat"
            assert (made.display_name, dict(made.labels)) == ("My chat", {"team": "a"})
            assert (made.model, made.content_id) == ("fake", running.runtime.model.content_id)
            assert (made.position, made.kv_position, made.context_limit) == (0, 0, 512)
            assert made.create_time.seconds > 0
            assert await running.sessions.CreateSession(asked) == made
            asked.session.display_name = "Another"
            refusal = await refused(running.sessions.CreateSession(asked))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "SESSION_EXISTS")
            drawn = await running.sessions.CreateSession(inference_pb2.CreateSessionRequest())
            assert (await get(running, drawn.name)).name == drawn.name != made.name

    run(work)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (inference_pb2.CreateSessionRequest(session_id="A"), "session_id"),
        (inference_pb2.CreateSessionRequest(session_id="abc"), "session_id"),
        (inference_pb2.CreateSessionRequest(session=Session(display_name="x" * 300)), "session.display_name"),
        (inference_pb2.CreateSessionRequest(session=Session(labels={"x": "y" * 300})), "session.labels"),
        (inference_pb2.CreateSessionRequest(session=Session(pinned=True)), "session.pinned"),
        (inference_pb2.CreateSessionRequest(request_id="x"), "request_id"),
    ],
)
def test_sessions_that_cannot_be_made_are_refused_by_field(
    tmp_path: Path, asked: inference_pb2.CreateSessionRequest, field: str
) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            refusal = await refused(running.sessions.CreateSession(asked))
            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.metadata["field"] == field
            listed = await running.sessions.ListSessions(inference_pb2.ListSessionsRequest())
            assert not listed.sessions

    run(work)


def test_lists_come_in_pages_that_survive_changes(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            for index in range(7):
                await running.session(f"name-{index}")
            seen: list[str] = []
            token = ""
            while True:
                page = await running.sessions.ListSessions(
                    inference_pb2.ListSessionsRequest(page_size=3, page_token=token)
                )
                seen += [session.name for session in page.sessions]
                token = page.next_page_token
                if not token:
                    break
                await running.sessions.DeleteSession(inference_pb2.DeleteSessionRequest(name=seen[-1]))
            assert seen == [f"sessions/name-{index}" for index in range(7)]
            for bad in ({"page_size": -1}, {"page_size": 1001}, {"page_token": "x"}, {"page_token": "!"}):
                refusal = await refused(running.sessions.ListSessions(inference_pb2.ListSessionsRequest(**bad)))
                assert refusal.metadata["field"] == next(iter(bad))

    run(work)


def test_deleting(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            ask = inference_pb2.DeleteSessionRequest
            wrong = await refused(running.sessions.DeleteSession(ask(name=name, etag="stale")))
            assert (wrong.code, wrong.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
            await running.sessions.DeleteSession(ask(name=name, etag=(await get(running, name)).etag))
            gone = await refused(running.sessions.DeleteSession(ask(name=name)))
            assert (gone.code, gone.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
            await running.sessions.DeleteSession(ask(name=name, allow_missing=True))
            assert (await refused(running.generate(tokens=[1], session=name))).reason == "SESSION_NOT_FOUND"

    run(work)


def test_a_busy_session_is_deleted_only_by_force_which_cancels(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, FakeModel(vocab_size=VOCAB, item_seconds=0.02)) as running:
            name = await running.session()
            call = running.inference.Generate(request([5], session=name, max_tokens=400))
            await first(call, "delta")
            ask = inference_pb2.DeleteSessionRequest(name=name)
            assert (await refused(running.sessions.DeleteSession(ask))).reason == "SESSION_BUSY"
            ask.force = True
            await running.sessions.DeleteSession(ask)
            assert (await rest(call))[-1].finished.state == types_pb2.Generation.STATE_CANCELLED

    run(work)


# ---- turns


def test_turns_continue_from_what_is_there(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            one = await running.generate(tokens=[5, 6, 7], session=name, max_tokens=4)
            history = [5, 6, 7, *tokens_of(one)]
            two = await running.generate(tokens=[8, 9], session=name, max_tokens=4, expected_position=7)
            assert tokens_of(two) == continuation([*history, 8, 9], 4, vocab=VOCAB)
            finished = two[-1].finished
            assert finished.start_position == 9
            assert finished.name.startswith(f"{name}/generations/")
            assert finished.usage.prompt_tokens == 9
            assert finished.usage.cached_prompt_tokens == 6  # all but the last sampled token, which only now runs
            assert not finished.re_prefilled
            assert finished.durable_offset == 4
            found = await get(running, name)
            assert (found.position, found.durable_position) == (13, 13)
            assert found.state == Session.STATE_LIVE
            again = await running.inference.GetGeneration(inference_pb2.GetGenerationRequest(name=finished.name))
            assert again.usage == finished.usage

    run(work)


def test_text_goes_into_a_session_as_it_is_with_bos_only_at_its_beginning(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            bos = running.text.tokenizer.bos_id
            assert bos is not None
            asked = request(text="ab", session=name)
            asked.input.add_bos = True
            one = [event async for event in running.inference.Generate(asked)]
            start = [bos, *running.text.encode("ab", False)]
            assert tokens_of(one) == continuation(start, 5, vocab=VOCAB)
            two = await running.generate(text="cd", session=name)
            given = [*start, *tokens_of(one), *running.text.encode("cd", False)]
            assert tokens_of(two) == continuation(given, 5, vocab=VOCAB)

    run(work)


@pytest.mark.parametrize("closed", [True, False])
def test_a_chat_turn_is_what_the_template_writes_behind_a_reply(tmp_path: Path, closed: bool) -> None:
    async def work() -> None:
        model = ScriptedModel()
        async with daemon(tmp_path, model) as running:
            end = running.text.encode("<end_turn>", False)
            reply = running.text.encode("Hello", False)
            model.script = [*reply, *(end if closed else [])]
            name = await running.session()
            one = await running.generate(
                chat=user("Hi"), session=name, max_tokens=len(model.script), stop={"ignore_eos": False}
            )
            assert text_of(one) == "Hello"
            await running.generate(chat=user("And?"), session=name, max_tokens=1)
            assert running.runtime.engine is not None
            log = running.runtime.engine.session_tokens("alpha")[:-1]
            whole = types_pb2.Chat(
                messages=[
                    types_pb2.Message(role=types_pb2.Message.ROLE_USER, text="Hi"),
                    types_pb2.Message(role=types_pb2.Message.ROLE_ASSISTANT, text="Hello"),
                    types_pb2.Message(role=types_pb2.Message.ROLE_USER, text="And?"),
                ]
            )
            shown = await running.inference.RenderChat(inference_pb2.RenderChatRequest(chat=whole))
            assert running.text.decode(log, skip_special=False) == shown.text
            assert log == list(shown.ids)

    run(work)


def test_a_wrong_expected_position_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            await turn(running, name, [5])
            for fields in ({"tokens": [6]}, {"chat": user("x")}):
                refusal = await refused(running.generate(session=name, expected_position=5, **fields))
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "POSITION_MISMATCH")
                assert refusal.metadata["position"] == "6"

    run(work)


def test_c12_an_empty_session_is_legal_and_a_restart_recomputes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            empty, name = await running.session("empty"), await running.session("used")
            await turn(running, name, [5] * 100, max_tokens=30)
        model = FakeModel(vocab_size=VOCAB)
        async with daemon(tmp_path, model) as running:
            assert (await get(running, empty)).position == 0
            found = await get(running, name)
            assert (found.position, found.kv_position) == (130, 129)
            assert found.state == Session.STATE_STORED
            finished = await turn(running, name, [6])
            assert finished.usage.cached_prompt_tokens == 129
            assert model.prefilled == 2  # the last sampled token and the new one
            assert not finished.re_prefilled
            missing = await refused(running.generate(tokens=[1], session="sessions/nowhere"))
            assert missing.reason == "SESSION_NOT_FOUND"
            assert (await turn(running, empty, [7])).state == types_pb2.Generation.STATE_SUCCEEDED

    run(work)


def test_c13_a_refused_turn_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, FakeModel(vocab_size=VOCAB, max_context=64)) as running:
            name, twin = await running.session("alpha"), await running.session("twin")
            for session in (name, twin):
                await turn(running, session, [5] * 30, max_tokens=10)
            before = await get(running, name)
            bad: list[dict[str, Any]] = [
                {"tokens": [6] * 100},
                {"tokens": [6], "max_tokens": 0},
                {"tokens": [VOCAB]},
                {"tokens": [6], "sampling": {"temperature": -1.0}},
                {"tokens": [6], "sampling": {"logit_bias": {5: float("nan")}}},
                {"chat": types_pb2.Chat(messages=[types_pb2.Message(text="no role")])},
                {"tokens": []},
            ]
            for fields in bad:
                refusal = await refused(running.generate(session=name, **fields))
                assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert await get(running, name) == before
            after = [await running.generate(tokens=[7] * 5, session=session) for session in (name, twin)]
            assert tokens_of(after[0]) == tokens_of(after[1])

    run(work)


def test_c13_a_turn_that_is_cancelled_before_its_first_token_leaves_no_trace(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)
        async with daemon(tmp_path, model) as running:
            name = await running.session()
            await turn(running, name, [5] * 10)
            gate = blocked(model)
            call = running.inference.Generate(request([6] * 20, session=name))
            started = (await first(call, "started")).started
            cancelling = asyncio.ensure_future(
                running.inference.CancelGeneration(inference_pb2.CancelGenerationRequest(name=started.name))
            )
            await asyncio.sleep(0.05)
            gate.set()
            assert (await cancelling).state == types_pb2.Generation.STATE_CANCELLED
            assert (await get(running, name)).position == 15
            await rest(call)
            assert (await turn(running, name, [7])).start_position == 16

    run(work)


def test_c14_two_callers_never_interleave(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, FakeModel(vocab_size=VOCAB, max_context=1024)) as running:
            name = await running.session()
            history: list[int] = []
            for index in range(50):
                calls = [running.generate(tokens=[mark, index], session=name, max_tokens=2) for mark in (100, 200)]
                done = await asyncio.gather(*calls, return_exceptions=True)
                refusals = [outcome for outcome in done if isinstance(outcome, BaseException)]
                assert len(refusals) <= 1
                for refusal in refusals:
                    assert isinstance(refusal, grpc.aio.AioRpcError)
                    assert refusal.code() == grpc.StatusCode.ABORTED
                served = [
                    (outcome[0].started.start_position, mark, tokens_of(outcome))
                    for mark, outcome in zip((100, 200), done, strict=True)
                    if not isinstance(outcome, BaseException)
                ]
                for start, mark, tokens in sorted(served):
                    assert start == len(history) + 2
                    history += [mark, index, *tokens]
            assert running.runtime.engine is not None
            assert running.runtime.engine.session_tokens("alpha") == history
            assert await running.position(name) == len(history)

    run(work)


def test_a_turn_under_way_names_itself_to_the_second_caller(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)
        async with daemon(tmp_path, model) as running:
            name = await running.session()
            gate = blocked(model)
            call = running.inference.Generate(request([5], session=name))
            active = (await first(call, "started")).started.name
            assert (await get(running, name)).active_generation == active
            refusal = await refused(running.generate(tokens=[6], session=name))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "SESSION_BUSY")
            assert refusal.metadata["active_generation"] == active
            gate.set()
            assert (await rest(call))[-1].finished.state == types_pb2.Generation.STATE_SUCCEEDED

    run(work)


# ---- the same request once more


@pytest.mark.parametrize("restart", [False, True])
def test_a_first_turn_that_could_not_be_said_again_can_be_asked_for_again(tmp_path: Path, restart: bool) -> None:
    """A client that lost its stream sends the same request: the system message of a first turn is not a second one."""
    system = types_pb2.Message(role=types_pb2.Message.ROLE_SYSTEM, text="Be brief.")
    fields: dict[str, Any] = {
        "chat": types_pb2.Chat(messages=[system, *user("Hello").messages]),
        "request_id": "0f9d54a6-6a3c-4f0e-9b3e-2f9d5a1c7e11",
    }

    async def work() -> None:
        async with daemon(tmp_path, template=SYSTEM_FIRST) as running:
            name = await running.session()
            told = await running.generate(session=name, **fields)
            if not restart:
                assert_same(await running.generate(session=name, **fields), told)
        async with daemon(tmp_path, template=SYSTEM_FIRST) as running:
            assert_same(await running.generate(session=name, **fields), told)

    run(work)


def test_a_stop_id_is_as_hidden_after_a_restart_as_before(tmp_path: Path) -> None:
    stop = continuation([5, 6], 3, vocab=VOCAB)[-1]
    fields: dict[str, Any] = {
        "tokens": [5, 6],
        "request_id": "0f9d54a6-6a3c-4f0e-9b3e-2f9d5a1c7e12",
        "stop": {"token_ids": [stop]},
        "output": {"text": True, "token_ids": True},
    }

    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            told = await running.generate(session=name, **fields)
            assert tokens_of(told)[-1] == stop
        async with daemon(tmp_path) as running:
            assert_same(await running.generate(session=name, **fields), told)

    run(work)


def test_the_stop_string_is_known_after_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        model = ScriptedModel()
        async with daemon(tmp_path, model) as running:
            model.script = [token for letter in "abcd" for token in running.text.tokenizer.encode(letter)]
            name = await running.session()
            told = (await running.generate(tokens=[5], session=name, stop={"sequences": ["bc"]}))[-1].finished
            assert told.stop_match.sequence == "bc"
        async with daemon(tmp_path) as running:
            asked = inference_pb2.GetGenerationRequest(name=told.name)
            assert (await running.inference.GetGeneration(asked)).stop_match.sequence == "bc"

    run(work)


def assert_same(again: list[types_pb2.GenerateEvent], told: list[types_pb2.GenerateEvent]) -> None:
    assert again[0].started.name == told[0].started.name
    assert (tokens_of(again), text_of(again)) == (tokens_of(told), text_of(told))
