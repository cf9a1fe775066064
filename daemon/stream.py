"""One view of a generation: the events of a stream.

Follows a generation with an index of its own, so a slow reader or ten of them cost the engine nothing. Sends everything
that is ready as one message; when nothing is, a timer sends progress, so that a prompt of an hour never looks dead.
Text is made here from the ids, whole characters only; the view's text never decides where a generation ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from colibri.daemon.chat import OutputText
from colibri.daemon.generation import Generation, GenerationState, GenerationView
from colibri.daemon.views import duration, generation_message
from colibri.v1 import types_pb2

# A delta of more tokens than this is sent in pieces, so that catching up with a long answer does not hold the loop.
MAX_DELTA_TOKENS = 2048
PROGRESS_SECONDS = 0.25


@dataclass(frozen=True)
class ViewOptions:
    """`output`: the text of this view, None if it shows none. `hidden_ids`: stop and end ids whose text is not shown.
    `heartbeat`: seconds of silence after which progress is sent."""

    output: OutputText | None
    token_ids: bool
    heartbeat: float
    hidden_ids: frozenset[int] = frozenset()


class GenerationStream:
    """Makes the events of one view; use `events` once."""

    def __init__(
        self, generation: Generation, options: ViewOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._generation = generation
        self._options = options
        self._clock = clock
        self._offset = 0
        self._sent_at = clock()
        self._progress_key: tuple[int, ...] = ()
        self._progress_at = float("-inf")
        self._prefill_from: tuple[float, int] | None = None

    async def events(self) -> AsyncGenerator[types_pb2.GenerateEvent, None]:
        """`started`, then `progress` and `delta`, `finished` last. Waits on the loop of the engine's LoopWake."""
        view = self._generation.view()
        yield self._stamp(types_pb2.GenerateEvent(started=generation_message(self._generation, view)), view, 0)
        while True:
            view = self._generation.view()
            while self._offset < view.next_offset:
                yield self._stamp(self._delta(view), view)
                await asyncio.sleep(0)  # a long catching-up lets the others in
            if view.state.finished:
                break
            if self._progress_is_due(view):
                yield self._stamp(self._progress(view), view)
            await self._wait(view)
        rest = self._rest()
        if rest:
            delta = types_pb2.Delta(offset=self._offset, text=rest)
            yield self._stamp(types_pb2.GenerateEvent(delta=delta), view)
        finished = generation_message(self._generation)  # the durable offset may have moved on
        yield self._stamp(types_pb2.GenerateEvent(finished=finished), self._generation.view())

    def _stamp(
        self, event: types_pb2.GenerateEvent, view: GenerationView, offset: int | None = None
    ) -> types_pb2.GenerateEvent:
        event.next_offset = self._offset if offset is None else offset
        event.durable_offset = view.durable_offset
        self._sent_at = self._clock()
        return event

    # ---- tokens and text

    def _delta(self, view: GenerationView) -> types_pb2.GenerateEvent:
        first = self._offset
        tokens = self._generation.tokens(first, min(view.next_offset, first + MAX_DELTA_TOKENS))
        self._offset += len(tokens)
        delta = types_pb2.Delta(offset=first, token_count=len(tokens), text=self._text(tokens))
        if self._options.token_ids:
            delta.token_ids.extend(tokens)
        return types_pb2.GenerateEvent(delta=delta)

    def _text(self, tokens: list[int]) -> str:
        output = self._options.output
        if output is None:
            return ""
        return "".join([output.push(token).text for token in tokens if token not in self._options.hidden_ids])

    def _rest(self) -> str:
        """What was held back, once it is certain that nothing follows. A paused generation may go on: its open text
        stays unsaid, for a later view starts from the tokens."""
        output = self._options.output
        if output is None or self._generation.view().state is GenerationState.PAUSED:
            return ""
        return output.flush().text

    # ---- progress

    def _progress_is_due(self, view: GenerationView) -> bool:
        now = self._clock()
        if now - self._sent_at >= self._options.heartbeat:
            return True
        if view.state is GenerationState.DECODING:
            return False
        key = self._key(view)
        if key[:1] != self._progress_key[:1]:
            return True
        return key != self._progress_key and now - self._progress_at >= PROGRESS_SECONDS

    @staticmethod
    def _key(view: GenerationView) -> tuple[int, ...]:
        return int(view.state), view.queue_position, view.prompt_tokens_done

    def _progress(self, view: GenerationView) -> types_pb2.GenerateEvent:
        now = self._clock()
        self._progress_key, self._progress_at = self._key(view), now
        progress = types_pb2.Progress(
            state=types_pb2.Generation.State.Name(view.state),
            queue_position=view.queue_position,
            prompt_tokens_done=view.prompt_tokens_done,
            prompt_tokens_total=view.prompt_tokens_total,
            tokens_per_second=self._rate(view, now),
        )
        left = view.prompt_tokens_total - view.prompt_tokens_done
        if view.state is GenerationState.PREFILLING and progress.tokens_per_second > 0:
            progress.eta.CopyFrom(duration(int(left / progress.tokens_per_second * 1e9)))
        return types_pb2.GenerateEvent(progress=progress)

    def _rate(self, view: GenerationView, now: float) -> float:
        """Tokens per second of what is going on: of the prompt since this view first saw it move, or of the answer."""
        if view.state is GenerationState.PREFILLING:
            if self._prefill_from is None:
                self._prefill_from = now, view.prompt_tokens_done
            since, done = self._prefill_from
            return (view.prompt_tokens_done - done) / (now - since) if now > since else 0.0
        decode_seconds = view.usage.decode_ns / 1e9
        return view.usage.completion_tokens / decode_seconds if decode_seconds > 0 else 0.0

    async def _wait(self, view: GenerationView) -> None:
        """Until something changed, or a sign of life is due."""
        now = self._clock()
        until = self._sent_at + self._options.heartbeat
        if view.state is not GenerationState.DECODING and self._key(view) != self._progress_key:
            until = min(until, self._progress_at + PROGRESS_SECONDS)
        try:
            async with asyncio.timeout(max(0.0, until - now)):
                await self._generation.wait(view.version)
        except TimeoutError:
            return


def hidden_ids(stop: types_pb2.StopConditions, eos_ids: Iterable[int]) -> frozenset[int]:
    """Ids that end a generation of this request and whose text is not part of the answer."""
    if stop.include_stop:
        return frozenset()
    return frozenset(stop.token_ids) | frozenset(() if stop.ignore_eos else eos_ids)
