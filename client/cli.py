"""The `colibri` command: chat, generate, sessions list/show/rm, status.

Exit codes: 0 done, 1 the daemon refused or failed, 2 usage (also what the daemon calls an invalid argument),
69 the daemon cannot be reached or went away, 75 try again later (busy, full, loading, draining, stopped in the middle
of an answer), 78 configuration (no usable address, a session of another model, no access), 130 ended with Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from colibri.client import address as addresses
from colibri.client import arguments as types
from colibri.client import display
from colibri.client.arguments import UsageError, check_utf8, flag_of
from colibri.client.client import Client, session_name
from colibri.client.conversation import AbandonedError, Answer, Conversation, PausedError, follow
from colibri.client.errors import (
    AbortedError,
    AccessError,
    AddressError,
    ColibriError,
    FailedPreconditionError,
    InvalidArgumentError,
    NobodyThereError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServerLostError,
    ServiceError,
    UnavailableError,
)
from colibri.client.options import Sampling, Stop, message
from colibri.client.plain import plain

_ADDRESS_HELP = (
    "unix:<path>, a socket's path or <host>:<port> (default: COLIBRI_ADDR, else the only socket under /run/colibri/*/)"
)
_SESSION_HELP = "the session to go on with; created if missing (default: a new one; with --message: none)"
_MESSAGE_HELP = "ask this one question and exit (default: a chat, line by line)"
_LOSS_HELP = "go on in a session whose end was lost to damage, from where it can still be read"
_WAIT_HELP = "wait until the daemon serves, at most so long (exit code 75 if it does not)"
_EXIT_CODES = (
    "exit codes: 0 done; 1 the daemon refused or failed; 2 wrong usage; 69 no daemon there, or it went away; "
    "75 try again later; 78 configuration; 130 ended with Ctrl-C."
)
_BOS_HELP = "put the beginning-of-sequence token in front (default: as the model's files say)"

_POLL_SECONDS = 0.2
EX_OK, EX_FAILED, EX_USAGE, EX_UNAVAILABLE, EX_TEMPFAIL, EX_CONFIG, EX_INTERRUPTED = 0, 1, 2, 69, 75, 78, 130


_WATCH_STATS = "AdminService.WatchStats"  # a capability that older daemons do not have


class NotServingError(ColibriError):
    """The time of --wait is over."""


def exit_code(error: ColibriError) -> int:
    """The exit code that belongs to an error."""
    if isinstance(error, UnavailableError) and not isinstance(error, ServerLostError):
        # A daemon that says why it is unavailable is there, and will take work later.
        return EX_TEMPFAIL if error.reason else EX_UNAVAILABLE
    kinds: list[tuple[type[ColibriError], int]] = [
        (ServerLostError, EX_UNAVAILABLE),
        (NobodyThereError, EX_UNAVAILABLE),
        (ResourceExhaustedError, EX_TEMPFAIL),
        (AbortedError, EX_TEMPFAIL),
        (PausedError, EX_TEMPFAIL),
        (NotServingError, EX_TEMPFAIL),
        (AddressError, EX_CONFIG),
        (FailedPreconditionError, EX_CONFIG),
        (AccessError, EX_CONFIG),
        (UsageError, EX_USAGE),
        (InvalidArgumentError, EX_USAGE),
        (OutOfRangeError, EX_USAGE),
        (AbandonedError, EX_INTERRUPTED),
    ]
    return next((code for kind, code in kinds if isinstance(error, kind)), EX_FAILED)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    root = argparse.ArgumentParser(prog="colibri", description="Talks to a colibrid daemon.", epilog=_EXIT_CODES)
    root.add_argument("--version", action="version", version=f"colibri {version('colibri')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--addr", metavar="ADDRESS", type=types.name, help=_ADDRESS_HELP)
    printing = argparse.ArgumentParser(add_help=False)
    printing.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _chat_parser(commands, [common, printing, _sampling_parser()])
    _generate_parser(commands, [common, printing, _sampling_parser()])
    sessions = commands.add_parser("sessions", help="list, show or remove sessions").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    listing = sessions.add_parser("list", parents=[common, printing], help="all sessions")
    listing.set_defaults(run=_list_sessions)
    show = sessions.add_parser("show", parents=[common, printing], help="one session in full")
    show.add_argument("session", type=types.name, help="the session's name")
    show.set_defaults(run=_show_session)
    remove = sessions.add_parser("rm", parents=[common], help="remove sessions: their tokens and KV")
    remove.add_argument("session", nargs="+", type=types.name, help="the sessions' names")
    remove.set_defaults(run=_remove_sessions)
    status = commands.add_parser("status", parents=[common, printing], help="the daemon, its state and its model")
    status.add_argument("--wait", metavar="SECONDS", type=types.seconds, help=_WAIT_HELP)
    status.set_defaults(run=_status)
    return root


def _chat_parser(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    chat = commands.add_parser("chat", parents=parents, help="chat in a session that the daemon keeps")
    chat.add_argument("--session", metavar="NAME", type=types.session, help=_SESSION_HELP)
    chat.add_argument("--message", metavar="TEXT", type=types.text, help=_MESSAGE_HELP)
    chat.add_argument(
        "--system", default="", metavar="TEXT", type=types.text, help="system message of a new chat (default: none)"
    )
    chat.add_argument("--accept-loss", action="store_true", help=_LOSS_HELP)
    chat.set_defaults(run=_chat_once)


def _generate_parser(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser("generate", parents=parents, help="continue a raw prompt, without a session")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", type=types.text, help="the prompt")
    source.add_argument("--file", metavar="PATH", help="read the prompt from a file; - is standard input")
    generate.add_argument("--add-bos", action=argparse.BooleanOptionalAction, help=_BOS_HELP)
    generate.set_defaults(run=_generate)


def _sampling_parser() -> argparse.ArgumentParser:
    sampling = argparse.ArgumentParser(add_help=False)
    group = sampling.add_argument_group("sampling (default: as the model's files say)")
    group.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    group.add_argument("--top-k", metavar="K", type=int, help="draw from the K likeliest tokens; 0 is off")
    group.add_argument("--top-p", metavar="P", type=float, help="draw from the likeliest that reach P; 1 is off")
    group.add_argument("--seed", metavar="N", type=int, help="same seed, same answer (default: drawn)")
    group.add_argument(
        "--max-tokens", metavar="N", type=int, help="end the answer there (default: what the context holds)"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        type=types.text,
        help="end the answer before this text",
    )
    return sampling


def _options(arguments: argparse.Namespace) -> tuple[Sampling, Stop]:
    """Raises UsageError for a number that the protocol cannot carry."""
    for name, least, limit in (("top_k", 0, 2**32), ("max_tokens", 1, 2**32), ("seed", 0, 2**64)):
        value = getattr(arguments, name)
        if value is not None and not least <= value < limit:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not between {least} and {limit - 1}")
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed
    )
    return sampling, Stop(max_tokens=arguments.max_tokens, sequences=arguments.stop)


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False))


def _answer_json(answer: Answer, session: str) -> dict[str, Any]:
    finished = answer.finished
    if finished is None:
        raise ColibriError("the answer has no end")
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": finished.finish_reason,
        "session": session,
        "generation": plain(finished.generation),
    }


Ask = Callable[[display.AnswerView | None], Coroutine[Any, Any, Answer]]


async def _answer(ask: Ask, session: str, as_json: bool) -> None:
    """Shows one answer, or prints it as JSON. Raises AbandonedError if it was cancelled, PausedError as it says."""
    if as_json:
        answer = await ask(None)
        _print_json(_answer_json(answer, session))
    else:
        with display.AnswerView() as view:
            answer = await ask(view)
    answer.check_not_paused()
    if answer.cancelled:
        raise AbandonedError("the answer was cancelled; what it said is kept")


async def _generate(client: Client, arguments: argparse.Namespace) -> None:
    sampling, stop = _options(arguments)
    prompt = arguments.prompt if arguments.file is None else _read_prompt(arguments.file)
    stream = client.generate(prompt, add_bos=arguments.add_bos, sampling=sampling, stop=stop, token_ids=arguments.json)
    await _answer(lambda view: follow(client, stream, view), "", arguments.json)


def _read_prompt(path: str) -> str:
    """The whole prompt, nothing stripped. Raises UsageError naming the file."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--file {path}: not UTF-8 at byte {error.start}") from error


async def _chat_once(client: Client, arguments: argparse.Namespace) -> None:
    sampling, stop = _options(arguments)
    if not arguments.session and not arguments.accept_loss:
        messages = [message("system", arguments.system)] if arguments.system else []
        messages.append(message("user", arguments.message))
        stream = client.chat(messages, sampling=sampling, stop=stop, token_ids=arguments.json)
        await _answer(lambda view: follow(client, stream, view), "", arguments.json)
        return
    conversation = await _open(client, arguments)

    async def ask(view: display.AnswerView | None) -> Answer:
        return await conversation.say(arguments.message, system=arguments.system, view=view, token_ids=arguments.json)

    await _answer(ask, conversation.session.name, arguments.json)


async def _open(client: Client, arguments: argparse.Namespace) -> Conversation:
    if arguments.accept_loss and not arguments.session:
        raise UsageError("--accept-loss needs --session: a new one has lost nothing")
    conversation = await Conversation.open(client, arguments.session or "", *_options(arguments), arguments.accept_loss)
    if arguments.system and not conversation.is_new:
        raise UsageError(f"--system: {conversation.session.name} has already begun; its system message stays")
    return conversation


async def _list_sessions(client: Client, arguments: argparse.Namespace) -> None:
    sessions = list(await client.sessions.list())
    if arguments.json:
        _print_json([plain(session) for session in sessions])
    else:
        Console(soft_wrap=True).print(display.session_table(sessions))


async def _show_session(client: Client, arguments: argparse.Namespace) -> None:
    session = await client.sessions.get(arguments.session)
    if arguments.json:
        _print_json(plain(session))
    else:
        print(display.session_lines(session))


async def _remove_sessions(client: Client, arguments: argparse.Namespace) -> None:
    """Tries all of them, each once. One that fails alone exits as any call does, among several the code is 1."""
    failed = 0
    sessions = list(dict.fromkeys(map(session_name, arguments.session)))
    for session in sessions:
        try:
            await client.sessions.delete(session)
        except ServiceError as error:
            if len(sessions) == 1 or isinstance(error, UnavailableError):
                raise
            _complain(error)
            failed += 1
    if failed:
        raise ColibriError(f"{failed} of {len(sessions)} sessions could not be removed")


async def _status(client: Client, arguments: argparse.Namespace) -> None:
    if arguments.wait is not None:
        await _wait(client, arguments.wait)
    info, state = await client.server_info(), await client.state()
    stats = await client.stats() if _WATCH_STATS in info.capabilities else None
    if arguments.json:
        now = {"stats": plain(stats)} if stats is not None else {}
        _print_json({"address": client.address, "state": state, **plain(info), **now})
    else:
        print(display.status_lines(client.address, state, info, stats))


async def _wait(client: Client, seconds: float) -> None:
    """Returns as soon as the daemon serves; it need not be there yet. Raises NotServingError with the last reason."""
    reason = "the daemon does not answer"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    addresses.check_socket(client.address)
                    state = await client.state()
                    if state == "serving":
                        return
                    reason = f"the daemon is {state}"
                except (NobodyThereError, UnavailableError) as error:
                    reason = str(error)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise NotServingError(f"--wait {seconds:g}: {reason}") from None


def _chat_loop(runner: asyncio.Runner, client: Client, arguments: argparse.Namespace) -> None:
    """Reads lines and answers them until the end of input. No event loop runs while a line is being typed, so line
    editing works as in any program and Ctrl-C at the prompt leaves."""
    conversation = runner.run(_open(client, arguments))
    name = conversation.session.name.removeprefix("sessions/")
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"session {name}, end with Ctrl-D; come back with: colibri chat --session {name}", file=sys.stderr)
    system = arguments.system
    while True:
        try:
            line = _read_line("> " if at_terminal else "")
            if not line.strip():
                continue
            with display.AnswerView() as view:
                answer = runner.run(conversation.say(line, system=system, view=view))
            answer.check_not_paused()
            system = ""
        except EOFError:
            return
        except (AbortedError, InvalidArgumentError, ResourceExhaustedError, UsageError) as error:
            if not at_terminal:
                raise
            _complain(error, flag_of(error))  # the session is as it was: the next line may do better


def _read_line(prompt: str) -> str:
    """Raises EOFError, and UsageError for a line that is not UTF-8: by the locale Python refuses it, or keeps it."""
    try:
        return check_utf8(input(prompt))
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise UsageError(f"the line is {error}") from error


def _complain(error: ColibriError, flag: str = "") -> None:
    print(f"colibri: {flag}{': ' if flag else ''}{display.printable(str(error))}", file=sys.stderr)


def _run(arguments: argparse.Namespace) -> None:
    command: Callable[[Client, argparse.Namespace], Coroutine[Any, Any, None]] = arguments.run
    interactive = arguments.command == "chat" and arguments.message is None
    if interactive and arguments.json:
        raise UsageError("--json needs --message")
    with asyncio.Runner() as runner:
        client = runner.run(_connect(arguments.addr))
        try:
            if getattr(arguments, "wait", None) is None:
                addresses.check_socket(client.address)
            if interactive:
                _chat_loop(runner, client, arguments)
            else:
                runner.run(command(client, arguments))
        finally:
            runner.run(client.close())


async def _connect(address: str | None) -> Client:
    """A channel belongs to the event loop that is running when it is made."""
    return Client(address)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The `colibri` command. Always leaves through SystemExit with one of the codes above."""
    arguments = parser().parse_args(argv)
    try:
        _run(arguments)
    except ColibriError as error:
        _complain(error, flag_of(error) if arguments.command in ("chat", "generate") else "")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(EX_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush does not fail again
        sys.exit(EX_OK)
    sys.exit(EX_OK)


if __name__ == "__main__":
    main()
