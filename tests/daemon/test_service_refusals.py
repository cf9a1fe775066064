"""What the service refuses, with which reason, and the contract as a whole: capabilities, sizes, server info."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest

from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2
from testkit.fake_model import FakeModel, continuation
from testkit.service import VOCAB, blocked, daemon, first, refused, request, run, tokens_of, user

Generation = types_pb2.Generation


def test_c07_a_prompt_beyond_the_context_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, FakeModel(vocab_size=VOCAB, max_context=64)) as running:
            for length, most, fits in [(62, 1, True), (63, 1, True), (64, 1, False), (65, 1, False), (1000, 1, False),
                                       (48, 16, True), (49, 16, False), (62, 16, False)]:  # fmt: skip
                call = running.inference.Generate(request([5] * length, max_tokens=most))
                if fits:
                    events = [event async for event in call]
                    assert events[-1].finished.next_offset == most
                    continue
                refusal = await refused(call.read())
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED")
                assert refusal.metadata["prompt_tokens"] == str(length)
                assert refusal.metadata["limit"] == "64"
            asked = request([5] * 60)
            asked.stop.ClearField("max_tokens")
            events = [event async for event in running.inference.Generate(asked)]
            assert events[-1].finished.finish_reason == types_pb2.FINISH_REASON_CONTEXT_FULL
            assert events[-1].finished.next_offset == 4

    run(work)


def test_c08_empty_and_degenerate_prompts_hurt_nobody_else(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            special = running.text.tokenizer
            empty = [request(text=""), request([]), inference_pb2.GenerateRequest(), request(chat=types_pb2.Chat())]
            zero = request([5], max_tokens=0)
            for asked in (*empty, zero):
                refusal = await refused(running.inference.Generate(asked).read())
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
                assert refusal.metadata["field"].split(".")[0] in ("input", "stop")
                await running.generate(tokens=[5], max_tokens=1)
            for text in ("<bos>", "<eos>", "<end_turn>", "   ", "\x00", "\n"):
                events = await running.generate(text=text)
                assert events[-1].finished.state == Generation.STATE_SUCCEEDED
            bos = request(text="")
            bos.input.add_bos = True
            events = [event async for event in running.inference.Generate(bos)]
            assert tokens_of(events) == continuation([special.bos_id or 0], 5, vocab=VOCAB)

    run(work)


def test_a_lone_surrogate_cannot_even_arrive() -> None:
    with pytest.raises(UnicodeEncodeError):
        types_pb2.Input(text="\ud800").SerializeToString()
    raw = types_pb2.Input(text="xx").SerializeToString().replace(b"xx", b"\xff\xff")
    with pytest.raises(Exception, match="UTF-8"):
        types_pb2.Input.FromString(raw)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"tokens": [5, VOCAB]}, "TOKEN_OUT_OF_RANGE", "input.tokens.ids[1]"),
        ({"tokens": [5], "sampling": {"temperature": float("nan")}}, "INVALID_FIELD", "sampling.temperature"),
        ({"tokens": [5], "sampling": {"min_p": 0.1}}, "UNSUPPORTED_FIELD", "sampling.min_p"),
        ({"tokens": [5], "priority": 1}, "UNSUPPORTED_FIELD", "priority"),
        ({"tokens": [5], "stop": {"min_tokens": 1}}, "UNSUPPORTED_FIELD", "stop.min_tokens"),
        ({"tokens": [5], "expected_position": 3}, "INVALID_FIELD", "expected_position"),
        ({"tokens": [5], "session": "x"}, "INVALID_FIELD", "session"),
        ({"tokens": [5], "request_id": "x"}, "INVALID_FIELD", "request_id"),
        ({"tokens": [5], "constraint": types_pb2.Constraint(regex="a")}, "UNSUPPORTED_FIELD", "constraint"),
        ({"chat": types_pb2.Chat(tools=[types_pb2.Tool(name="f")])}, "UNSUPPORTED_FIELD", "input.chat.tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], reason: str, field: str
) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            refusal = await refused(running.inference.Generate(request(**fields)).read())
            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert (refusal.reason, refusal.metadata["field"]) == (reason, field)
            assert running.runtime.model.prefilled == 0

    run(work)


def test_a_template_s_own_refusal_is_passed_on(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            chat = user("hi")
            chat.template_kwargs.update({"nonsense": 1})
            refusal = await refused(running.inference.RenderChat(inference_pb2.RenderChatRequest(chat=chat)))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert "nonsense" in refusal.message

    run(work)


def test_a_full_queue_fails_fast(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB, max_rows=1)
        gate = blocked(model)
        async with daemon(tmp_path, model, max_queue=1) as running:
            calls = [running.inference.Generate(request([5], max_tokens=300)) for _ in range(2)]
            for call in calls:
                await first(call, "started")
                await asyncio.sleep(0.05)
            refusal = await refused(running.inference.Generate(request([5])).read())
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            gate.set()
            for call in calls:
                call.cancel()

    run(work)


@pytest.mark.parametrize("name", ["generations/none", "sessions/abcd/generations/none"])
def test_an_unknown_generation_is_not_found(tmp_path: Path, name: str) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            asks = [
                running.inference.GetGeneration(inference_pb2.GetGenerationRequest(name=name)),
                running.inference.CancelGeneration(inference_pb2.CancelGenerationRequest(name=name)),
            ]
            for ask in asks:
                assert (await refused(ask)).code == grpc.StatusCode.NOT_FOUND

    run(work)


# ---- the contract as a whole


def test_every_rpc_is_either_a_capability_or_unimplemented(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            info = await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            built = set(info.capabilities)
            for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
                for service in file.services_by_name.values():
                    stub = {"InferenceService": running.inference, "SessionService": running.sessions}.get(
                        service.name, running.admin
                    )
                    for method in service.methods:
                        if f"{service.name}.{method.name}" in built:
                            continue
                        call = getattr(stub, method.name)(_empty(method))
                        refusal = await refused(call.read() if method.server_streaming else call)
                        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_BUILT")
                        assert method.full_name in refusal.message
            assert {"InferenceService.Generate", "SessionService.CreateSession", "chat"} <= built
            assert "InferenceService.ResumeGeneration" not in built

    run(work)


def _empty(method: Any) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(method.input_type)()


def test_the_server_says_what_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            info = await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            assert (info.model, info.architecture, info.vocab_size) == ("fake", "FakeForCausalLM", VOCAB)
            assert info.content_id == running.runtime.model.content_id
            assert list(info.eos_token_ids) == list(running.text.eos_ids)
            assert info.max_context == 512
            assert info.default_sampling.temperature == 0
            assert not info.default_sampling.HasField("seed")
            assert uuid.UUID(info.boot_id)

    run(work)


def test_c05_the_largest_prompts_arrive_and_are_judged_by_the_context(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path) as running:
            texts = [request(text="a" * size) for size in ((4 << 20) - 64, (4 << 20) + 64)]
            for asked in (*texts, request([200] * (8 << 20))):
                refusal = await refused(running.inference.Generate(asked).read())
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED")
                assert int(refusal.metadata["limit"]) in (512, 64 << 10)
            long = inference_pb2.TokenizeRequest(text="x" * (4 << 20))
            assert (await refused(running.inference.Tokenize(long))).metadata["limit"] == str(64 << 10)
            ids = inference_pb2.DetokenizeRequest(ids=[200] * (1 << 17))
            assert (await refused(running.inference.Detokenize(ids))).metadata["limit"] == str(1 << 16)
            refusal = await refused(running.inference.Generate(request(text="x" * (65 << 20))).read())
            assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(64 << 20) in refusal.message

    run(work)
