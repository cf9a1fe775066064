"""A generation: the server-side resource of which a stream is only a view.

Owns the tokens that were produced, how many of them are durable, the state, the usage, and waking whoever waits for
more. The engine thread and the store's writer thread change it; any number of readers follow it, each with an index of
its own: there is no queue per client, so a slow client costs nothing. Knows neither text nor gRPC.
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from colibri.daemon.errors import DaemonError

Record = TypeVar("Record")


def evolve(record: Record, **changes: Any) -> Record:
    """`dataclasses.replace` for plain frozen records, several times as fast: it runs for every token."""
    assert changes.keys() <= record.__dict__.keys(), f"{type(record).__name__} has no {changes.keys()}"
    changed = object.__new__(type(record))
    changed.__dict__.update(record.__dict__)
    changed.__dict__.update(changes)
    return changed


class GenerationState(enum.IntEnum):
    """Numbers equal those of the contract's Generation.State."""

    QUEUED = 1
    PREFILLING = 2
    DECODING = 3
    PAUSED = 4
    SUCCEEDED = 5
    CANCELLED = 6
    FAILED = 7

    @property
    def finished(self) -> bool:
        """No more tokens will come from this engine."""
        return self >= GenerationState.PAUSED


class FinishReason(enum.IntEnum):
    """Numbers equal those of the contract's FinishReason."""

    UNSPECIFIED = 0
    EOS = 1
    STOP_SEQUENCE = 2
    MAX_TOKENS = 3
    CONTEXT_FULL = 4
    TIME_LIMIT = 6
    CANCELLED = 7
    ERROR = 8


@dataclass(frozen=True)
class SamplingSpec:
    """Effective sampling: nothing is unset any more."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class TextStop(Protocol):
    """Sees each token, on the engine thread, before any reader does; answers whether a stop sequence is complete. The
    token that completes it is the last one kept."""

    def push(self, token: int) -> bool: ...


@dataclass(frozen=True)
class GenerationSpec:
    """What to generate, checked by the engine at submit.

    `session`: the session's id, None for a stateless generation. `input_ids` are appended to the session. `max_tokens`
    None: up to the end of the context. A sampled id in `eos_token_ids` or `stop_token_ids` ends the generation and is
    kept as its last token. `body_hash` identifies the request's content for idempotency (any bytes, e.g. SHA-256 of the
    deterministic serialisation). `max_duration`: seconds from submit, then TIME_LIMIT; what was produced is kept.
    `stop_check`: a fresh matcher for this generation, never shared. `position_named`: `expected_position` is what the
    caller said, not what the daemon saw itself; only the caller's own word acknowledges that a session lost its end.
    """

    request_id: str
    input_ids: tuple[int, ...]
    sampling: SamplingSpec = SamplingSpec()
    session: str | None = None
    max_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    expected_position: int | None = None
    position_named: bool = True
    body_hash: bytes = b""
    max_duration: float | None = None
    stop_check: TextStop | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Usage:
    """Times in nanoseconds. `prompt_tokens` are all positions of the prompt, the session's history included;
    `cached_prompt_tokens` those of them whose KV was reused."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    time_to_first_token_ns: int = 0
    expert_hits: int = 0
    expert_loads: int = 0
    expert_bytes_read: int = 0


@dataclass(frozen=True)
class GenerationView:
    """One consistent look at a generation. Times are Unix seconds."""

    name: str
    request_id: str
    session: str | None
    state: GenerationState
    start_position: int  # absolute position of offset 0
    next_offset: int
    durable_offset: int
    finish_reason: FinishReason
    stop_token: int | None  # the EOS or stop id that ended it
    stop_sequence: str | None  # the stop string, where its log tells; else the spec's stop_check knows
    usage: Usage
    sampling: SamplingSpec
    re_prefilled: bool
    queue_position: int  # 0: not queued; 1: next
    prompt_tokens_done: int
    prompt_tokens_total: int
    create_time: float
    update_time: float
    expire_time: float | None  # set when finished
    error: DaemonError | None
    version: int  # changes with every change; see Generation.wait


class Generation:
    """Its methods may be called from any thread, but `wait` only on the loop of the LoopWake given to the engine.
    `spec.input_ids` are given up at the end."""

    def __init__(
        self,
        name: str,
        spec: GenerationSpec,
        start_position: int,
        on_change: Callable[[Generation], None] | None = None,
    ) -> None:
        now = time.time()
        self.name = name
        self.spec = spec
        self.body_hash = spec.body_hash
        self._tokens = array("I")  # four bytes a token: finished generations are kept for a day
        self._changed = threading.Condition()
        self._on_change = on_change
        self._waiters: list[asyncio.Future[None]] = []  # touched on the loop only
        self._view = GenerationView(
            name=name,
            request_id=spec.request_id,
            session=spec.session,
            state=GenerationState.QUEUED,
            start_position=start_position,
            next_offset=0,
            durable_offset=0,
            finish_reason=FinishReason.UNSPECIFIED,
            stop_token=None,
            stop_sequence=None,
            usage=Usage(prompt_tokens=start_position),
            sampling=spec.sampling,
            re_prefilled=False,
            queue_position=0,
            prompt_tokens_done=0,
            prompt_tokens_total=start_position,
            create_time=now,
            update_time=now,
            expire_time=None,
            error=None,
            version=0,
        )

    # ---- readers

    def view(self) -> GenerationView:
        return self._view  # replaced whole, never changed in place

    def tokens(self, first: int = 0, end: int | None = None) -> list[int]:
        """Tokens [first, end), at most up to the present next_offset."""
        return self._tokens[first:end].tolist()

    @property
    def finished(self) -> bool:
        return self._view.state.finished

    def wait_sync(self, seen_version: int, timeout: float | None = None) -> GenerationView:
        """Blocks until something changed since `seen_version`, or the timeout; returns the present view."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.version != seen_version, timeout)
        return self._view

    def result(self, timeout: float | None = None) -> GenerationView:
        """Blocks until finished. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._view.state.finished, timeout):
                raise TimeoutError(f"{self.name} is not finished after {timeout} s")
        return self._view

    async def wait(self, seen_version: int) -> GenerationView:
        """The same on the event loop, without a thread; give up with asyncio.timeout or wait_for."""
        while self._view.version == seen_version:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            if self._view.version != seen_version:  # changed between the test and the registration
                self.release_waiters()
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self._view

    def release_waiters(self) -> None:
        """Called by LoopWake on the loop."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # ---- the engine and the store

    def update(self, **changes: Any) -> None:
        """Replaces fields of the view; a finished generation does not change any more, but for its durable offset."""
        with self._changed:
            self._publish(changes)

    def append(self, token: int, **changes: Any) -> None:
        """Adds a token and changes fields, seen by readers together."""
        with self._changed:
            self._tokens.append(token)
            self._publish(changes)

    def restore(self, tokens: list[int], **changes: Any) -> None:
        """Fills a generation that was read back from a session's log."""
        with self._changed:
            self._tokens = array("I", tokens)
            self._publish(changes)

    def _publish(self, changes: dict[str, Any]) -> None:
        if self._view.state.finished and set(changes) - {"durable_offset", "expire_time"}:
            raise RuntimeError(f"{self.name} is finished; it cannot change {sorted(changes)}")
        self._view = evolve(
            self._view,
            next_offset=len(self._tokens),
            update_time=time.time(),
            version=self._view.version + 1,
            **changes,
        )
        if self._view.state.finished and self.spec.input_ids:
            self.spec = replace(self.spec, input_ids=())  # nobody asks for them again; the body's hash stays
        self._changed.notify_all()
        if self._on_change is not None:
            self._on_change(self)


class LoopWake:
    """Carries changes of generations to one event loop through one eventfd, however many of each there are.

    Create it on the loop, give `notify` to the engine as `on_change`, close it on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._changed: set[Generation] = set()
        self._closed = False
        loop.add_reader(self._fd, self._drain)

    def notify(self, generation: Generation) -> None:
        """Any thread."""
        with self._lock:
            if self._closed:
                return
            first = not self._changed
            self._changed.add(generation)
            if first:
                os.eventfd_write(self._fd, 1)

    def _drain(self) -> None:
        with self._lock:
            os.eventfd_read(self._fd)
            changed, self._changed = self._changed, set()
        for generation in changed:
            generation.release_waiters()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
