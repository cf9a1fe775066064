"""Chatting in a session from a terminal: one turn at a time, Ctrl-C ends the turn, the session stays.

Owns the turn: it sends only the new messages, says at which position it expects the session to be (so that two
terminals in one session do not interleave), and turns Ctrl-C into a cancelled generation, whose text is kept.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from colibri.client.client import Client
from colibri.client.display import AnswerView
from colibri.client.errors import ColibriError, NotFoundError
from colibri.client.events import Delta, Finished
from colibri.client.options import Sampling, Stop, message
from colibri.client.stream import GenerationStream
from colibri.v1 import types_pb2

_ENDS_BY_ITSELF = frozenset({"EOS", "STOP_SEQUENCE", "MAX_TOKENS", "CONTEXT_FULL", "TIME_LIMIT"})


class AbandonedError(ColibriError):
    """Ended with Ctrl-C: the answer was cancelled, or with a second Ctrl-C the stream was left."""


class PausedError(ColibriError):
    """The daemon stopped in the middle of the answer; what it said is kept."""


class LossError(ColibriError):
    """The session lost its end, and nobody has said yet that the chat may go on without it."""

    def __init__(self, session: types_pb2.Session) -> None:
        name = session.name.removeprefix("sessions/")
        kept = f"positions 0 to {session.position - 1} are left" if session.position else "nothing of it is left"
        why = f" ({session.degraded})" if session.degraded else ""
        super().__init__(
            f"session {name} is damaged and part of the conversation is lost, {kept}{why}. "
            f"To go on without what is lost: colibri chat --session {name} --accept-loss; or begin a new session"
        )


class Answer:
    """What one turn gave: its events condensed."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.finished: Finished | None = None

    @property
    def cancelled(self) -> bool:
        return self.finished is not None and self.finished.finish_reason == "CANCELLED"

    def check_not_paused(self) -> None:
        """Raises PausedError if the daemon stopped before the answer's end."""
        if self.finished is not None and self.finished.generation.state == types_pb2.Generation.STATE_PAUSED:
            raise PausedError("the daemon stopped in the middle of the answer; what it said is kept")


class _Interrupts:
    """Ctrl-C while a stream runs: the first one cancels the generation (once it has a name), the second one leaves."""

    def __init__(self, client: Client, stream: GenerationStream) -> None:
        self._client = client
        self._stream = stream
        self._count = 0
        self.cancelling: asyncio.Task[types_pb2.Generation] | None = None

    @property
    def abandoned(self) -> bool:
        return self._count > 1

    def interrupt(self) -> None:
        self._count += 1
        if self.abandoned:
            self._stream.close()
        self.cancel_if_wanted()

    def cancel_if_wanted(self) -> None:
        """A generation that has not started has no name yet: this is called again when it has."""
        if self._count and self.cancelling is None and self._stream.generation:
            self.cancelling = asyncio.create_task(self._client.cancel(self._stream.generation))

    @contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


async def follow(client: Client, stream: GenerationStream, view: AnswerView | None) -> Answer:
    """Runs a stream to its end. Raises what the stream raises, and AbandonedError after a second Ctrl-C."""
    answer = Answer()
    interrupts = _Interrupts(client, stream)
    try:
        async with stream:
            with interrupts.caught():
                async for event in stream:
                    interrupts.cancel_if_wanted()
                    if view is not None:
                        view.show(event)
                    if isinstance(event, Delta):
                        answer.text += event.text
                        answer.token_ids += event.token_ids
                    elif isinstance(event, Finished):
                        answer.finished = event
        if interrupts.cancelling is not None:
            await interrupts.cancelling
    except asyncio.CancelledError:
        if interrupts.abandoned:
            raise AbandonedError("left the answer; in a session the daemon finishes it by itself") from None
        raise
    finally:
        if interrupts.cancelling is not None:
            interrupts.cancelling.cancel()
    return answer


class Conversation:
    """A chat in one session of the daemon. `accept_loss`: it may go on where a damaged session now ends. Raises
    LossError for a damaged session without it."""

    def __init__(
        self, client: Client, session: types_pb2.Session, sampling: Sampling, stop: Stop, accept_loss: bool = False
    ) -> None:
        self.session = session
        self._accept_loss = accept_loss
        self._client = client
        self._sampling = sampling
        self._stop = stop
        self._position: int | None = self._end_of(session)

    @classmethod
    async def open(
        cls, client: Client, session_id: str, sampling: Sampling, stop: Stop, accept_loss: bool = False
    ) -> Conversation:
        """Finds the session, or creates it; an empty id makes a new one with a name of the daemon's choice. Raises
        LossError."""
        try:
            session = await (client.sessions.get(session_id) if session_id else client.sessions.create())
        except NotFoundError:
            session = await client.sessions.create(session_id)
        return cls(client, session, sampling, stop, accept_loss)

    def _end_of(self, session: types_pb2.Session) -> int:
        """Where the session ends. Naming that position to the daemon is what acknowledges a loss, so it is not done
        unasked. Raises LossError."""
        if session.state == types_pb2.Session.STATE_CORRUPT and not self._accept_loss:
            raise LossError(session)
        return session.position

    @property
    def is_new(self) -> bool:
        return self._position == 0

    async def say(
        self, text: str, *, system: str = "", view: AnswerView | None = None, token_ids: bool = False
    ) -> Answer:
        """One turn. `system` is a system message in front of it, for the first turn. Raises as `follow`.

        `token_ids` asks for the ids of the answer.
        """
        if self._position is None:
            self._position = self._end_of(await self._client.sessions.get(self.session.name))
        messages = [message("system", system)] if system else []
        stream = self._client.chat(
            [*messages, message("user", text)],
            session=self.session.name,
            expected_position=self._position,
            sampling=self._sampling,
            stop=self._stop,
            token_ids=token_ids,
        )
        # Known again only after a turn that ended by itself: after any other the daemon is asked.
        self._position = None
        answer = await follow(self._client, stream, view)
        if answer.finished is not None and answer.finished.finish_reason in _ENDS_BY_ITSELF:
            self._position = stream.start_position + stream.next_offset
        return answer
