"""The client library against a fake daemon on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from colibri.client import (
    AbortedError,
    Client,
    DataLossError,
    Delta,
    Finished,
    InvalidArgumentError,
    NotFoundError,
    OffsetGapError,
    Progress,
    ProtocolError,
    ResourceExhaustedError,
    Sampling,
    ServerLostError,
    ServiceError,
    Started,
    Stop,
    UnavailableError,
    UnimplementedError,
    message,
)
from colibri.v1 import admin_service_pb2, types_pb2
from testkit.fake_daemon import FakeDaemon, delta, fake_daemon, finished, progress, script_of, started

Body = Callable[[Client, FakeDaemon], Awaitable[None]]


def run(folder: Path, body: Body, **options: Any) -> None:
    """Runs `body` with a client that is connected to a fake daemon."""

    async def whole() -> None:
        async with fake_daemon(folder) as daemon, Client(daemon.address, **options) as client:
            await asyncio.wait_for(body(client, daemon), 30)

    asyncio.run(whole())


def test_a_chat_streams_typed_events_in_order(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        events = [event async for event in client.chat("What is the capital of France?")]
        assert [type(event) for event in events] == [Started, Progress, Delta, Delta, Delta, Finished]
        texts = [event.text for event in events if isinstance(event, Delta)]
        assert "".join(texts) == "The capital of France is Paris."
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.finish_reason, last.next_offset, last.durable_offset) == ("EOS", 3, 3)
        assert last.statistics.prefill_rate == 10.0  # 30 tokens less 10 cached in 2 s
        assert last.statistics.decode_rate == 4.0  # 3 tokens less the first in 0.5 s
        assert (last.statistics.expert_hits, last.statistics.expert_uses) == (300, 400)
        (request,) = daemon.requests
        assert request.request_id
        assert not request.session
        assert [(m.role, m.text) for m in request.input.chat.messages] == [
            (types_pb2.Message.ROLE_USER, "What is the capital of France?")
        ]

    run(tmp_path, body)


def test_only_what_was_set_is_sent(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        await client.generate("text").text()
        plain = daemon.requests[-1]
        assert plain.input.text == "text"
        assert not plain.input.HasField("add_bos")
        assert not plain.HasField("sampling")
        assert not plain.HasField("stop")
        assert not plain.HasField("output")
        assert not plain.HasField("expected_position")
        sampling = Sampling(temperature=0, top_k=0, top_p=0.5, seed=2**64 - 1, logit_bias={5: -1.0})
        stop = Stop(max_tokens=0, sequences=["x"], token_ids=[3], include_stop=True, max_seconds=1.5)
        await client.generate(
            [1, 2], add_bos=False, sampling=sampling, stop=stop, request_id="r", token_ids=True
        ).text()
        full = daemon.requests[-1]
        assert list(full.input.tokens.ids) == [1, 2]
        assert full.input.HasField("add_bos")
        assert full.sampling.HasField("temperature")
        assert full.sampling.HasField("top_k")
        assert not full.sampling.HasField("min_p")
        assert (full.sampling.seed, full.sampling.logit_bias[5]) == (2**64 - 1, -1.0)
        assert full.stop.HasField("max_tokens")
        assert (full.stop.max_duration.seconds, full.stop.max_duration.nanos) == (1, 500_000_000)
        assert (full.request_id, full.output.token_ids) == ("r", True)

    run(tmp_path, body)


def test_a_generation_has_no_deadline_and_other_calls_have_one(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        await client.chat("x").text()
        await client.server_info()
        assert daemon.time_left["Generate"] is None
        assert 0 < (daemon.time_left["GetServerInfo"] or 0) < 8

    run(tmp_path, body, timeout=7)


def test_sessions_are_made_found_listed_over_pages_and_deleted(tmp_path: Path) -> None:
    async def body(client: Client, _: FakeDaemon) -> None:
        for name in ("alpha", "beta", "gamma"):
            session = await client.sessions.create(name, display_name=name.upper())
            assert (session.name, session.display_name) == (f"sessions/{name}", name.upper())
        assert (await client.sessions.create()).name == "sessions/made-up"
        assert (await client.sessions.get("alpha")).name == (await client.sessions.get("sessions/alpha")).name
        names = [session.name for session in await client.sessions.list()]
        assert names == ["sessions/alpha", "sessions/beta", "sessions/gamma", "sessions/made-up"]
        await client.sessions.delete("beta")
        with pytest.raises(NotFoundError) as caught:
            await client.sessions.get("beta")
        assert (caught.value.reason, caught.value.metadata) == ("SESSION_NOT_FOUND", {"session": "sessions/beta"})

    run(tmp_path, body)


def test_a_session_chat_sends_the_new_messages_and_the_position(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        await client.sessions.create("paris")
        new = [message("system", "be brief"), message("user", "hi")]
        stream = client.chat(new, session="paris", expected_position=0)
        await stream.text()
        assert daemon.requests[-1].session == "sessions/paris"
        assert len(daemon.requests[-1].input.chat.messages) == 2
        assert stream.start_position + stream.next_offset == daemon.sessions["sessions/paris"].position
        with pytest.raises(AbortedError) as caught:
            await client.chat("again", session="paris", expected_position=0).text()
        assert (caught.value.reason, caught.value.metadata) == ("POSITION_MISMATCH", {"position": "33"})

    run(tmp_path, body)


def test_the_small_calls(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        assert list(await client.tokenize("ab", add_bos=True)) == [1, 97, 98]
        assert await client.detokenize([97, 98]) == "ab"
        rendered = await client.render_chat([message("user", "a"), message("assistant", "b")], enable_thinking=False)
        assert (rendered.text, list(rendered.ids)) == ("ab", [97, 98])
        assert daemon.requests[-1].chat.HasField("enable_thinking")
        assert (await client.server_info()).boot_id == "b1"
        assert (await client.get_generation("generations/g1")).next_offset == 3
        assert (await client.cancel("generations/g1")).state == types_pb2.Generation.STATE_CANCELLED

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("events", "error", "text"),
    [
        ([started(), delta(0, "a"), delta(2, "b")], OffsetGapError, "begins at token offset 2, 1 was expected"),
        ([started(), delta(0, "a", 2), delta(1, "b")], OffsetGapError, "begins at token offset 1, 2 was expected"),
        ([started(), delta(1, "a")], OffsetGapError, "offset 1, 0 was expected"),
        ([started(), delta(0, "a"), finished(2)], OffsetGapError, "offset 2, 1 was expected"),
        ([delta(0, "a")], ProtocolError, "first event is Delta"),
        ([progress()], ProtocolError, "first event is Progress"),
        ([started(), started()], ProtocolError, "second `started`"),
        ([started(), delta(0, "a")], ProtocolError, "ended without `finished`"),
        ([], ProtocolError, "ended without `finished`"),
        ([started(), finished(0), progress()], ProtocolError, "after `finished`"),
    ],
)
def test_a_broken_stream_is_an_error_that_says_how(
    tmp_path: Path, events: list[Any], error: type[Exception], text: str
) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.script = script_of(events)
        with pytest.raises(error, match=text):
            await client.chat("x").text()

    run(tmp_path, body)


def test_a_delta_whose_count_does_not_add_up_is_an_error(tmp_path: Path) -> None:
    wrong = delta(0, "a", 2)
    wrong.next_offset = 3

    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.script = script_of([started(), wrong])
        with pytest.raises(ProtocolError, match="2 tokens at offset 0 says that the next one is 3"):
            await client.chat("x").text()

    run(tmp_path, body)


def test_an_unknown_kind_of_event_is_passed_over(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.script = script_of([started(), types_pb2.GenerateEvent(), delta(0, "a"), finished(1)])
        assert await client.chat("x").text() == "a"

    run(tmp_path, body)


def test_silence_for_three_heartbeats_means_lost(tmp_path: Path) -> None:
    async def silent(_: object) -> AsyncIterator[types_pb2.GenerateEvent]:
        yield started()
        yield delta(0, "a")
        await asyncio.sleep(60)

    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.script = silent
        began = asyncio.get_running_loop().time()
        with pytest.raises(ServerLostError, match=r"no sign of life from the daemon for 0\.3 s") as caught:
            await client.chat("x").text()
        assert 0.3 <= asyncio.get_running_loop().time() - began < 5
        assert (caught.value.generation, caught.value.next_offset) == ("generations/g1", 1)
        heartbeat = daemon.requests[0].output.heartbeat
        assert heartbeat.nanos == 100_000_000
        await asyncio.wait_for(daemon.view_ended.wait(), 5)

    run(tmp_path, body, heartbeat=0.1)


def test_heartbeats_keep_a_long_prefill_alive(tmp_path: Path) -> None:
    async def slow(_: object) -> AsyncIterator[types_pb2.GenerateEvent]:
        yield started()
        for done in range(10):
            await asyncio.sleep(0.1)
            yield progress(done, 10)
        yield delta(0, "at last")
        yield finished(1)

    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.script = slow
        assert await client.chat("x").text() == "at last"

    run(tmp_path, body, heartbeat=0.2)  # patience is 0.6 s, the prefill takes 1 s


def test_a_daemon_that_dies_in_the_middle_is_lost(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        async def dying(_: object) -> AsyncIterator[types_pb2.GenerateEvent]:
            yield started()
            yield delta(0, "a")
            daemon.dying = asyncio.create_task(daemon.server.stop(None))
            await asyncio.sleep(60)

        daemon.script = dying
        with pytest.raises(ServerLostError, match="the connection to the daemon broke") as caught:
            await client.chat("x").text()
        assert (caught.value.generation, caught.value.next_offset) == ("generations/g1", 1)
        with pytest.raises(UnavailableError, match="the daemon does not answer, or the connection to it broke"):
            await client.server_info()

    run(tmp_path, body)


def test_nobody_at_the_address_is_unavailable(tmp_path: Path) -> None:
    async def body() -> None:
        async with Client(f"unix:{tmp_path}/nobody.sock") as client:
            for call in (client.server_info(), client.chat("x").text(), client.sessions.list()):
                with pytest.raises(UnavailableError) as caught:
                    await call
                assert not isinstance(caught.value, ServerLostError)
                assert caught.value.reason == ""

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.DATA_LOSS, DataLossError),
        (grpc.StatusCode.UNIMPLEMENTED, UnimplementedError),
    ],
)
def test_a_refusal_carries_reason_numbers_and_retry_time(
    tmp_path: Path, code: grpc.StatusCode, kind: type[ServiceError]
) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.refusal = (code, "the prompt is too long", "SOME_REASON", 5, {"field": "input", "limit": "64"})
        with pytest.raises(kind) as caught:
            await client.chat("x").text()
        error = caught.value
        assert (error.code, error.reason, error.retry_after) == (code, "SOME_REASON", 5.0)
        assert error.metadata == {"field": "input", "limit": "64"}
        assert str(error) == f"the prompt is too long ({code.name}/SOME_REASON: field=input, limit=64)"

    run(tmp_path, body)


def test_a_generation_that_failed_finishes_and_then_raises(tmp_path: Path) -> None:
    detail = types_pb2.ErrorDetail(
        code=15, reason="EXPERT_CHECKSUM", message="layer 1 expert 3", metadata={"drive": "two"}
    )

    async def body(client: Client, daemon: FakeDaemon) -> None:
        last = finished(1, types_pb2.FINISH_REASON_ERROR, detail)
        daemon.script = script_of([started(), delta(0, "a"), last])
        stream = client.chat("x")
        seen = [await anext(stream) for _ in range(3)]
        assert isinstance(seen[-1], Finished)
        with pytest.raises(DataLossError, match="layer 1 expert 3") as caught:
            await anext(stream)
        assert (caught.value.reason, caught.value.metadata) == ("EXPERT_CHECKSUM", {"drive": "two"})
        assert (caught.value.generation, caught.value.next_offset) == ("generations/g1", 1)

    run(tmp_path, body)


def test_leaving_a_stream_early_ends_the_view(tmp_path: Path) -> None:
    async def endless(_: object) -> AsyncIterator[types_pb2.GenerateEvent]:
        yield started()
        offset = 0
        while True:
            yield delta(offset, "a")
            offset += 1
            await asyncio.sleep(0.01)

    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.script = endless
        async with client.chat("x") as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        await asyncio.wait_for(daemon.view_ended.wait(), 5)

    run(tmp_path, body)


def test_stats_are_one_snapshot_or_a_watch_of_them(tmp_path: Path) -> None:
    async def body(client: Client, daemon: FakeDaemon) -> None:
        daemon.stats = admin_service_pb2.Stats(running=3)
        assert (await client.stats()).running == 3
        seen = 0
        async with contextlib.aclosing(client.watch_stats(0.1, expert_heat=True)) as snapshots:
            async for stats in snapshots:
                seen += stats.running
                daemon.watch_over = seen >= 9
        assert seen == 9
        asked = daemon.requests[-1]
        assert (asked.interval.ToTimedelta().total_seconds(), asked.expert_heat) == (0.1, True)
        with pytest.raises(ProtocolError, match="without a snapshot"):
            await client.stats()
        daemon.stats = None
        with pytest.raises(UnimplementedError):
            await client.stats()

    run(tmp_path, body)


def test_roles_are_checked() -> None:
    with pytest.raises(ValueError, match="'robot'"):
        message("robot", "x")
