"""A daemon made of a few dictionaries: speaks colibri.v1 on a Unix socket, keeps sessions, answers with a fixed text.

It is a double for the tests of the client, with hooks for what a real daemon must never do: `script` replaces the
events of a generation. It records every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2, empty_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    types_pb2,
)

Event = types_pb2.GenerateEvent
Script = Callable[[inference_service_pb2.GenerateRequest], AsyncIterator[Event]]
PIECES = ("The capital", " of France", " is Paris.")
PROMPT_TOKENS, CACHED = 30, 10


def started(name: str = "generations/g1", position: int = PROMPT_TOKENS) -> Event:
    return Event(started=types_pb2.Generation(name=name, start_position=position, seed=7))


def progress(done: int = 5, total: int = PROMPT_TOKENS) -> Event:
    prefilling = types_pb2.Generation.STATE_PREFILLING
    return Event(progress=types_pb2.Progress(state=prefilling, prompt_tokens_done=done, prompt_tokens_total=total))


def delta(offset: int, text: str, tokens: int = 1) -> Event:
    ids = range(100 + offset, 100 + offset + tokens)
    event = Event(delta=types_pb2.Delta(offset=offset, token_count=tokens, token_ids=ids, text=text))
    event.next_offset = event.durable_offset = offset + tokens
    return event


def finished(
    tokens: int,
    reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_EOS,
    error: types_pb2.ErrorDetail | None = None,
) -> Event:
    usage = types_pb2.Usage(
        prompt_tokens=PROMPT_TOKENS,
        cached_prompt_tokens=CACHED,
        completion_tokens=tokens,
        prefill_time=duration_pb2.Duration(seconds=2),
        decode_time=duration_pb2.Duration(nanos=500_000_000),
        expert_hits=300,
        expert_loads=100,
        expert_bytes_read=3 << 20,
    )
    generation = types_pb2.Generation(
        name="generations/g1", state=types_pb2.Generation.STATE_SUCCEEDED, finish_reason=reason, usage=usage
    )
    if error is not None:
        generation.error.CopyFrom(error)
    return Event(finished=generation, next_offset=tokens, durable_offset=tokens)


def script_of(events: Iterable[Event]) -> Script:
    """A script that sends these events and ends."""

    async def script(_: inference_service_pb2.GenerateRequest) -> AsyncIterator[Event]:
        for event in events:
            yield event

    return script


async def refuse(
    context: Any, code: grpc.StatusCode, message: str, reason: str, retry_seconds: int | None = None, **metadata: str
) -> NoReturn:
    """Fails a call the way the contract says: ErrorInfo, and RetryInfo where a retry makes sense."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain="colibri.v1", metadata=metadata)]
    if retry_seconds is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=retry_seconds)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))
    raise AssertionError("abort returns to nobody")


class FakeDaemon(
    inference_service_pb2_grpc.InferenceServiceServicer,
    inference_service_pb2_grpc.SessionServiceServicer,
    admin_service_pb2_grpc.AdminServiceServicer,
    health_pb2_grpc.HealthServicer,  # type: ignore[misc]
):
    """See the module. `refusal` (code, message, reason, retry seconds, metadata) fails every generation.

    `unready` is the reason for which it does not serve, "" if it does.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.sessions: dict[str, types_pb2.Session] = {}
        self.script: Script | None = None
        self.refusal: tuple[Any, ...] | None = None
        self.unready = ""
        self.stats: admin_service_pb2.Stats | None = None  # what WatchStats sends; None: it is not built
        self.watch_over = False
        self.cancelled = asyncio.Event()
        self.view_ended = asyncio.Event()
        self.time_left: dict[str, float | None] = {}  # by call: what was left of its deadline when it arrived
        self.page_size = 2
        self.dying: asyncio.Task[None] | None = None
        self.address = ""
        self.server = grpc.aio.server()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.time_left["Generate"] = context.time_remaining()
        if self.refusal is not None:
            code, message, reason, retry, metadata = self.refusal
            await refuse(context, code, message, reason, retry, **metadata)
        session = self.sessions.get(request.session)
        if request.session and session is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, "no such session", "SESSION_NOT_FOUND")
        if session and request.HasField("expected_position") and request.expected_position != session.position:
            message = f"the session is at {session.position}"
            await refuse(context, grpc.StatusCode.ABORTED, message, "POSITION_MISMATCH", position=str(session.position))
        produced = 0
        try:
            async for event in (self.script or self._answer)(request):
                produced = max(produced, event.next_offset)
                yield event
        finally:
            self.view_ended.set()
        if session:
            session.position += PROMPT_TOKENS + produced

    async def _answer(self, request: Any) -> AsyncIterator[Event]:
        session = self.sessions.get(request.session)
        yield started(
            f"{request.session}/generations/g1".lstrip("/"), PROMPT_TOKENS + (session.position if session else 0)
        )
        yield progress()
        for offset, piece in enumerate(PIECES):
            yield delta(offset, piece)
        yield finished(len(PIECES))

    async def CancelGeneration(self, request: Any, _: Any) -> types_pb2.Generation:
        self.requests.append(request)
        self.cancelled.set()
        return types_pb2.Generation(name=request.name, state=types_pb2.Generation.STATE_CANCELLED)

    async def GetGeneration(self, request: Any, _: Any) -> types_pb2.Generation:
        self.requests.append(request)
        return types_pb2.Generation(name=request.name, next_offset=3)

    async def Check(self, _: Any, __: Any) -> Any:
        status = health_pb2.HealthCheckResponse
        return status(status=status.NOT_SERVING if self.unready else status.SERVING)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if self.unready:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "not now", self.unready, 5)
        self.requests.append(request)
        return inference_service_pb2.TokenizeResponse(ids=[1] * request.add_bos + list(request.text.encode()))

    async def Detokenize(self, request: Any, _: Any) -> Any:
        return inference_service_pb2.DetokenizeResponse(text=bytes(request.ids).decode())

    async def RenderChat(self, request: Any, _: Any) -> Any:
        self.requests.append(request)
        text = "".join(message.text for message in request.chat.messages)
        return inference_service_pb2.RenderChatResponse(text=text, ids=text.encode(), renderer="fake")

    async def CreateSession(self, request: Any, _: Any) -> types_pb2.Session:
        self.requests.append(request)
        session = types_pb2.Session(
            name=f"sessions/{request.session_id or 'made-up'}",
            display_name=request.session.display_name,
            state=types_pb2.Session.STATE_LIVE,
            context_limit=4096,
        )
        self.sessions[session.name] = session
        return session

    async def GetSession(self, request: Any, context: Any) -> types_pb2.Session:
        if request.name not in self.sessions:
            message = f"{request.name} does not exist"
            await refuse(context, grpc.StatusCode.NOT_FOUND, message, "SESSION_NOT_FOUND", session=request.name)
        return self.sessions[request.name]

    async def ListSessions(self, request: Any, _: Any) -> Any:
        names = sorted(self.sessions)
        first = int(request.page_token or 0)
        last = first + self.page_size
        page = [self.sessions[name] for name in names[first:last]]
        token = str(last) if last < len(names) else ""
        return inference_service_pb2.ListSessionsResponse(sessions=page, next_page_token=token)

    async def DeleteSession(self, request: Any, context: Any) -> empty_pb2.Empty:
        await self.GetSession(request, context)
        del self.sessions[request.name]
        return empty_pb2.Empty()

    async def GetServerInfo(self, _: Any, context: Any) -> Any:
        self.time_left["GetServerInfo"] = context.time_remaining()
        return admin_service_pb2.GetServerInfoResponse(
            version="1.2.3",
            model="tiny",
            vocab_size=128,
            max_context=4096,
            capabilities=["sessions", *(["AdminService.WatchStats"] if self.stats is not None else [])],
            boot_id="b1",
        )

    async def WatchStats(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        if self.stats is None:
            await refuse(context, grpc.StatusCode.UNIMPLEMENTED, "not built", "NOT_BUILT")
        while not self.watch_over:
            yield self.stats
            await asyncio.sleep(request.interval.ToTimedelta().total_seconds())


@asynccontextmanager
async def fake_daemon(folder: Path) -> AsyncIterator[FakeDaemon]:
    """A FakeDaemon on a socket in `folder`; `daemon.server` is the gRPC server, to be stopped by tests that kill it."""
    daemon = FakeDaemon()
    daemon.address = f"unix:{folder / 'fake.sock'}"
    server = daemon.server
    register: Any = inference_service_pb2_grpc
    register.add_InferenceServiceServicer_to_server(daemon, server)
    register.add_SessionServiceServicer_to_server(daemon, server)
    register = admin_service_pb2_grpc
    register.add_AdminServiceServicer_to_server(daemon, server)
    health_pb2_grpc.add_HealthServicer_to_server(daemon, server)
    server.add_insecure_port(daemon.address)
    await server.start()
    try:
        yield daemon
    finally:
        await server.stop(None)
