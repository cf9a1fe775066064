"""A set field that is not honoured is refused by name: tried with every field of every request of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from colibri.daemon.errors import DaemonError, InvalidFieldError, UnsupportedFieldError
from colibri.daemon.fields import HONOURED, check_fields
from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2

REQUESTS: dict[str, Descriptor] = {
    method.input_type.name: method.input_type
    for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
WHOLE = {"google.protobuf.Duration", "google.protobuf.Struct", "google.protobuf.Timestamp", "google.protobuf.FieldMask"}
# Part of nothing that a request sends today, but of the message types that requests embed.
CHECKED = {name: descriptor for name, descriptor in REQUESTS.items() if name in HONOURED}


def leaves(descriptor: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Every path through a message type that ends in something that can be set."""
    for field in descriptor.fields:
        below = (*path, field)
        kind = field.message_type
        if kind is None or kind.full_name in WHOLE or kind.GetOptions().map_entry:
            yield below
        else:
            yield from leaves(kind, below)


def some_value(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return "x"
    return True if field.type == FieldDescriptor.TYPE_BOOL else 1


def set_path(message: Any, path: tuple[FieldDescriptor, ...]) -> None:
    *above, last = path
    for field in above:
        message = getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)
    target = getattr(message, last.name)
    if last.message_type is not None and last.message_type.GetOptions().map_entry:
        key = "x" if last.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING else 1
        target[key] = some_value(last.message_type.fields_by_name["value"])
    elif last.is_repeated:
        target.append(some_value(last))
    elif last.message_type is None:
        setattr(message, last.name, some_value(last))
    elif last.message_type.name == "Struct":
        target["x"] = 1
    else:
        target.SetInParent()


CASES = [
    pytest.param(name, path, id=f"{name}:{'.'.join(field.name for field in path)}")
    for name, descriptor in CHECKED.items()
    for path in leaves(descriptor)
]


def test_requests_of_built_methods_are_checked_and_no_others() -> None:
    from colibri.daemon.fields import HONOURED as honoured

    assert set(honoured) <= set(REQUESTS)
    assert len(CASES) > 80


@pytest.mark.parametrize(("name", "path"), CASES)
def test_each_field_is_either_honoured_or_refused_by_name(name: str, path: tuple[FieldDescriptor, ...]) -> None:
    message = GetMessageClass(CHECKED[name])()
    set_path(message, path)
    dotted = ".".join(field.name for field in path)
    if dotted in HONOURED[name]:
        check_fields(message)
        return
    with pytest.raises(UnsupportedFieldError) as refused:
        check_fields(message)
    named = refused.value.metadata["field"]
    assert named in str(refused.value)
    plain = ".".join(part.split("[")[0] for part in named.split("."))
    assert dotted == plain or dotted.startswith(plain + ".")


def test_every_honoured_path_exists() -> None:
    for name, paths in HONOURED.items():
        existing = {".".join(field.name for field in path) for path in leaves(REQUESTS[name])}
        assert paths <= existing, paths - existing


def refusal(message: Message) -> DaemonError:
    with pytest.raises((UnsupportedFieldError, InvalidFieldError)) as refused:
        check_fields(message)
    return refused.value


def test_the_place_in_a_list_is_told() -> None:
    request = inference_pb2.GenerateRequest()
    request.input.chat.messages.add(role=types_pb2.Message.ROLE_USER)
    request.input.chat.messages.add(role=7)
    error = refusal(request)
    assert isinstance(error, InvalidFieldError)
    assert error.metadata["field"] == "input.chat.messages[1].role"
    assert "is 7, which Role does not have" in str(error)


def unknown_field(number: int) -> bytes:
    """One varint field, in protobuf's wire form."""
    tag = number << 3
    return bytes([0x80 | (tag & 0x7F), tag >> 7, 1])


def test_a_field_of_a_newer_contract_is_refused_wherever_it_is() -> None:
    error = refusal(inference_pb2.GenerateRequest.FromString(unknown_field(999)))
    assert isinstance(error, UnsupportedFieldError)
    assert "number 999" in str(error)
    inner = types_pb2.SamplingParams.FromString(unknown_field(999))
    error = refusal(inference_pb2.GenerateRequest(sampling=inner))
    assert error.metadata["field"] == "sampling.999"


def test_an_empty_request_sets_nothing() -> None:
    check_fields(inference_pb2.GenerateRequest(sampling=types_pb2.SamplingParams()))
