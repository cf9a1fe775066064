"""Protocol messages as plain Python values, for `--json`: numbers stay numbers, durations are seconds.

Only a seed is text: it uses all of its 64 bits, and most readers of JSON round a number above 2^53.
"""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from colibri.client.events import seconds


def plain(message: Message) -> dict[str, Any]:
    """Every scalar, list and map of a message by name, submessages only where they are set; bytes are lists of numbers.

    64-bit numbers but a seed stay numbers (the protobuf JSON form writes all of them as text), enums are their names, a
    Duration is seconds, a Timestamp is RFC 3339 text.
    """
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(field: Any, value: Any) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return {str(key): _one(entry.fields_by_name["value"], item) for key, item in value.items()}
    if field.is_repeated:
        return [_one(field, item) for item in value]
    return _one(field, value)


def _one(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    if field.name == "seed":
        return str(value)
    if field.type == field.TYPE_FLOAT:
        return _shortest(value)
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, Duration):
        return seconds(value)
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    return plain(value) if isinstance(value, Message) else value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same 32-bit float: 0.7, not 0.699999988079071."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((short for short in candidates if struct.pack("<f", short) == struct.pack("<f", value)), value)
