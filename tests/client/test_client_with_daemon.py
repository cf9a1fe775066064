"""The client against the real service, engine and store; only the model has no weights."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import tokenizers

from colibri.client import AbortedError, Client, Delta, Finished, InvalidArgumentError, Progress, Stop, message
from testkit.fake_model import FakeModel
from testkit.service import VOCAB, ScriptedModel, daemon, run
from testkit.tiny_tokenizer import EMOJI, added_ids, tokenizer_json

REPLY = f"Paris. {EMOJI}"
END_OF_TURN = added_ids(VOCAB)["<end_turn>"]


def reply_ids() -> list[int]:
    return list(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(VOCAB))).encode(REPLY).ids)


def address(folder: Path) -> str:
    return f"unix:{folder}/d.sock"


def test_a_session_holds_what_transformers_would_render_for_the_whole_chat(tmp_path: Path) -> None:
    async def work() -> None:
        model = ScriptedModel(script=[*reply_ids(), END_OF_TURN])
        async with daemon(tmp_path, model), Client(address(tmp_path)) as client:
            await client.sessions.create("paris")
            whole = []
            position = 0
            for question in ("What is the capital of France?", "and of Spain?", "Thanks"):
                whole.append(message("user", question))
                prompt = await client.render_chat(whole)
                stream = client.chat(question, session="paris", expected_position=position, token_ids=True)
                events = [event async for event in stream]
                last = events[-1]
                assert isinstance(last, Finished)
                assert "".join(event.text for event in events if isinstance(event, Delta)) == REPLY
                assert stream.start_position == len(prompt.ids)
                assert last.statistics.prompt_tokens == len(prompt.ids)
                assert last.statistics.cached_prompt_tokens == max(0, position - 1)  # all but the last sampled one
                position = stream.start_position + stream.next_offset
                whole.append(message("assistant", REPLY))
            assert (await client.sessions.get("paris")).position == position
            with pytest.raises(AbortedError) as caught:
                await client.chat("x", session="paris", expected_position=1).text()
            assert caught.value.reason == "POSITION_MISMATCH"

    run(work)


def test_cancel_keeps_what_was_said_and_signs_of_life_come_while_nothing_is_said(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB, item_seconds=0.05)
        async with daemon(tmp_path, model), Client(address(tmp_path), heartbeat=0.1) as client:
            stream = client.chat("Tell me", stop=Stop(max_tokens=200, ignore_eos=True))
            kinds = set()
            async for event in stream:
                kinds.add(type(event))
                if isinstance(event, Delta) and event.next_offset >= 2:
                    await client.cancel(stream.generation)
                if isinstance(event, Finished):
                    assert event.finish_reason == "CANCELLED"
            assert Progress in kinds
            assert 2 <= (await client.get_generation(stream.generation)).next_offset < 200

    run(work)


def test_a_refused_request_says_which_field_and_the_next_one_works(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path), Client(address(tmp_path)) as client:
            with pytest.raises(InvalidArgumentError) as caught:
                await client.chat("hi", stop=Stop(max_tokens=0)).text()
            assert caught.value.metadata["field"] == "stop.max_tokens"
            with pytest.raises(InvalidArgumentError) as caught:
                await client.generate([VOCAB]).text()
            assert caught.value.reason == "TOKEN_OUT_OF_RANGE"
            assert await client.detokenize(await client.tokenize("still here")) == "still here"

    run(work)


def test_the_command_line_comes_back_to_a_session(tmp_path: Path) -> None:
    async def ask(text: str) -> tuple[str, dict[str, int]]:
        arguments = ["chat", "--addr", address(tmp_path), "--session", "paris", "--message", text, "--json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "colibri.client.cli", *arguments, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        document = json.loads(out)
        return document["text"], document["generation"]["usage"]

    async def work() -> None:
        for turn in range(2):  # the second turn after a restart of the daemon
            model = ScriptedModel(script=[*reply_ids(), END_OF_TURN])
            async with daemon(tmp_path, model):
                text, usage = await ask("What is the capital of France?")
                assert text == REPLY
                assert (usage["cached_prompt_tokens"] > 0) is bool(turn)

    run(work)
