"""What a caller may ask of a generation, as plain values. What is left None is not sent: the model's default holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from google.protobuf.duration_pb2 import Duration

from colibri.v1 import types_pb2

_ROLES = {
    "system": types_pb2.Message.ROLE_SYSTEM,
    "user": types_pb2.Message.ROLE_USER,
    "assistant": types_pb2.Message.ROLE_ASSISTANT,
    "tool": types_pb2.Message.ROLE_TOOL,
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 is off; `seed` None lets the daemon draw one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def message(self) -> types_pb2.SamplingParams:
        params = types_pb2.SamplingParams(logit_bias=self.logit_bias)
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "logit_bias" and value is not None:
                setattr(params, entry.name, value)
        return params


@dataclass(frozen=True)
class Stop:
    """When an answer ends, besides at the model's end of sequence. `max_seconds` finishes it, keeping what there is."""

    max_tokens: int | None = None
    min_tokens: int = 0
    sequences: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    max_seconds: float | None = None

    def message(self) -> types_pb2.StopConditions:
        conditions = types_pb2.StopConditions(
            min_tokens=self.min_tokens,
            sequences=self.sequences,
            token_ids=self.token_ids,
            include_stop=self.include_stop,
            ignore_eos=self.ignore_eos,
        )
        if self.max_tokens is not None:
            conditions.max_tokens = self.max_tokens
        if self.max_seconds is not None:
            conditions.max_duration.CopyFrom(duration(self.max_seconds))
        return conditions


def duration(value: float) -> Duration:
    """`value` in seconds."""
    nanos = round(value * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def message(role: str, text: str) -> types_pb2.Message:
    """A chat message; `role` is system, user, assistant or tool. Raises ValueError for any other."""
    if role not in _ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(_ROLES)}")
    return types_pb2.Message(role=_ROLES[role], text=text)


def chat(messages: str | Sequence[types_pb2.Message], enable_thinking: bool | None = None) -> types_pb2.Chat:
    """A chat of messages; a text alone is one user message."""
    request = types_pb2.Chat(messages=[message("user", messages)] if isinstance(messages, str) else messages)
    if enable_thinking is not None:
        request.enable_thinking = enable_thinking
    return request
