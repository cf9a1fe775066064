"""What the command line refuses before anything is sent, and the flags that stand for fields of the protocol."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from colibri.client.arguments import _FLAGS
from colibri.client.cli import main, parser
from colibri.v1 import types_pb2


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["chat", "--json"],
        ["chat", "--top-k", "-1", "--message", "x"],
        ["chat", "--seed", str(2**64), "--message", "x"],
        ["generate"],
        ["generate", "--prompt", "a", "--file", "b"],
        ["sessions"],
        ["sessions", "rm"],
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    tail = ["--addr", "localhost:1"] if arguments and arguments[0] == "chat" else []
    with pytest.raises(SystemExit) as caught:
        main([*arguments, *tail])
    assert caught.value.code == 2
    assert capsys.readouterr().err


NOT_UTF_8 = "bad \udcff\udcfe"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["chat", "--message", NOT_UTF_8], "argument --message: not UTF-8 at byte 4"),
        (["chat", "--message", "x", "--system", NOT_UTF_8], "argument --system: not UTF-8 at byte 4"),
        (["chat", "--session", NOT_UTF_8], "argument --session: not UTF-8 at byte 4"),
        (["chat", "--stop", f"é{NOT_UTF_8}"], "argument --stop: not UTF-8 at byte 6"),
        (["generate", "--prompt", NOT_UTF_8], "argument --prompt: not UTF-8 at byte 4"),
        (["sessions", "show", NOT_UTF_8], "argument session: not UTF-8 at byte 4"),
        (["sessions", "rm", "a", NOT_UTF_8], "argument session: not UTF-8 at byte 4"),
        (["status", "--addr", NOT_UTF_8], "argument --addr: not UTF-8 at byte 4"),
        (["chat", "--session", ""], "argument --session: empty"),
        (["chat", "--session", "sessions/"], "argument --session: empty"),
        (["sessions", "show", ""], "argument session: empty"),
        (["sessions", "rm", "a", ""], "argument session: empty"),
        (["status", "--addr", ""], "argument --addr: empty"),
        (["status", "--wait", "0"], "argument --wait: '0' is not a number of seconds above 0"),
        (["status", "--wait", "nan"], "argument --wait: 'nan' is not a number of seconds above 0"),
        (["status", "--wait", "soon"], "argument --wait: 'soon' is not a number of seconds above 0"),
    ],
)
def test_arguments_that_the_protocol_cannot_carry_are_refused_by_name(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def _commands(root: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)


def test_every_text_of_the_command_line_is_checked() -> None:
    """What has no type of its own is a path, which may hold any bytes."""
    untyped = {
        action.dest
        for command in _commands(parser())
        for action in command._actions
        if action.type is None and action.nargs != 0 and not isinstance(action, argparse._SubParsersAction)
    }
    assert untyped == {"file"}


def test_every_flag_that_stands_for_a_field_exists() -> None:
    parts: dict[str, Any] = {
        "sampling": types_pb2.SamplingParams,
        "stop": types_pb2.StopConditions,
        "input": types_pb2.Input,
    }
    known = {f"{part}.{field}" for part, message in parts.items() for field in message.DESCRIPTOR.fields_by_name}
    assert set(_FLAGS) <= known | {"name", "session", "session_id"}
    flags = {flag for command in _commands(parser()) for flag in command._option_string_actions}
    assert set(_FLAGS.values()) <= flags
