"""What the command line takes as text, ids and seconds, and the flag that stands for a field of the protocol.

Refuses text that is not UTF-8 before it comes near the protocol, which could not carry it, and an empty id, which the
protocol would read as none at all.
"""

from __future__ import annotations

import argparse
import math
import re

from colibri.client.errors import ColibriError, ServiceError

_SESSION = re.compile(r"[a-z][a-z0-9-]{3,62}")  # the daemon's rule
_FLAGS = {
    "name": "--session",
    "session": "--session",
    "session_id": "--session",
    "sampling.temperature": "--temperature",
    "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p",
    "sampling.seed": "--seed",
    "stop.max_tokens": "--max-tokens",
    "stop.sequences": "--stop",
    "input.add_bos": "--add-bos",
}


class UsageError(ColibriError):
    """What was given cannot be used, or does not go together; found after parsing, or in a line that was read."""


def check_utf8(value: str) -> str:
    """`value`. Raises ValueError naming the first byte that Python could only keep as a lone surrogate."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not UTF-8 at byte {len(value[: error.start].encode('utf-8'))}") from None
    return value


def text(value: str) -> str:
    """The type of an argument that is text, which may be empty."""
    try:
        return check_utf8(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def name(value: str) -> str:
    """The type of an argument that names something: an address, a session by id or by `sessions/{id}`."""
    if not value.removeprefix("sessions/"):
        raise argparse.ArgumentTypeError("empty; leave it out, or give a name")
    return text(value)


def session(value: str) -> str:
    """The type of an argument that may become a new session's name."""
    if not _SESSION.fullmatch(name(value).removeprefix("sessions/")):
        raise argparse.ArgumentTypeError(
            f"{value!r} cannot name a session: 4 to 63 characters are needed, lower-case letters, digits and hyphens, "
            "a letter first"
        )
    return value


def seconds(value: str) -> float:
    """The type of an argument that is a time."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds above 0")
    return number


def flag_of(error: ColibriError) -> str:
    """The flag of `chat` and `generate` whose value the daemon refused, "" if it did not name a field with a flag."""
    field = error.metadata.get("field", "") if isinstance(error, ServiceError) else ""
    return _FLAGS.get(field.partition("[")[0], "")
