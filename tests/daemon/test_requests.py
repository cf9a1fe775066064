"""Every honoured value against its limit: the error names field, value and limit."""

from __future__ import annotations

import math
import uuid
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from colibri.daemon import requests
from colibri.daemon.errors import InvalidFieldError, TokenOutOfRangeError, UnsupportedFieldError
from colibri.daemon.generation import SamplingSpec
from colibri.daemon.requests import SamplingDefaults, chat_request, sampling_spec
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2

GREEDY = SamplingDefaults()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": 101.0}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": -1.0}, "sampling.top_p"),
        ({"top_p": math.nan}, "sampling.top_p"),
        ({"top_k": 2**31}, "sampling.top_k"),
    ],
)
def test_sampling_out_of_range_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field) as refused:
        sampling_spec(types_pb2.SamplingParams(**given), GREEDY)
    assert refused.value.metadata["field"] == field
    assert "limit" in refused.value.metadata


def test_what_is_set_is_kept_and_what_is_not_comes_from_the_model() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_k=20, top_p=0.75)
    given = types_pb2.SamplingParams(temperature=0.0, seed=7)
    assert sampling_spec(given, defaults) == SamplingSpec(temperature=0.0, top_k=20, top_p=0.75, seed=7)
    assert sampling_spec(types_pb2.SamplingParams(seed=2**64 - 1), defaults).seed == 2**64 - 1
    drawn = {sampling_spec(types_pb2.SamplingParams(), defaults).seed for _ in range(8)}
    assert len(drawn) == 8


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingDefaults(0.0, 0, 0.9)),
        ({"do_sample": True}, SamplingDefaults(1.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(0.6, 20, 0.95)),
        ({"repetition_penalty": 1.05}, SamplingDefaults(ignored=("repetition_penalty = 1.05",))),
        ({"repetition_penalty": 1.0, "min_p": None}, SamplingDefaults()),
        ({"top_p": "much"}, SamplingDefaults(ignored=("top_p = 'much'",))),
        ({"do_sample": True, "temperature": -1}, SamplingDefaults(1.0, ignored=("temperature = -1",))),
    ],
)
def test_the_model_s_own_defaults(config: dict[str, Any], expected: SamplingDefaults) -> None:
    assert SamplingDefaults.of(config) == expected


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"sequences": ["a", ""]}, r"stop.sequences\[1\]"),
        ({"sequences": ["x" * 1025]}, r"stop.sequences\[0\]"),
        ({"sequences": ["x"] * 65}, "stop.sequences"),
    ],
)
def test_stop_conditions_out_of_range_are_refused(stop: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        requests.check_stop(types_pb2.StopConditions(**stop), 128)


@pytest.mark.parametrize("token", [128, 2**31, 2**32 - 1])
def test_c09_ids_beyond_the_vocabulary_are_refused_at_the_door(token: int) -> None:
    with pytest.raises(TokenOutOfRangeError, match=rf"stop.token_ids\[1\]: token id {token}; .* 0 to 127"):
        requests.check_stop(types_pb2.StopConditions(token_ids=[127, token]), 128)
    requests.check_tokens([0, 127], 128, "x")
    requests.check_tokens([], 128, "x")


@pytest.mark.parametrize("name", ["sessions/abcd", "sessions/a-0-b", "sessions/" + "a" * 63])
def test_session_names(name: str) -> None:
    assert requests.session_id(name) == name.removeprefix("sessions/")


@pytest.mark.parametrize(
    "name", ["", "abcd", "sessions/", "sessions/abc", "sessions/Abcd", "sessions/1abc", "sessions/" + "a" * 64,
             "sessions/../etc", "sessions/abcd/x", "generations/abcd", "sessions/abcd\n"]
)  # fmt: skip
def test_names_that_are_no_sessions_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="is not sessions/ID"):
        requests.session_id(name)


@pytest.mark.parametrize("name", ["generations/0f", "sessions/abcd/generations/0f-1"])
def test_generation_names(name: str) -> None:
    assert requests.generation_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "generations/", "generations/A", "sessions/abcd", "x/abcd/generations/a", "a/b/c/d/e"]
)
def test_names_that_are_no_generations_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="neither generations/ID nor"):
        requests.generation_name(name)


def test_request_ids_are_uuids() -> None:
    given = str(uuid.uuid4())
    assert requests.request_id(given.upper()) == given
    assert uuid.UUID(requests.request_id("")).version == 4
    with pytest.raises(InvalidFieldError, match="request_id: 'x' is not a UUID"):
        requests.request_id("x")


def test_labels_are_bounded() -> None:
    assert requests.labels({"a": "b"}) == {"a": "b"}
    for bad in ({"": "x"}, {"x": "y" * 257}, {str(index): "" for index in range(65)}):
        with pytest.raises(InvalidFieldError, match=r"session\.labels"):
            requests.labels(bad)


@pytest.mark.parametrize("value", [Duration(seconds=-1), Duration(), Duration(seconds=10**9)])
def test_durations_are_bounded(value: Duration) -> None:
    with pytest.raises(InvalidFieldError, match=r"stop\.max_duration"):
        requests.seconds(value, "stop.max_duration", 0.001)


# ---- chats


def chat(*messages: dict[str, Any], **rest: Any) -> types_pb2.Chat:
    return types_pb2.Chat(messages=[types_pb2.Message(**message) for message in messages], **rest)


USER = {"role": types_pb2.Message.ROLE_USER, "text": "hi"}


def test_a_chat_in_the_shape_of_templates() -> None:
    call = types_pb2.ToolCall(id="c1", name="f", arguments_json='{"a": [1, "é"]}')
    tool = types_pb2.Tool(name="f", description="d", parameters_json_schema='{"type": "object"}')
    assistant = {"role": types_pb2.Message.ROLE_ASSISTANT, "reasoning": "hm", "tool_calls": [call]}
    result = {"role": types_pb2.Message.ROLE_TOOL, "text": "7", "tool_call_id": "c1"}
    given = chat(USER, assistant, result, tools=[tool], enable_thinking=False)
    given.template_kwargs.update({"depth": 2, "share": 0.5, "list": [1, {"x": True}]})
    made = chat_request(given, "input.chat")
    assert made.messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert made.tools == [{"type": "function", "function": function}]
    assert made.arguments == {"depth": 2, "share": 0.5, "list": [1, {"x": True}], "enable_thinking": False}
    assert isinstance(made.arguments["depth"], int)
    assert made.add_generation_prompt


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (chat(), "c.messages: a chat needs"),
        (chat(USER, {"text": "no role"}), r"c.messages\[1\].role: a role is needed"),
        (chat({**USER, "reasoning": "x"}), r"c.messages\[0\].reasoning: belongs to an assistant"),
        (chat({**USER, "tool_call_id": "x"}), r"c.messages\[0\].tool_call_id: belongs to a tool"),
        (
            chat({"role": 3, "tool_calls": [types_pb2.ToolCall(name="f", arguments_json="{")]}),
            r"c.messages\[0\].tool_calls\[0\].arguments_json: not JSON",
        ),
        (chat(USER, tools=[types_pb2.Tool()]), r"c.tools\[0\].name"),
        (
            chat(USER, tools=[types_pb2.Tool(name="f", parameters_json_schema="[]")]),
            r"parameters_json_schema: a JSON object is expected, found list",
        ),
    ],
)
def test_chats_that_make_no_sense_are_refused(given: types_pb2.Chat, named: str) -> None:
    with pytest.raises(InvalidFieldError, match=named):
        chat_request(given, "c")


def test_a_field_and_a_template_argument_may_not_contradict() -> None:
    given = chat(USER, enable_thinking=True)
    given.template_kwargs.update({"enable_thinking": False})
    with pytest.raises(InvalidFieldError, match="enable_thinking contradicts"):
        chat_request(given, "c")


# ---- output and disconnects


def test_text_is_shown_by_default_for_text_and_chat() -> None:
    def shown(**values: Any) -> bool:
        return requests.output_spec(inference_pb2.GenerateRequest(**values), 5).text

    tokens = types_pb2.Input(tokens=types_pb2.TokenIds(ids=[1]))
    assert shown(input=types_pb2.Input(text="x"))
    assert not shown(input=tokens)
    assert shown(input=tokens, output=types_pb2.OutputOptions(text=True))
    assert not shown(input=types_pb2.Input(text="x"), output=types_pb2.OutputOptions(text=False))


def test_the_heartbeat_is_the_request_s_or_the_server_s() -> None:
    def heartbeat(**values: Any) -> float:
        return requests.output_spec(
            inference_pb2.GenerateRequest(output=types_pb2.OutputOptions(**values)), 5.0
        ).heartbeat

    assert heartbeat() == heartbeat(heartbeat=Duration()) == 5.0
    assert heartbeat(heartbeat=Duration(nanos=250_000_000)) == 0.25
    with pytest.raises(InvalidFieldError, match=r"output\.heartbeat"):
        heartbeat(heartbeat=Duration(nanos=1))


@pytest.mark.parametrize(
    ("session", "policy", "cancels"),
    [
        ("", inference_pb2.DISCONNECT_POLICY_UNSPECIFIED, True),
        ("sessions/abcd", inference_pb2.DISCONNECT_POLICY_UNSPECIFIED, False),
        ("", inference_pb2.DISCONNECT_POLICY_CONTINUE, False),
        ("sessions/abcd", inference_pb2.DISCONNECT_POLICY_CANCEL, True),
    ],
)
def test_what_ends_with_its_viewer(session: str, policy: inference_pb2.DisconnectPolicy, cancels: bool) -> None:
    request = inference_pb2.GenerateRequest(session=session, on_disconnect=policy)
    assert requests.cancels_on_disconnect(request) is cancels


def test_pause_is_not_built() -> None:
    request = inference_pb2.GenerateRequest(on_disconnect=inference_pb2.DISCONNECT_POLICY_PAUSE)
    with pytest.raises(UnsupportedFieldError, match="PAUSE"):
        requests.cancels_on_disconnect(request)
