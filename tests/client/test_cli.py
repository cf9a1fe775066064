"""The `colibri` command as a user runs it: in a process of its own, against a fake daemon on a Unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from colibri.client.cli import exit_code
from colibri.client.errors import from_error_detail
from colibri.v1 import admin_service_pb2, types_pb2
from testkit.colibri_command import colibri, run, spawn
from testkit.fake_daemon import FakeDaemon, delta, fake_daemon, finished, script_of, started

ANSWER = "The capital of France is Paris.\n"
STATISTICS = (
    "[prompt 30 tokens (10 cached), prefill 10.00 tok/s | 3 tokens, decode 4.00 tok/s"
    " | expert hits 300/400 (75.0 %), 3.0 MiB read on demand]\n"
)


def test_one_question_without_a_session(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        result = await colibri(daemon, "chat", "--message", "What is the capital of France?", "--system", "Be brief")
        assert (result.code, result.out, result.err) == (0, ANSWER, STATISTICS)
        (request,) = daemon.requests
        assert not request.session
        assert [message.text for message in request.input.chat.messages] == [
            "Be brief",
            "What is the capital of France?",
        ]

    run(tmp_path, body)


def test_one_question_in_a_session_that_is_made_and_then_found(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        flags = [
            "--temperature",
            "0",
            "--top-k",
            "5",
            "--top-p",
            "0.5",
            "--seed",
            "9",
            "--max-tokens",
            "16",
            "--stop",
            ".",
        ]
        result = await colibri(daemon, "chat", "--session", "paris", "--message", "hi", "--system", "Be brief", *flags)
        assert (result.code, result.out) == (0, ANSWER)
        created, first = daemon.requests
        assert created.session_id == "paris"
        assert (first.session, first.expected_position) == ("sessions/paris", 0)
        assert len(first.input.chat.messages) == 2
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0, 5, 0.5, 9)
        assert (first.stop.max_tokens, list(first.stop.sequences)) == (16, ["."])
        result = await colibri(daemon, "chat", "--session", "paris", "--message", "and of Spain?", "--json")
        document = json.loads(result.out)
        assert (result.code, result.err) == (0, "")
        assert (document["text"], document["finish_reason"]) == (ANSWER.strip(), "EOS")
        assert document["session"] == "sessions/paris"
        assert document["token_ids"] == [100, 101, 102]
        assert (first.output.token_ids, daemon.requests[-1].output.token_ids) == (False, True)
        assert document["generation"]["usage"]["expert_bytes_read"] == 3 << 20
        assert document["generation"]["usage"]["prefill_time"] == 2.0
        assert daemon.requests[-1].expected_position == 33
        late = await colibri(daemon, "chat", "--session", "paris", "--message", "x", "--system", "Be loud")
        assert late.code == 2
        assert "--system: sessions/paris has already begun" in late.err

    run(tmp_path, body)


def test_lines_from_a_pipe_are_a_conversation(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        result = await colibri(daemon, "chat", "--system", "Be brief", stdin="one\n\ntwo\n")
        assert (result.code, result.out, result.err) == (0, ANSWER * 2, STATISTICS * 2)
        _, first, second = daemon.requests
        assert first.session == second.session == "sessions/made-up"
        assert [message.text for message in first.input.chat.messages] == ["Be brief", "one"]
        assert [message.text for message in second.input.chat.messages] == ["two"]
        assert (first.expected_position, second.expected_position) == (0, 33)

    run(tmp_path, body)


class Terminal:
    """A pseudo-terminal with `colibri chat` at its end."""

    def __init__(self) -> None:
        self.seen = ""
        self._master, self._slave = pty.openpty()

    async def start(self, daemon: FakeDaemon, *arguments: str) -> asyncio.subprocess.Process:
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        process = await spawn(daemon, "chat", *arguments, **ends)
        os.close(self._slave)
        os.set_blocking(self._master, False)
        return process

    async def until(self, text: str) -> None:
        """Reads until `text` was shown; forgets what came up to it."""
        for _ in range(1200):
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except (BlockingIOError, OSError):
                await asyncio.sleep(0.05)
            if text in self.seen:
                self.seen = self.seen.partition(text)[2]
                return
        raise AssertionError(f"{text!r} was never shown, but {self.seen!r}")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode(errors="surrogateescape"))

    def close(self) -> None:
        os.close(self._master)


async def until_cancelled(daemon: FakeDaemon) -> AsyncIterator[types_pb2.GenerateEvent]:
    yield started("sessions/paris/generations/g1", 40)
    yield delta(0, "Well, \x1b[31mred")
    await daemon.cancelled.wait()
    yield finished(1, types_pb2.FINISH_REASON_CANCELLED)


def test_ctrl_c_ends_the_turn_and_the_terminal_session_goes_on(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        daemon.script = lambda _: until_cancelled(daemon)
        terminal = Terminal()
        process = await terminal.start(daemon, "--session", "paris")
        try:
            await terminal.until("session paris")
            await terminal.until("> ")
            terminal.type("talk\n")
            await terminal.until("Well, \\x1b[31mred")  # shown, not obeyed
            process.send_signal(signal.SIGINT)
            await terminal.until("[stopped: CANCELLED]")
            assert daemon.requests[-1].name == "sessions/paris/generations/g1"
            await terminal.until("> ")
            daemon.script = None
            daemon.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", 1, {})
            terminal.type("now?\n")
            await terminal.until("the queue is full")
            await terminal.until("> ")
            daemon.refusal = None
            terminal.type("bad \udcff line\n")
            await terminal.until("the line is not UTF-8 at byte 4")
            await terminal.until("> ")
            terminal.type("again\n")
            await terminal.until("is Paris.")
            assert daemon.requests[-1].expected_position == daemon.sessions["sessions/paris"].position - 33
            await terminal.until("> ")
            terminal.type("\x04")
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            terminal.close()

    run(tmp_path, body)


def test_ctrl_c_at_the_prompt_ends_the_chat_with_130(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        terminal = Terminal()
        process = await terminal.start(daemon)
        try:
            await terminal.until("> ")
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 20) == 130
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            terminal.close()

    run(tmp_path, body)


def test_a_line_that_is_not_utf_8_is_a_usage_error(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        result = await colibri(daemon, "chat", "--session", "paris", stdin=b"bad \xff line\n")
        assert (result.code, result.out) == (2, "")
        assert result.err == "colibri: the line is not UTF-8 at byte 4\n"

    run(tmp_path, body)


def test_ctrl_c_keeps_what_was_said_and_exits_with_130(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        daemon.script = lambda _: until_cancelled(daemon)
        process = await spawn(daemon, "chat", "--message", "x", "--json")
        while not daemon.requests:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 130, err
        assert json.loads(out)["finish_reason"] == "CANCELLED"

    run(tmp_path, body)


def test_a_second_ctrl_c_leaves_the_answer_to_the_daemon(tmp_path: Path) -> None:
    async def deaf(_: object) -> AsyncIterator[types_pb2.GenerateEvent]:
        yield started()
        yield delta(0, "Well")
        await asyncio.sleep(60)

    async def body(daemon: FakeDaemon) -> None:
        daemon.script = deaf
        process = await spawn(daemon, "chat", "--message", "x")
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(4), 30) == b"Well"
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(daemon.cancelled.wait(), 20)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 130
        assert b"left the answer" in err
        await asyncio.wait_for(daemon.view_ended.wait(), 5)

    run(tmp_path, body)


def test_generate_takes_a_prompt_a_file_or_standard_input(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        (tmp_path / "prompt.txt").write_text(" from é file\n", encoding="utf-8")
        assert (await colibri(daemon, "generate", "--prompt", "hello", "--no-add-bos")).out == ANSWER
        result = await colibri(
            daemon, "generate", "--file", str(tmp_path / "prompt.txt"), "--json", "--max-tokens", "3"
        )
        assert json.loads(result.out)["text"] == ANSWER.strip()
        assert json.loads(result.out)["token_ids"] == [100, 101, 102]
        assert daemon.requests[-1].output.token_ids
        assert (await colibri(daemon, "generate", "--file", "-", stdin="piped")).code == 0
        given = [request.input.text for request in daemon.requests]
        assert given == ["hello", " from é file\n", "piped"]
        assert daemon.requests[0].input.HasField("add_bos")
        assert not daemon.requests[0].input.add_bos
        assert not daemon.requests[1].input.HasField("add_bos")
        (tmp_path / "bad").write_bytes(b"ab\xff")
        for path, text in ((tmp_path / "bad", "not UTF-8 at byte 2"), (tmp_path / "none", "No such file")):
            result = await colibri(daemon, "generate", "--file", str(path))
            assert result.code == 2
            assert f"--file {path}: {text}" in result.err

    run(tmp_path, body)


def test_sessions_are_listed_shown_and_removed(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        for name in ("alpha", "beta", "gamma"):
            session = daemon.sessions[f"sessions/{name}"] = types_pb2.Session(name=f"sessions/{name}")
            session.state = types_pb2.Session.STATE_STORED
            session.position, session.context_limit, session.disk_bytes = 33, 4096, 5 << 20
            session.last_used_time.FromJsonString("2026-01-02T03:04:05Z")
        listed = (await colibri(daemon, "sessions", "list")).out.splitlines()
        assert listed[0].split() == ["session", "state", "position", "disk", "last", "used"]
        assert listed[1].split() == ["alpha", "stored", "33", "5.0", "MiB", "2026-01-02", "03:04:05", "UTC"]
        assert len(listed) == 4
        long_name = "s-" + "4" * 60
        daemon.sessions[f"sessions/{long_name}"] = types_pb2.Session(name=f"sessions/{long_name}")
        assert long_name in (await colibri(daemon, "sessions", "list")).out
        del daemon.sessions[f"sessions/{long_name}"]
        daemon.sessions["sessions/beta"].degraded = "a full drive"
        assert (await colibri(daemon, "sessions", "list")).out.count("stored, degraded") == 1
        assert "degraded:          a full drive" in (await colibri(daemon, "sessions", "show", "beta")).out
        document = json.loads((await colibri(daemon, "sessions", "list", "--json")).out)
        assert [entry["name"] for entry in document] == ["sessions/alpha", "sessions/beta", "sessions/gamma"]
        assert (document[0]["position"], document[0]["state"]) == (33, "STATE_STORED")
        assert document[0]["last_used_time"] == "2026-01-02T03:04:05Z"
        assert "position:          33 of 4096" in (await colibri(daemon, "sessions", "show", "alpha")).out
        assert json.loads((await colibri(daemon, "sessions", "show", "alpha", "--json")).out)["disk_bytes"] == 5 << 20
        assert (await colibri(daemon, "sessions", "rm", "alpha", "sessions/beta")).code == 0
        assert list(daemon.sessions) == ["sessions/gamma"]
        daemon.sessions["sessions/twice"] = types_pb2.Session(name="sessions/twice")
        twice = await colibri(daemon, "sessions", "rm", "twice", "sessions/twice")
        assert (twice.code, twice.err) == (0, "")
        missing = await colibri(daemon, "sessions", "rm", "alpha")
        assert missing.code == 1
        assert "sessions/alpha does not exist (NOT_FOUND/SESSION_NOT_FOUND: session=sessions/alpha)" in missing.err
        several = await colibri(daemon, "sessions", "rm", "alpha", "gamma", "beta")
        assert several.code == 1
        first, second, last = several.err.splitlines()
        assert "sessions/alpha does not exist" in first
        assert "sessions/beta does not exist" in second
        assert last == "colibri: 2 of 3 sessions could not be removed"
        assert daemon.sessions == {}

    run(tmp_path, body)


def test_status(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        shown = (await colibri(daemon, "status")).out
        assert "model:             tiny\n" in shown
        assert "state:             serving\n" in shown
        assert f"address:           {daemon.address}\n" in shown
        document = json.loads((await colibri(daemon, "status", "--json")).out)
        assert (document["version"], document["max_context"], document["capabilities"]) == ("1.2.3", 4096, ["sessions"])
        daemon.unready = "MODEL_LOADING"
        loading = await colibri(daemon, "status", "--json")
        assert (loading.code, json.loads(loading.out)["state"]) == (0, "loading")
        daemon.unready = "DRAINING"
        draining = await colibri(daemon, "status", "--wait", "1.5")
        assert (draining.code, draining.out) == (75, "")
        assert draining.err == "colibri: --wait 1.5: the daemon is draining\n"

    run(tmp_path, body)


def test_status_has_the_statistics_of_a_daemon_that_gives_them(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        daemon.stats = admin_service_pb2.Stats(running=1)
        assert "work:              1 running, 0 queued" in (await colibri(daemon, "status")).out
        assert json.loads((await colibri(daemon, "status", "--json")).out)["stats"]["running"] == 1

    run(tmp_path, body)


def test_status_waits_for_a_daemon_that_is_not_there_yet(tmp_path: Path) -> None:
    async def whole() -> None:
        nobody = await colibri(None, "status", "--addr", f"unix:{tmp_path}/none.sock", "--wait", "0.5")
        assert (nobody.code, nobody.err) == (75, f"colibri: --wait 0.5: no daemon at {tmp_path}/none.sock\n")
        process = await spawn(None, "status", "--addr", f"unix:{tmp_path}/fake.sock", "--wait", "60")
        await asyncio.sleep(3)
        async with fake_daemon(tmp_path) as daemon:
            daemon.unready = "MODEL_LOADING"
            await asyncio.sleep(1)
            assert process.returncode is None
            daemon.unready = ""
            out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert b"state:             serving\n" in out

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("code", "reason", "exits"),
    [
        (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING", 75),
        (grpc.StatusCode.UNAVAILABLE, "", 69),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 75),
        (grpc.StatusCode.ABORTED, "SESSION_BUSY", 75),
        (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", 2),
        (grpc.StatusCode.OUT_OF_RANGE, "OFFSET_AHEAD", 2),
        (grpc.StatusCode.FAILED_PRECONDITION, "CONTENT_MISMATCH", 78),
        (grpc.StatusCode.UNAUTHENTICATED, "BAD_TOKEN", 78),
        (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", 1),
        (grpc.StatusCode.DATA_LOSS, "SESSION_CORRUPT", 1),
    ],
)
def test_exit_codes_of_refusals(code: grpc.StatusCode, reason: str, exits: int) -> None:
    detail = types_pb2.ErrorDetail(code=code.value[0], reason=reason, message="no")
    assert exit_code(from_error_detail(detail)) == exits


def test_a_refusal_is_one_line_on_standard_error(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        daemon.refusal = (
            grpc.StatusCode.INVALID_ARGUMENT,
            "too\x1b[2J long",
            "CONTEXT_EXCEEDED",
            None,
            {"limit": "64"},
        )
        result = await colibri(daemon, "chat", "--message", "x")
        assert (result.code, result.out) == (2, "")
        assert result.err == "colibri: too\\x1b[2J long (INVALID_ARGUMENT/CONTEXT_EXCEEDED: limit=64)\n"

    run(tmp_path, body)


def test_a_refused_field_is_told_by_its_flag(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        for field, start in (("sampling.temperature", "--temperature: hot"), ("input.text", "hot")):
            daemon.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "hot", "INVALID_FIELD", None, {"field": field})
            result = await colibri(daemon, "generate", "--prompt", "x", "--temperature", "9")
            assert result.err == f"colibri: {start} (INVALID_ARGUMENT/INVALID_FIELD: field={field})\n"

    run(tmp_path, body)


def test_exit_codes_of_a_daemon_that_is_not_there_or_goes_away(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        result = await colibri(None, "--help")
        assert result.code == 0
        nobody = await colibri(None, "status", "--addr", f"unix:{tmp_path}/nobody.sock")
        assert (nobody.code, nobody.err) == (69, f"colibri: no daemon at {tmp_path}/nobody.sock\n")
        (tmp_path / "file").touch()
        assert (await colibri(None, "chat", "--addr", f"unix:{tmp_path}/file")).code == 78
        assert (await colibri(None, "status", "--addr", "far.example:1")).code == 78

        async def dying(_: object) -> AsyncIterator[types_pb2.GenerateEvent]:
            yield started()
            yield delta(0, "a")
            daemon.dying = asyncio.create_task(daemon.server.stop(None))
            await asyncio.sleep(60)

        daemon.script = dying
        lost = await colibri(daemon, "chat", "--message", "x")
        assert (lost.code, lost.out) == (69, "a\n")
        assert "the connection to the daemon broke in the middle of the answer" in lost.err
        assert "a session can go on" in lost.err
        assert "recvmsg" not in lost.err
        assert "Stream removed" not in lost.err

    run(tmp_path, body)


def test_an_answer_that_the_stopping_daemon_paused_says_so(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        last = finished(1, types_pb2.FINISH_REASON_UNSPECIFIED)
        last.finished.state = types_pb2.Generation.STATE_PAUSED
        daemon.script = script_of([started(), delta(0, "a"), last])
        result = await colibri(daemon, "chat", "--message", "x")
        assert (result.code, result.out) == (75, "a\n")
        assert "colibri: the daemon stopped in the middle of the answer" in result.err

    run(tmp_path, body)


def test_an_answer_that_failed_shows_what_there_is_and_why(tmp_path: Path) -> None:
    detail = types_pb2.ErrorDetail(code=15, reason="EXPERT_CHECKSUM", message="layer 1 expert 3")

    async def body(daemon: FakeDaemon) -> None:
        last = finished(1, types_pb2.FINISH_REASON_ERROR, detail)
        daemon.script = script_of([started(), delta(0, "a"), last])
        result = await colibri(daemon, "chat", "--message", "x")
        assert (result.code, result.out) == (1, "a\n")
        assert "colibri: layer 1 expert 3 (DATA_LOSS/EXPERT_CHECKSUM)" in result.err

    run(tmp_path, body)
