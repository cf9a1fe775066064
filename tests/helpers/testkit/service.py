"""A daemon in this process: the real server, services, engine and store over a Unix socket, a model without weights."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from colibri.daemon.admin_service import ModelFacts
from colibri.daemon.chat import TextModel
from colibri.daemon.config import Address
from colibri.daemon.engine import Engine, EngineOptions, page_identity
from colibri.daemon.engine_api import EngineApi
from colibri.daemon.errors import DaemonError
from colibri.daemon.generation import LoopWake
from colibri.daemon.model_port import PrefillPort, RowPort
from colibri.daemon.notify import Notifier
from colibri.daemon.server import Server
from colibri.daemon.stats import RuntimeView
from colibri.daemon.store.store import SessionStore
from colibri.v1 import admin_service_pb2_grpc, inference_service_pb2_grpc, types_pb2
from colibri.v1 import inference_service_pb2 as inference_pb2
from testkit.fake_model import FakeModel, FakePrefill, FakeRow, FakeSequence
from testkit.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

VOCAB = 300
EVER = 30.0


@dataclass
class ScriptedModel(FakeModel):
    """Answers with `script`, token by token, whatever the prompt; its end is repeated."""

    script: Sequence[int] = ()
    vocab_size: int = VOCAB
    _starts: dict[int, int] = field(default_factory=dict)

    def _step(self, rows: Sequence[RowPort], prefills: Sequence[PrefillPort]) -> None:
        super()._step(rows, prefills)
        for prefill in prefills:
            if isinstance(prefill, FakePrefill) and prefill.done:
                self._starts[id(prefill.sequence)] = prefill.sequence.length
                prefill.next_token = self._token(prefill.sequence)
        for row in rows:
            if isinstance(row, FakeRow) and row.error is None:
                row.next_token = self._token(row.sequence)

    def _token(self, sequence: FakeSequence) -> int:
        return self.script[min(sequence.length - self._starts[id(sequence)], len(self.script) - 1)]


class FakeRuntime:
    """What runtime.py is for a real model. `loading` holds the load back until it is set."""

    def __init__(self, state: Path, model: FakeModel, **options: Any) -> None:
        self.model = model
        self.loading = threading.Event()
        self.loading.set()
        self.engine: Engine | None = None
        self._state = state
        self._options = EngineOptions(**options)
        self._store: SessionStore | None = None
        self.view = RuntimeView()
        self.heat = b""
        self.reloads = 0
        self.reload_error: DaemonError | None = None

    def look(self) -> RuntimeView:
        return self.view

    def expert_heat(self) -> bytes:
        return self.heat

    def session_bytes(self) -> int:
        assert self._store is not None
        return self._store.folder.session_bytes()

    def reload(self) -> None:
        self.reloads += 1
        if self.reload_error is not None:
            raise self.reload_error

    def load(self) -> None:
        assert self.loading.wait(EVER)

    def load_progress(self) -> tuple[int, int]:
        return 3 << 30, 6 << 30

    def start(self, wake: LoopWake) -> EngineApi:
        self._store = SessionStore(self._state, page_identity(self.model), "fake")
        self.engine = Engine(self.model, self._store, self._options, wake)
        self.engine.start()
        return self.engine

    def work_done(self) -> int:
        return self.model.decoded + self.model.prefilled

    def failure(self) -> BaseException | None:
        return self.engine.failure if self.engine else None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


@dataclass
class Daemon:
    """A running one, its stubs and some shorthands."""

    server: Server
    runtime: FakeRuntime
    text: TextModel
    channel: grpc.aio.Channel
    running: asyncio.Task[int]

    def __post_init__(self) -> None:
        self.inference: Any = inference_service_pb2_grpc.InferenceServiceStub(self.channel)
        self.sessions: Any = inference_service_pb2_grpc.SessionServiceStub(self.channel)
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def generate(self, **fields: Any) -> list[types_pb2.GenerateEvent]:
        """All events of a generation."""
        return [event async for event in self.inference.Generate(request(**fields))]

    async def session(self, name: str = "alpha") -> str:
        created = await self.sessions.CreateSession(inference_pb2.CreateSessionRequest(session_id=name))
        return str(created.name)

    async def position(self, session: str) -> int:
        found = await self.sessions.GetSession(inference_pb2.GetSessionRequest(name=session))
        return int(found.position)


def request(
    tokens: Sequence[int] | None = None,
    *,
    text: str | None = None,
    chat: types_pb2.Chat | None = None,
    session: str = "",
    max_tokens: int | None = 5,
    stop: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A request for greedy tokens that goes on to `max_tokens`, unless told otherwise."""
    given = types_pb2.Input()
    if chat is not None:
        given.chat.CopyFrom(chat)
    elif text is not None:
        given.text = text
    elif tokens is not None:
        given.tokens.ids.extend(tokens)
        given.tokens.SetInParent()
    return inference_pb2.GenerateRequest(
        request_id=fields.pop("request_id", str(uuid.uuid4())),
        session=session,
        input=given,
        sampling=types_pb2.SamplingParams(**({"temperature": 0.0, "seed": 1} | (sampling or {}))),
        stop=types_pb2.StopConditions(**({"max_tokens": max_tokens, "ignore_eos": True} | (stop or {}))),
        output=types_pb2.OutputOptions(**({"text": True, "token_ids": True} | (output or {}))),
        **fields,
    )


def user(text: str) -> types_pb2.Chat:
    return types_pb2.Chat(messages=[types_pb2.Message(role=types_pb2.Message.ROLE_USER, text=text)])


def tokens_of(events: Sequence[types_pb2.GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


def text_of(events: Sequence[types_pb2.GenerateEvent]) -> str:
    return "".join(event.delta.text for event in events)


async def first(call: Any, kind: str) -> types_pb2.GenerateEvent:
    """Reads a stream up to the first event of a kind."""
    while True:
        event: types_pb2.GenerateEvent = await call.read()
        if event.WhichOneof("event") == kind:
            return event


async def rest(call: Any) -> list[types_pb2.GenerateEvent]:
    """Reads a stream to its end."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def blocked(model: FakeModel) -> threading.Event:
    """Holds every step of the model until the event is set."""
    gate = threading.Event()

    def wait() -> None:
        assert gate.wait(20)

    model.before_step = wait
    return gate


@contextlib.asynccontextmanager
async def daemon(
    folder: Path,
    model: FakeModel | None = None,
    *,
    wait: bool = True,
    hold_loading: bool = False,
    template: str = CHAT_TEMPLATE,
    change_tokenizer: Callable[[Path], object] = lambda _: None,
    **options: Any,
) -> AsyncIterator[Daemon]:
    """A daemon whose files are in `folder`; stopped in order at the end, if it was not before."""
    write_tokenizer(folder / "text", VOCAB, chat_template=template)
    change_tokenizer(folder / "text" / "tokenizer.json")
    text = TextModel.open(folder / "text", vocab_rows=VOCAB)
    model = model or FakeModel(vocab_size=VOCAB)
    runtime = FakeRuntime(folder / "state", model, **options)
    if hold_loading:
        runtime.loading.clear()
    facts = ModelFacts("fake", "FakeForCausalLM", model.content_id, model.max_context, 8)
    address = Address(f"unix:{folder}/d.sock", folder / "d.sock")
    server = Server(address, text, facts, runtime, Notifier({}), heartbeat=5.0)
    running = asyncio.create_task(server.run())
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address.target, options=limits) as channel:
        found = Daemon(server, runtime, text, channel, running)
        try:
            if wait:
                await until_ready(found)
            yield found
        finally:
            runtime.loading.set()
            server.stop()
            await asyncio.wait_for(running, EVER)


async def until_ready(running: Daemon) -> None:
    async with asyncio.timeout(EVER):
        while running.runtime.engine is None or running.server.phase != "ready":
            await asyncio.sleep(0.005)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_awaited(work), 60))


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


@dataclass(frozen=True)
class Refusal:
    """A status with its ErrorInfo."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    retry: bool


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    status = rpc_status.from_call(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    reason, metadata, retried = "", {}, False
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            assert info.domain == "colibri.v1"
            reason, metadata = info.reason, dict(info.metadata)
        retried = retried or detail.Unpack(retry)
    return Refusal(error.code(), error.details() or "", reason, metadata, retried)


async def refused(call: Awaitable[Any]) -> Refusal:
    """The refusal that a call must end with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError(f"not refused: {answer}")
