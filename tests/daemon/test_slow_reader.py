"""A client that does not read its stream (C03): the daemon neither keeps the stream's bytes nor holds up anybody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import inference_service_pb2_grpc, types_pb2
from testkit.service import request, rest, run, text_of, tokens_of
from testkit.wordy_daemon import TEXT_BYTES, WORD

TOKENS = 1200
MOST_GROWTH = 1 << 20
STREAM_BYTES = TOKENS * TEXT_BYTES
# What is under way to a client that does not read must stay small beside what its stream has to say.
CHANNEL = [("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]


class Wordy:
    """The daemon's process, a stub on a channel that the slow reader uses too, and one on a channel of its own."""

    def __init__(self, process: subprocess.Popen[str], shared: grpc.aio.Channel, own: grpc.aio.Channel) -> None:
        self._process = process
        self.shared: Any = inference_service_pb2_grpc.InferenceServiceStub(shared)
        self.own: Any = inference_service_pb2_grpc.InferenceServiceStub(own)

    def anonymous_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("RssAnon:"))
        return int(line.split()[1]) << 10


@asynccontextmanager
async def wordy(folder: Path) -> AsyncIterator[Wordy]:
    command = [sys.executable, "-P", "-m", "testkit.wordy_daemon", str(folder)]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent / "helpers"), "PATH": ""}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        target = f"unix:{folder}/d.sock"
        async with (
            grpc.aio.insecure_channel(target, options=CHANNEL) as shared,
            grpc.aio.insecure_channel(target, options=[*CHANNEL, ("grpc.use_local_subchannel_pool", 1)]) as own,
        ):
            yield Wordy(process, shared, own)
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 30) == 0


def ask(stub: Any) -> Any:
    return stub.Generate(request([5, 6, 7], max_tokens=TOKENS))


async def follow(stub: Any) -> int:
    """Reads a whole answer as it comes; returns in how many messages."""
    events = await rest(ask(stub))
    assert tokens_of(events) == [WORD] * TOKENS
    assert len(text_of(events)) == STREAM_BYTES
    return len(events)


async def finished(stub: Any, name: str) -> None:
    while True:
        found = await stub.GetGeneration(inference_pb2.GetGenerationRequest(name=name))
        if found.state == types_pb2.Generation.STATE_SUCCEEDED:
            return
        await asyncio.sleep(0.05)


def test_c03_a_client_that_stops_reading_costs_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with wordy(tmp_path) as daemon:
            await asyncio.gather(follow(daemon.shared), follow(daemon.shared), follow(daemon.own))
            before = daemon.anonymous_bytes()
            slow = ask(daemon.shared)
            started = await slow.read()
            # The others' answers come to their ends, and so does the one that nobody reads.
            await asyncio.gather(follow(daemon.shared), follow(daemon.own))
            await finished(daemon.own, started.started.name)
            grown = daemon.anonymous_bytes() - before
            assert grown < MOST_GROWTH < STREAM_BYTES // 4
            events = await rest(slow)
            assert tokens_of(events) == [WORD] * TOKENS
            assert len(text_of(events)) == STREAM_BYTES
            assert len(events) < TOKENS // 2, "what was not read must have waited as tokens, not as messages"

    run(work)
