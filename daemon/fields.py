"""Which request fields are honoured; everything else that is set is refused by name.

The check walks what a request has set, so a field that is added to the contract is refused until it is listed here:
honouring is a decision, refusing is the default. Fields that this version of the contract does not know are refused
too, since protobuf would pass them over without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from colibri.daemon.errors import InvalidFieldError, UnsupportedFieldError


def _under(prefix: str, *names: str) -> set[str]:
    return {f"{prefix}.{name}" for name in names}


_MESSAGES = _under("messages", "role", "text", "reasoning", "tool_call_id") | _under(
    "messages.tool_calls", "id", "name", "arguments_json"
)
_CHAT = _MESSAGES | {"enable_thinking", "template_kwargs", "add_generation_prompt"}
_TOOLS = _under("tools", "name", "description", "parameters_json_schema")

# Request message -> paths of its honoured fields. A message field is honoured through its own fields, or, where it is
# listed itself (a Duration, a Struct), as a whole.
HONOURED: Mapping[str, frozenset[str]] = {
    name: frozenset(paths)
    for name, paths in {
        "GenerateRequest": {
            *("request_id", "session", "expected_position", "on_disconnect"),
            *_under("input", "text", "add_bos", "tokens.ids"),
            *_under("input.chat", *_CHAT),
            *_under("sampling", "temperature", "top_p", "top_k", "seed"),
            *_under("stop", "max_tokens", "sequences", "token_ids", "include_stop", "ignore_eos", "max_duration"),
            *_under("output", "text", "token_ids", "heartbeat"),
        },
        "GetGenerationRequest": {"name"},
        "CancelGenerationRequest": {"name"},
        "TokenizeRequest": {"text", "add_bos"},
        "DetokenizeRequest": {"ids"},
        "RenderChatRequest": _under("chat", *_CHAT, *_TOOLS),
        "CreateSessionRequest": {"session_id", "request_id", *_under("session", "display_name", "labels")},
        "GetSessionRequest": {"name"},
        "ListSessionsRequest": {"page_size", "page_token"},
        "DeleteSessionRequest": {"name", "etag", "force", "allow_missing"},
        "GetServerInfoRequest": set(),
        "WatchStatsRequest": {"interval", "expert_heat"},
    }.items()
}


def check_fields(request: Message) -> None:
    """Raises UnsupportedFieldError naming the first set field that is not honoured, InvalidFieldError for an enum
    number that the contract does not have."""
    name = request.DESCRIPTOR.name
    _check(request, HONOURED[name], "", "")


def _check(message: Message, honoured: frozenset[str], path: str, shown: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where = shown.rstrip(".") or message.DESCRIPTOR.name
        number = unknown[0].field_number
        raise UnsupportedFieldError(
            f"{where} has a field with number {number}, which this version does not know", field=f"{shown}{number}"
        )
    for descriptor, value in message.ListFields():
        below = path + descriptor.name
        if below not in honoured and not any(entry.startswith(below + ".") for entry in honoured):
            raise UnsupportedFieldError(
                f"field {shown}{descriptor.name} is set, and this version does not honour it",
                field=shown + descriptor.name,
            )
        for mark, item in _items(descriptor, value):
            if descriptor.enum_type is not None and item not in descriptor.enum_type.values_by_number:
                raise InvalidFieldError(
                    f"field {shown}{descriptor.name}{mark} is {item}, which {descriptor.enum_type.name} does not have",
                    field=shown + descriptor.name + mark,
                )
            if below not in honoured:
                _check(item, honoured, below + ".", f"{shown}{descriptor.name}{mark}.")


def _items(descriptor: FieldDescriptor, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of a field with the mark that singles each out: "" or "[index]". Maps are one value."""
    if not descriptor.is_repeated or (descriptor.message_type and descriptor.message_type.GetOptions().map_entry):
        yield "", value
    elif descriptor.message_type is not None or descriptor.enum_type is not None:
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
