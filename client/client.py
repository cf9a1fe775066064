"""Client: the daemon's calls as typed coroutines, and generations as streams.

Owns the channel. Unary calls have a time limit; a generation has none, for a long prompt may take an hour: its stream
watches the daemon's heartbeats instead. Every failed call becomes a ServiceError. One Client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.client import address as addresses
from colibri.client import options
from colibri.client.errors import ProtocolError, UnavailableError, from_rpc_error
from colibri.client.stream import GenerationStream
from colibri.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    types_pb2,
)

Answer = TypeVar("Answer")

DEFAULT_HEARTBEAT = 5.0  # seconds; the daemon's own default
# A silent prefill must not look like a dead connection, nor a dead connection like a silent prefill.
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 5_000),  # who waits for a daemon does not wait much longer than it takes
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


def _stub(kind: Any, channel: grpc.aio.Channel) -> Any:
    """The generated stub classes carry no types; `Client.call` checks what they answer."""
    return kind(channel)


def session_name(session: str) -> str:
    """`sessions/{id}` from either an id or a name."""
    return session if session.startswith("sessions/") else f"sessions/{session}"


class Sessions:
    """The calls on sessions; reached as `Client.sessions`. Sessions may be given by id or by name."""

    def __init__(self, client: Client, stub: Any) -> None:
        self._client = client
        self._stub = stub

    async def create(self, session_id: str = "", *, display_name: str = "") -> types_pb2.Session:
        """Creates a session; with an empty id the daemon makes one."""
        request = inference_service_pb2.CreateSessionRequest(session_id=session_id, request_id=str(uuid.uuid4()))
        if display_name:
            request.session.display_name = display_name
        return await self._client.call(types_pb2.Session, self._stub.CreateSession, request)

    async def get(self, session: str) -> types_pb2.Session:
        """Raises NotFoundError if there is none."""
        request = inference_service_pb2.GetSessionRequest(name=session_name(session))
        return await self._client.call(types_pb2.Session, self._stub.GetSession, request)

    async def list(self) -> Sequence[types_pb2.Session]:
        """All sessions, page after page."""
        sessions: list[types_pb2.Session] = []
        token = ""
        while True:
            request = inference_service_pb2.ListSessionsRequest(page_token=token)
            page = await self._client.call(inference_service_pb2.ListSessionsResponse, self._stub.ListSessions, request)
            sessions += page.sessions
            token = page.next_page_token
            if not token:
                return sessions

    async def delete(self, session: str) -> None:
        """Deletes a session's log and KV. Raises NotFoundError if there is none."""
        request = inference_service_pb2.DeleteSessionRequest(name=session_name(session))
        await self._client.call(Empty, self._stub.DeleteSession, request)


class Client:
    """A connection to one daemon. Use as `async with Client() as client`.

    `address`: see colibri.client.address.resolve. `timeout`: seconds for every call but Generate. `heartbeat`: seconds
    between signs of life that a generation asks the daemon for.
    Raises AddressError if no usable address is known.
    """

    def __init__(
        self, address: str | None = None, *, timeout: float = 60.0, heartbeat: float = DEFAULT_HEARTBEAT
    ) -> None:
        self.address = addresses.resolve(address)
        self.timeout = timeout
        self._heartbeat = heartbeat
        self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self._inference = _stub(inference_service_pb2_grpc.InferenceServiceStub, self._channel)
        self._admin = _stub(admin_service_pb2_grpc.AdminServiceStub, self._channel)
        self._health = _stub(health_pb2_grpc.HealthStub, self._channel)
        self.sessions = Sessions(self, _stub(inference_service_pb2_grpc.SessionServiceStub, self._channel))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; open streams end."""
        await self._channel.close()

    async def call(self, kind: type[Answer], method: Any, request: object) -> Answer:
        """One unary call that answers with a `kind`; a gRPC failure becomes a ServiceError."""
        try:
            answer = await method(request, timeout=self.timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if not isinstance(answer, kind):
            raise TypeError(f"{kind.__name__} expected, {type(answer).__name__} received")
        return answer

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        add_bos: bool | None = None,
        session: str = "",
        expected_position: int | None = None,
        sampling: options.Sampling | None = None,
        stop: options.Stop | None = None,
        token_ids: bool = False,
        request_id: str | None = None,
    ) -> GenerationStream:
        """Continues a raw prompt, text or token ids. `token_ids` asks for ids in the deltas.

        `request_id` is the idempotency key: the same one with the same request attaches to what already runs.
        """
        if isinstance(prompt, str):
            given = types_pb2.Input(text=prompt)
        else:
            given = types_pb2.Input(tokens=types_pb2.TokenIds(ids=prompt))
        if add_bos is not None:
            given.add_bos = add_bos
        return self._generate(given, session, expected_position, sampling, stop, token_ids, request_id)

    def chat(
        self,
        messages: str | Sequence[types_pb2.Message],
        *,
        session: str = "",
        expected_position: int | None = None,
        enable_thinking: bool | None = None,
        sampling: options.Sampling | None = None,
        stop: options.Stop | None = None,
        token_ids: bool = False,
        request_id: str | None = None,
    ) -> GenerationStream:
        """Asks for the next reply of a chat. A text alone is one user message.

        In a session only the *new* messages are given; without one, the whole conversation.
        """
        given = types_pb2.Input(chat=options.chat(messages, enable_thinking))
        return self._generate(given, session, expected_position, sampling, stop, token_ids, request_id)

    def _generate(
        self,
        given: types_pb2.Input,
        session: str,
        expected_position: int | None,
        sampling: options.Sampling | None,
        stop: options.Stop | None,
        token_ids: bool,
        request_id: str | None,
    ) -> GenerationStream:
        request = inference_service_pb2.GenerateRequest(
            request_id=request_id or str(uuid.uuid4()),
            session=session_name(session) if session else "",
            input=given,
        )
        if expected_position is not None:
            request.expected_position = expected_position
        if sampling is not None:
            request.sampling.CopyFrom(sampling.message())
        if stop is not None:
            request.stop.CopyFrom(stop.message())
        if token_ids:
            request.output.token_ids = True
        if self._heartbeat != DEFAULT_HEARTBEAT:
            request.output.heartbeat.CopyFrom(options.duration(self._heartbeat))
        return GenerationStream(self._inference.Generate(request), self._heartbeat)

    async def get_generation(self, name: str) -> types_pb2.Generation:
        """A generation's state and usage, without its stream."""
        request = inference_service_pb2.GetGenerationRequest(name=name)
        return await self.call(types_pb2.Generation, self._inference.GetGeneration, request)

    async def cancel(self, name: str) -> types_pb2.Generation:
        """Stops a generation; what it produced is kept. Idempotent; returns once the engine has let go."""
        request = inference_service_pb2.CancelGenerationRequest(name=name)
        return await self.call(types_pb2.Generation, self._inference.CancelGeneration, request)

    async def tokenize(self, text: str, *, add_bos: bool = False) -> Sequence[int]:
        """The ids of a text."""
        request = inference_service_pb2.TokenizeRequest(text=text, add_bos=add_bos)
        return (await self.call(inference_service_pb2.TokenizeResponse, self._inference.Tokenize, request)).ids

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        request = inference_service_pb2.DetokenizeRequest(ids=ids)
        return (await self.call(inference_service_pb2.DetokenizeResponse, self._inference.Detokenize, request)).text

    async def render_chat(
        self, messages: str | Sequence[types_pb2.Message], *, enable_thinking: bool | None = None
    ) -> inference_service_pb2.RenderChatResponse:
        """The exact text and ids that a whole conversation becomes."""
        request = inference_service_pb2.RenderChatRequest(chat=options.chat(messages, enable_thinking))
        return await self.call(inference_service_pb2.RenderChatResponse, self._inference.RenderChat, request)

    async def server_info(self) -> admin_service_pb2.GetServerInfoResponse:
        """Static facts about the daemon and its model."""
        request = admin_service_pb2.GetServerInfoRequest()
        return await self.call(admin_service_pb2.GetServerInfoResponse, self._admin.GetServerInfo, request)

    async def watch_stats(
        self, interval: float = 1.0, *, expert_heat: bool = False
    ) -> AsyncGenerator[admin_service_pb2.Stats, None]:
        """A snapshot at once and then one every `interval` seconds, until the daemon has drained or the caller closes
        the iterator. Raises InvalidArgumentError for an interval that the daemon does not allow."""
        request = admin_service_pb2.WatchStatsRequest(interval=options.duration(interval), expert_heat=expert_heat)
        call = self._admin.WatchStats(request)
        try:
            async for stats in call:
                yield stats
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def stats(self) -> admin_service_pb2.Stats:
        """How the daemon is at this moment: work, memory, drives."""
        async with asyncio.timeout(self.timeout), contextlib.aclosing(self.watch_stats()) as snapshots:
            async for stats in snapshots:
                return stats
        raise ProtocolError("the daemon ended a watch without a snapshot")

    async def state(self) -> str:
        """serving, loading or draining. Raises UnavailableError if the daemon cannot be reached."""
        request = health_pb2.HealthCheckRequest()
        health = await self.call(health_pb2.HealthCheckResponse, self._health.Check, request)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            try:
                await self.tokenize("")  # a call that needs the model is refused with the reason
            except UnavailableError as error:
                if not error.reason:
                    raise
                return {"MODEL_LOADING": "loading", "DRAINING": "draining"}.get(error.reason, error.reason)
        return "serving"
