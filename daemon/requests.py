"""Requests, checked value by value and turned into what the engine and the text side take.

fields.py has already refused every field that is not honoured; here each honoured value is held against its limit, and
an error names field, value and limit. Pure but for the drawn seed and id: nothing is queued, read or written.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from colibri.daemon.chat import OutputText, TextModel
from colibri.daemon.errors import ContextExceededError, TokenOutOfRangeError, UnsupportedFieldError
from colibri.daemon.generation import SamplingSpec
from colibri.daemon.rpc import invalid
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2

ID = re.compile(r"[a-z][a-z0-9-]{3,62}")
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_TEMPERATURE = 100.0
MIN_HEARTBEAT_SECONDS = 0.05
BYTES_PER_TOKEN = 64  # far above what any tokenizer makes one token of, on average
MIN_INPUT_BYTES = 64 << 10
MAX_SECONDS = 30 * 86400.0
MAX_LABELS = 64
MAX_LABEL_CHARS = 256
_ROLES = {
    types_pb2.Message.ROLE_SYSTEM: "system",
    types_pb2.Message.ROLE_USER: "user",
    types_pb2.Message.ROLE_ASSISTANT: "assistant",
    types_pb2.Message.ROLE_TOOL: "tool",
}


class StopCheck:
    """The engine's side of stop strings: a matcher fed token by token, apart from those of the views."""

    def __init__(self, output: OutputText) -> None:
        self._output = output
        self.matched: str | None = None

    def push(self, token: int) -> bool:
        self.matched = self._output.push(token).stop
        return self.matched is not None


# ---- names and ids


def session_id(name: str, field: str = "name") -> str:
    """The id in "sessions/{id}". Raises InvalidFieldError."""
    prefix, _, identifier = name.partition("/")
    if prefix != "sessions" or not ID.fullmatch(identifier):
        raise invalid(field, f"{name!r} is not sessions/ID with an ID like {ID.pattern}", limit=ID.pattern)
    return identifier


def new_session_id(text: str) -> str | None:
    if text and not ID.fullmatch(text):
        raise invalid("session_id", f"{text!r} is not an id like {ID.pattern}", limit=ID.pattern)
    return text or None


def generation_name(name: str) -> str:
    """Checks "generations/{id}" or "sessions/{id}/generations/{id}". Raises InvalidFieldError."""
    parts = name.split("/")
    head, tail = parts[:-2], parts[-2:]
    good_head = not head or (len(head) == 2 and head[0] == "sessions" and ID.fullmatch(head[1]))
    if not good_head or len(tail) != 2 or tail[0] != "generations" or not re.fullmatch(r"[a-z0-9-]{1,63}", tail[1]):
        raise invalid("name", f"{name!r} is neither generations/ID nor sessions/ID/generations/ID")
    return name


def request_id(text: str) -> str:
    """A UUID as text, drawn if none was given. Raises InvalidFieldError."""
    if not text:
        return str(uuid.uuid4())
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise invalid("request_id", f"{text!r} is not a UUID") from None


def labels(given: Mapping[str, str]) -> dict[str, str]:
    if len(given) > MAX_LABELS:
        raise invalid("session.labels", f"{len(given)} labels, at most {MAX_LABELS}", limit=MAX_LABELS)
    for key, value in given.items():
        if not key or max(len(key), len(value)) > MAX_LABEL_CHARS:
            problem = f"{key[:40]!r}: keys are not empty, keys and values at most {MAX_LABEL_CHARS} characters"
            raise invalid("session.labels", problem, limit=MAX_LABEL_CHARS)
    return dict(given)


# ---- numbers


def seconds(value: Duration, field: str, low: float, high: float = MAX_SECONDS) -> float:
    """A Duration between `low` and `high`. Raises InvalidFieldError."""
    number = value.seconds + value.nanos / 1e9
    if not low <= number <= high:
        raise invalid(field, f"{number:g} s; from {low:g} to {high:g} s is allowed", limit=f"{low:g}..{high:g}")
    return number


def check_tokens(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises TokenOutOfRangeError naming the first id that the model does not have."""
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise TokenOutOfRangeError(
            f"field {field}[{index}]: token id {ids[index]}; this model has ids 0 to {vocab_size - 1}",
            field=f"{field}[{index}]",
            limit=vocab_size - 1,
        )


def input_limit(max_context: int) -> int:
    """Bytes of input that are worth tokenising: what is longer cannot fit, and would cost seconds to refuse."""
    return max(MIN_INPUT_BYTES, BYTES_PER_TOKEN * max_context)


def check_input_bytes(count: int, max_context: int, field: str) -> None:
    """Raises ContextExceededError for input that is too long to be tried."""
    limit = input_limit(max_context)
    if count > limit:
        raise ContextExceededError(
            f"field {field}: {count} bytes; with a context of {max_context} tokens at most {limit} bytes are taken",
            field=field,
            bytes=count,
            limit=limit,
        )


def check_token_count(count: int, most: int, field: str) -> None:
    """Raises ContextExceededError with both numbers."""
    if count > most:
        raise ContextExceededError(
            f"field {field}: a prompt of {count} tokens; the context has {most}",
            field=field,
            prompt_tokens=count,
            limit=most,
        )


@dataclass(frozen=True)
class SamplingDefaults:
    """What an unset field means for this model. `ignored`: settings of its generation_config that are not applied."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """From generation_config.json, read as transformers reads it: without `do_sample` an answer is greedy."""
        neutral = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}
        ignored = [
            f"{name} = {config[name]}" for name, value in neutral.items() if config.get(name) not in (None, value)
        ]
        temperature = _config_number(config, "temperature", 1.0, 0.0, MAX_TEMPERATURE, ignored)
        top_k = _config_number(config, "top_k", 0, 0, 2**31 - 1, ignored)
        top_p = _config_number(config, "top_p", 1.0, 1e-6, 1.0, ignored)
        sampled = config.get("do_sample") is True
        return cls(float(temperature) if sampled else 0.0, int(top_k), float(top_p), tuple(ignored))


def _config_number(
    config: Mapping[str, Any], name: str, default: float, low: float, high: float, ignored: list[str]
) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        ignored.append(f"{name} = {value!r}")
        return default
    return value


def sampling_spec(given: types_pb2.SamplingParams, defaults: SamplingDefaults) -> SamplingSpec:
    """Effective sampling; the seed is drawn if none is given. Raises InvalidFieldError."""
    temperature = given.temperature if given.HasField("temperature") else defaults.temperature
    top_p = given.top_p if given.HasField("top_p") else defaults.top_p
    top_k = given.top_k if given.HasField("top_k") else defaults.top_k
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise invalid(
            "sampling.temperature", f"{temperature:g}; from 0 to {MAX_TEMPERATURE:g} is allowed", limit=MAX_TEMPERATURE
        )
    if not 0 < top_p <= 1:  # false for NaN too
        raise invalid("sampling.top_p", f"{top_p:g}; above 0 and up to 1 is allowed", limit=1)
    if top_k > 2**31 - 1:
        raise invalid("sampling.top_k", f"{top_k}; at most {2**31 - 1} is allowed, 0 is off", limit=2**31 - 1)
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    return SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def check_stop(stop: types_pb2.StopConditions, vocab_size: int) -> None:
    """Raises InvalidFieldError or TokenOutOfRangeError."""
    if stop.HasField("max_tokens") and stop.max_tokens == 0:
        raise invalid("stop.max_tokens", "0; at least 1 is needed, unset is up to the end of the context", limit=1)
    if len(stop.sequences) > MAX_STOPS:
        raise invalid("stop.sequences", f"{len(stop.sequences)} strings, at most {MAX_STOPS}", limit=MAX_STOPS)
    for index, sequence in enumerate(stop.sequences):
        if not 1 <= len(sequence) <= MAX_STOP_CHARS:
            raise invalid(
                f"stop.sequences[{index}]",
                f"{len(sequence)} characters; from 1 to {MAX_STOP_CHARS} are allowed",
                limit=MAX_STOP_CHARS,
            )
    check_tokens(stop.token_ids, vocab_size, "stop.token_ids")


# ---- chats


@dataclass(frozen=True)
class ChatRequest:
    """A chat in the shape that templates take."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]
    add_generation_prompt: bool


def chat_request(chat: types_pb2.Chat, field: str) -> ChatRequest:
    """Raises InvalidFieldError naming the message or tool."""
    if not chat.messages:
        raise invalid(f"{field}.messages", "a chat needs at least one message", limit=1)
    arguments: dict[str, Any] = _plain(json_format.MessageToDict(chat.template_kwargs))
    if chat.HasField("enable_thinking"):
        if arguments.get("enable_thinking", chat.enable_thinking) != chat.enable_thinking:
            raise invalid(f"{field}.template_kwargs", "enable_thinking contradicts the field of that name")
        arguments["enable_thinking"] = chat.enable_thinking
    return ChatRequest(
        messages=[_message(m, f"{field}.messages[{index}]") for index, m in enumerate(chat.messages)],
        tools=[_tool(tool, f"{field}.tools[{index}]") for index, tool in enumerate(chat.tools)] or None,
        arguments=arguments,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    )


def _message(message: types_pb2.Message, field: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{field}.role", "a role is needed: system, user, assistant or tool")
    if role != "assistant" and (message.tool_calls or message.reasoning):
        name = "tool_calls" if message.tool_calls else "reasoning"
        raise invalid(f"{field}.{name}", f"belongs to an assistant's message, not to one of role {role}")
    if message.tool_call_id and role != "tool":
        raise invalid(f"{field}.tool_call_id", f"belongs to a tool's message, not to one of role {role}")
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _tool_call(call: types_pb2.ToolCall, field: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _json_object(call.arguments_json, f"{field}.arguments_json")}
    found: dict[str, Any] = {"type": "function", "function": function}
    return {"id": call.id, **found} if call.id else found


def _tool(tool: types_pb2.Tool, field: str) -> dict[str, Any]:
    if not tool.name:
        raise invalid(f"{field}.name", "a tool needs a name")
    schema = _json_object(tool.parameters_json_schema, f"{field}.parameters_json_schema")
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(field, f"a JSON object is expected, found {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    """Numbers of a Struct are doubles; whole ones become integers, as whoever wrote `2` meant."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


# ---- output


@dataclass(frozen=True)
class OutputSpec:
    """What one view shows, and how often it shows a sign of life."""

    text: bool
    token_ids: bool
    heartbeat: float


def output_spec(request: inference_pb2.GenerateRequest, heartbeat: float) -> OutputSpec:
    """`heartbeat`: the server's default in seconds. Raises InvalidFieldError."""
    output = request.output
    text = output.text if output.HasField("text") else request.input.WhichOneof("kind") != "tokens"
    if output.HasField("heartbeat") and (output.heartbeat.seconds or output.heartbeat.nanos):
        heartbeat = seconds(output.heartbeat, "output.heartbeat", MIN_HEARTBEAT_SECONDS)
    return OutputSpec(text, output.token_ids, heartbeat)


def cancels_on_disconnect(request: inference_pb2.GenerateRequest) -> bool:
    """Whether the generation ends with its last viewer. Raises InvalidFieldError."""
    policy = request.on_disconnect
    if policy == inference_pb2.DISCONNECT_POLICY_PAUSE:
        raise unsupported("on_disconnect", "PAUSE is not built in this version")
    if policy == inference_pb2.DISCONNECT_POLICY_UNSPECIFIED:
        return not request.session
    return policy == inference_pb2.DISCONNECT_POLICY_CANCEL


def unsupported(field: str, problem: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(f"field {field}: {problem}", field=field)


def new_output(text: TextModel, stop: types_pb2.StopConditions, *, at_start: bool) -> OutputText:
    return text.output(list(stop.sequences), include_stop=stop.include_stop, at_start=at_start)
