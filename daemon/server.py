"""The running daemon: one event loop, one gRPC server, loading, readiness, draining.

Binds first and loads behind it, so that health, server info and the status line answer from the first second. A signal
ends it in order: nobody new is let in, the engine stops at a token boundary and writes what it has, every stream gets
its `finished`, then the server goes. What is loaded and how is the runtime's business (runtime.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from colibri.daemon.admin_service import AdminRpcs, ModelFacts, capability_names
from colibri.daemon.chat import TextModel
from colibri.daemon.config import Address
from colibri.daemon.engine_api import EngineApi
from colibri.daemon.errors import DaemonError, ModelLoadingError
from colibri.daemon.generation import LoopWake
from colibri.daemon.notify import Notifier
from colibri.daemon.opening import EXIT_FAILURE, EXIT_OK, EXIT_TEMPORARY, StartError
from colibri.daemon.requests import input_limit
from colibri.daemon.rpc import Gate, Phase, Rpc, service_handlers
from colibri.daemon.service import InferenceRpcs
from colibri.daemon.session_service import SessionRpcs
from colibri.daemon.stats import Situation, StatsRuntime, StatsSource
from colibri.v1 import admin_service_pb2, inference_service_pb2

log = logging.getLogger("colibri.daemon.server")

STATUS_SECONDS = 1.0
DRAIN_GRACE_SECONDS = 2.0  # for streams to take their last event, once the engine has stopped
MIN_MESSAGE_BYTES = 64 << 20
GIB = 1 << 30

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DESCRIPTORS: dict[str, ServiceDescriptor] = {
    **inference_service_pb2.DESCRIPTOR.services_by_name,
    **admin_service_pb2.DESCRIPTOR.services_by_name,
}


class Runtime(StatsRuntime, Protocol):
    """The model and the engine behind the server. `load` and `start` may take minutes and are called on a thread."""

    def load(self) -> None:
        """Raises StartError."""

    def load_progress(self) -> tuple[int, int]:
        """(bytes done, bytes in all); any thread, any time."""

    def reload(self) -> None:
        """Opens the stripes again that failed or were replaced; on a thread, while the engine runs. Raises
        DaemonError."""

    def start(self, wake: LoopWake) -> EngineApi:
        """Makes and starts the engine. Raises StartError."""

    def work_done(self) -> int:
        """A counter that grows with every piece of work of loading, then of the core; any thread."""

    def failure(self) -> BaseException | None:
        """Why the engine's thread has ended by itself, None while all is well."""

    def close(self) -> None: ...


def message_limit(max_context: int) -> int:
    """The largest request in bytes: a full context of text fits, and what is too long for the context is still read,
    so that its error can give both numbers."""
    return max(MIN_MESSAGE_BYTES, 2 * input_limit(max_context))


def server_options(max_context: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_limit(max_context)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", 256),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The default of 300 s makes a patient client's pings end in GOAWAY during a long silent prefill.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


class Server:
    """One daemon. `run` returns the exit code; `stop` asks it to end, from the loop. `bound` is the address in use."""

    def __init__(
        self,
        address: Address,
        text: TextModel,
        facts: ModelFacts,
        runtime: Runtime,
        notifier: Notifier,
        heartbeat: float = 5.0,
    ) -> None:
        self._address = address
        self._facts = facts
        self._runtime = runtime
        self._notifier = notifier
        self._gate = Gate()
        self._engine: EngineApi | None = None
        self._stop = asyncio.Event()
        self._health = health_aio.HealthServicer()
        self._degraded: tuple[str, ...] = ()  # as the last status line said it: at most a second old
        self._ended = asyncio.Event()  # drained
        self._reloading: asyncio.Task[None] | None = None
        self.bound = ""
        self.loading_abandoned = False  # a thread is still inside the core: the process must end without clean-up
        services = {
            "InferenceService": InferenceRpcs(self._need_engine, text, facts.max_context, heartbeat).rpcs(),
            "SessionService": SessionRpcs(self._need_engine, facts.name, facts.content_id).rpcs(),
        }
        self._services: dict[str, dict[str, Rpc]] = services
        stats = StatsSource(runtime, self._situation)
        admin = AdminRpcs(facts, text, lambda: self._capabilities(text), lambda: self._degraded, stats, self._ended)
        self._services["AdminService"] = admin.rpcs()

    def _situation(self) -> Situation:
        return Situation(self._gate.phase, self.status, self._degraded, self._engine)

    def _capabilities(self, text: TextModel) -> list[str]:
        return capability_names({name: set(rpcs) for name, rpcs in self._services.items()}, text)

    def _need_engine(self) -> EngineApi:
        self._gate.check()
        if self._engine is None:
            raise ModelLoadingError("the model is still loading")
        return self._engine

    @property
    def phase(self) -> str:
        """loading, ready or draining."""
        return self._gate.phase.value

    @property
    def status(self) -> str:
        """The status line, as the service manager hears it."""
        return self._notifier.status

    def stop(self) -> None:
        """Idempotent."""
        self._stop.set()

    def reload(self) -> None:
        """What SIGHUP asks for; one at a time. Before READY there is nothing to reload."""
        if self._gate.phase is not Phase.READY:
            log.info("reload: nothing to do while %s", self.phase)
        elif self._reloading is None or self._reloading.done():
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        self._notifier.reloading()
        try:
            await asyncio.to_thread(self._runtime.reload)
            log.info("reload: stripes are opened again where it was needed")
        except DaemonError as error:
            log.error("reload: %s", error)
        if self._gate.phase is Phase.READY:
            self._notifier.ready(self.status)

    async def run(self) -> int:
        """Serves until `stop`. Raises StartError if the address cannot be bound."""
        server = await self._bind()
        wake = LoopWake(asyncio.get_running_loop())
        try:
            code = await self._live(wake)
        except StartError as error:
            log.error("%s", error)
            self._notifier.stopping(str(error).splitlines()[-1])
            code = error.exit_code
        finally:
            self._ended.set()
            await self._health.enter_graceful_shutdown()
            await server.stop(DRAIN_GRACE_SECONDS)
            wake.close()
        return code

    async def _bind(self) -> grpc.aio.Server:
        """Raises StartError."""
        server = grpc.aio.server(options=server_options(self._facts.max_context))
        handlers = [
            service_handlers(descriptor, self._services.get(name, {}), self._gate)
            for name, descriptor in DESCRIPTORS.items()
        ]
        server.add_generic_rpc_handlers(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(NOT_SERVING)
        try:
            port = server.add_insecure_port(self._address.target)
        except RuntimeError as error:
            raise StartError(f"{self._address.target} cannot be bound: {error}", EXIT_TEMPORARY) from error
        await server.start()
        host = self._address.target.rpartition(":")[0]
        self.bound = self._address.target if self._address.path else f"{host}:{port}"
        log.info("listening on %s", self.bound)
        return server

    async def _set_health(self, status: Any) -> None:
        for name in ("", *(descriptor.full_name for descriptor in DESCRIPTORS.values())):
            await self._health.set(name, status)

    # ---- the life of a daemon

    async def _live(self, wake: LoopWake) -> int:
        if not await self._load():
            return EXIT_OK
        try:
            self._engine = await asyncio.to_thread(self._runtime.start, wake)
            self._gate.phase = Phase.READY
            await self._set_health(SERVING)
            self._notifier.ready(f"ready: {self._facts.name} on {self.bound}")
            log.info("ready: %s", self._facts.name)
            code = await self._serve()
            await self._drain()
            return code
        finally:
            await asyncio.to_thread(self._runtime.close)

    async def _load(self) -> bool:
        """Loads on a thread of its own, reporting; False if a signal came first. Raises StartError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        threading.Thread(target=_run_into, args=(self._runtime.load, done), name="load", daemon=True).start()
        started = time.monotonic()
        while not done.done():
            if self._stop.is_set():
                self.loading_abandoned = True
                self._gate.phase = Phase.DRAINING
                self._notifier.stopping("stopped while loading")
                return False
            self._report_loading(started)
            await _first_of(STATUS_SECONDS, asyncio.shield(done), self._stop.wait())
        done.result()
        return True

    def _report_loading(self, started: float) -> None:
        read, total = self._runtime.load_progress()
        rate = read / max(time.monotonic() - started, 1e-3)
        self._gate.detail = f"{read / GIB:.2f} of {total / GIB:.2f} GiB of dense weights, {rate / 1e9:.2f} GB/s"
        self._notifier.tell(f"loading: {self._gate.detail}")
        self._notifier.extend(self._runtime.work_done())

    async def _serve(self) -> int:
        """Until a signal, or until the engine has failed."""
        interval = min(STATUS_SECONDS, (self._notifier.watchdog_seconds or 60.0) / 4)
        last_work = -1
        while not self._stop.is_set():
            failure = self._runtime.failure()
            if failure is not None:
                log.critical("the engine has failed: %s", failure)
                return EXIT_FAILURE
            last_work = self._report_running(last_work)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), interval)
        return EXIT_OK

    def _report_running(self, last_work: int) -> int:
        """Status line and watchdog. A step that makes no progress at all gives no sign of life."""
        assert self._engine is not None
        stats = self._engine.stats()
        work = self._runtime.work_done()
        if stats.running == 0 or work != last_work:
            self._notifier.alive()
        view = self._runtime.look()
        self._degraded = (*view.remarks, *stats.degraded)
        degraded = f"; degraded: {'; '.join(self._degraded)}" if self._degraded else ""
        speed = f", {stats.decode_tokens_per_second:.1f} tok/s" if stats.running else ""
        doing = "".join(f"; {what}" for what in view.doing)
        self._notifier.tell(f"ready: {stats.running} running, {stats.queued} queued{speed}{doing}{degraded}")
        return work

    async def _drain(self) -> None:
        """Generations stop at a token boundary and are written; their streams end by themselves."""
        assert self._engine is not None
        self._gate.phase = Phase.DRAINING
        self._notifier.stopping("stopping: writing sessions")
        log.info("stopping: sessions are written")
        await self._set_health(NOT_SERVING)
        if self._reloading is not None:
            await self._reloading
        await asyncio.to_thread(self._engine.drain)


def _run_into(work: Callable[[], None], done: asyncio.Future[None]) -> None:
    """Runs `work` on this thread and puts its outcome into a future of the loop."""
    loop = done.get_loop()
    try:
        work()
    except BaseException as error:
        _post(loop, done.set_exception, error)
    else:
        _post(loop, done.set_result, None)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], value: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon was stopped while loading
        loop.call_soon_threadsafe(call, value)


async def _first_of(timeout: float, *waits: Awaitable[object]) -> None:
    """Waits until one of `waits` is done, or the timeout; what is left over is cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
