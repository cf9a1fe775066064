"""GenerationStream: the events of one generation, checked as they arrive.

The stream is only a view of work that the daemon does; it has no deadline. What the contract promises is checked here:
`started` comes first, deltas join without a gap, `finished` comes last, and a heartbeat comes at least every few
seconds. After three missed ones the daemon counts as lost.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from colibri.client.errors import OffsetGapError, ProtocolError, ServerLostError, from_error_detail, from_rpc_error
from colibri.client.events import Delta, Event, Finished, Started, read_event
from colibri.v1 import inference_service_pb2, types_pb2

MISSED_HEARTBEATS = 3

_Call = grpc.aio.UnaryStreamCall[inference_service_pb2.GenerateRequest, types_pb2.GenerateEvent]


class GenerationStream:
    """An asynchronous iterator over Started, Progress, Delta, PromptTokens and Finished.

    A generation that ended in an error yields Finished, then raises that error as a ServiceError. Raises ServiceError
    (with `generation` and `next_offset` set) if the call fails, ServerLostError if the daemon goes silent or away,
    ProtocolError if it breaks the contract. Leaving the stream early (`close`, or leaving `async with`) ends the view;
    whether the work goes on is the request's disconnect policy.
    """

    def __init__(self, call: _Call, heartbeat: float) -> None:
        self._call = call
        self._patience = MISSED_HEARTBEATS * heartbeat
        self._finished: Finished | None = None
        self.generation = ""
        self.start_position = 0
        self.next_offset = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._finished is not None:
            await self._end()
        while True:
            event = read_event(await self._read())
            if event is not None:
                self._check(event)
                return event

    async def text(self) -> str:
        """Runs the stream to its end; returns the answer's text."""
        return "".join([event.text async for event in self if isinstance(event, Delta)])

    def close(self) -> None:
        """Ends the view. Idempotent."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _read(self) -> types_pb2.GenerateEvent:
        try:
            message = await asyncio.wait_for(self._call.read(), self._patience)
        except TimeoutError:
            self.close()
            raise self._lost(f"no sign of life from the daemon for {self._patience:g} s") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self.generation:
                raise self._lost(
                    "the connection to the daemon broke in the middle of the answer; once the daemon runs again, a "
                    "session can go on"
                ) from error
            failure = from_rpc_error(error)
            failure.generation, failure.next_offset = self.generation, self.next_offset
            raise failure from error
        if not isinstance(message, types_pb2.GenerateEvent):
            raise ProtocolError(f"the stream of {self.generation or 'a generation'} ended without `finished`")
        return message

    def _lost(self, message: str) -> ServerLostError:
        lost = ServerLostError(message, code=grpc.StatusCode.UNAVAILABLE)
        lost.generation, lost.next_offset = self.generation, self.next_offset
        return lost

    def _check(self, event: Event) -> None:
        if isinstance(event, Started):
            if self.generation:
                raise ProtocolError(f"{self.generation}: a second `started`")
            self.generation = event.generation.name
            self.start_position = event.generation.start_position
            return
        if not self.generation:
            raise ProtocolError(f"the first event is {type(event).__name__}, not `started`")
        if isinstance(event, Delta):
            if event.offset != self.next_offset:
                raise OffsetGapError(self.next_offset, event.offset)
            if event.next_offset != event.offset + event.token_count:
                raise ProtocolError(
                    f"{self.generation}: a delta of {event.token_count} tokens at offset {event.offset} "
                    f"says that the next one is {event.next_offset}"
                )
            self.next_offset = event.next_offset
        elif isinstance(event, Finished):
            if event.next_offset != self.next_offset:
                raise OffsetGapError(self.next_offset, event.next_offset)
            self._finished = event

    async def _end(self) -> None:
        """After `finished` nothing may come but the end of the call."""
        try:
            message = await asyncio.wait_for(self._call.read(), self._patience)
        except (TimeoutError, grpc.aio.AioRpcError):
            self.close()  # the answer is complete; how the view ends adds nothing
        else:
            if isinstance(message, types_pb2.GenerateEvent):
                raise ProtocolError(f"{self.generation}: an event after `finished`")
        finished = self._finished
        if finished is not None and finished.generation.HasField("error"):
            failure = from_error_detail(finished.generation.error)
            failure.generation, failure.next_offset = self.generation, self.next_offset
            raise failure
        raise StopAsyncIteration
