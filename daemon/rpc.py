"""gRPC plumbing: one handler per method of the contract, errors as statuses, and who is let in when.

Builds the handlers from the service descriptors, so that every RPC of the contract is there: those without an
implementation answer UNIMPLEMENTED. All handlers are coroutines (a plain function in an asyncio server freezes or
hangs it), and cancellation always passes through (grpcio leaks a call whose handler swallows it).
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from colibri.daemon.errors import DaemonError, DrainingError, InvalidFieldError, ModelLoadingError
from colibri.daemon.fields import check_fields

log = logging.getLogger("colibri.daemon.rpc")

DOMAIN = "colibri.v1"
# Trailing metadata beyond 8 KiB is dropped by common peers, so what goes into it has a limit, which the text shows.
MAX_ERROR_CHARS = 1500

Context = Any  # grpc.aio.ServicerContext; its stubs do not cover what abort and write take


class NotBuiltError(DaemonError):
    reason, code = "NOT_BUILT", "UNIMPLEMENTED"


class DeadlinePassedError(DaemonError):
    reason, code = "DEADLINE_PASSED", "DEADLINE_EXCEEDED"


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Gate:
    """Who is let in: nobody who needs the model before it is loaded, nobody once the daemon drains."""

    phase: Phase = Phase.LOADING
    detail: str = ""  # what the status line says

    def check(self) -> None:
        """Raises ModelLoadingError or DrainingError."""
        if self.phase is Phase.LOADING:
            raise ModelLoadingError(f"the model is still loading{': ' + self.detail if self.detail else ''}")
        if self.phase is Phase.DRAINING:
            raise DrainingError("the daemon is stopping; sessions and their generations are kept")


@dataclass(frozen=True)
class Rpc:
    """One implemented method: a coroutine function, or an asynchronous generator function if the reply is a stream.
    Both take (request, time_remaining). `always`: answers before the model is loaded and while draining."""

    call: Callable[[Any, float | None], Awaitable[Message]] | Callable[[Any, float | None], AsyncGenerator[Any, None]]
    always: bool = False


class InternalError(DaemonError):
    reason: ClassVar[str] = "INTERNAL"


def status_of(error: DaemonError) -> Any:
    """The grpc.Status of an error, with ErrorInfo and, where trying again helps, RetryInfo."""
    code = grpc.StatusCode[error.code]
    message = clipped(error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in error.metadata.items():
        info.metadata[key] = clipped(value, 200)
    status = status_pb2.Status(code=code.value[0], message=message)
    details: list[Message] = [info]
    if error.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)


def clipped(text: str, limit: int = MAX_ERROR_CHARS) -> str:
    """`text`, or its start and how long it was."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


async def abort(context: Context, error: DaemonError) -> NoReturn:
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


def service_handlers(service: ServiceDescriptor, implemented: Mapping[str, Rpc], gate: Gate) -> grpc.GenericRpcHandler:
    """Handlers for every method of `service`. `implemented` maps method names; an unknown name is a KeyError."""
    unknown = set(implemented) - set(service.methods_by_name)
    if unknown:
        raise KeyError(f"{service.full_name} has no method {sorted(unknown)}")
    handlers = {name: _handler(method, implemented.get(name), gate) for name, method in service.methods_by_name.items()}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(method: MethodDescriptor, rpc: Rpc | None, gate: Gate) -> Any:
    request_class = GetMessageClass(method.input_type)
    options: dict[str, Any] = {
        "request_deserializer": request_class.FromString,
        "response_serializer": GetMessageClass(method.output_type).SerializeToString,
    }
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(method, rpc, gate), **options)
    return grpc.unary_unary_rpc_method_handler(_unary(method, rpc, gate), **options)


def _admit(method: MethodDescriptor, rpc: Rpc | None, gate: Gate, request: Message, remaining: float | None) -> Rpc:
    if rpc is None:
        raise NotBuiltError(f"{method.full_name} is part of the contract, and this version does not have it")
    if not rpc.always:
        gate.check()
    if remaining is not None and remaining <= 0:
        raise DeadlinePassedError("the deadline had passed when the call arrived; nothing was done")
    check_fields(request)
    return rpc


def _unary(method: MethodDescriptor, rpc: Rpc | None, gate: Gate) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(request: Message, context: Context) -> Any:
        try:
            remaining = context.time_remaining()
            call: Any = _admit(method, rpc, gate, request, remaining).call
            return await call(request, remaining)
        except Exception as error:
            await _fail(method, context, error)

    return handle


def _streaming(method: MethodDescriptor, rpc: Rpc | None, gate: Gate) -> Callable[[Any, Context], Awaitable[None]]:
    async def handle(request: Message, context: Context) -> None:
        try:
            remaining = context.time_remaining()
            call: Any = _admit(method, rpc, gate, request, remaining).call
            # Closed at once when the client leaves, so that the generator's clean-up is not left to the collector.
            async with contextlib.aclosing(call(request, remaining)) as events:
                async for event in events:
                    # Waits while the client reads nothing and its window is full; a return says nothing about delivery.
                    await context.write(event)
        except Exception as error:
            await _fail(method, context, error)

    return handle


async def _fail(method: MethodDescriptor, context: Context, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, DaemonError):
        await abort(context, error)
    log.exception("%s failed", method.full_name, exc_info=error)
    await abort(context, InternalError(f"{type(error).__name__}: {error}"))


def invalid(field: str, problem: str, **metadata: object) -> InvalidFieldError:
    """The error for a field whose value cannot be used."""
    return InvalidFieldError(f"field {field}: {problem}", field=field, **metadata)
