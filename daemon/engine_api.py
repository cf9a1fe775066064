"""What the service may ask of the engine and its sessions.

Owns the shapes that cross that border, no behaviour: Engine (engine.py) implements EngineApi. Everything here may be
called from any thread. Calls marked [disk] may read or write the state folder: from the event loop use
`asyncio.to_thread`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from colibri.daemon.generation import Generation, GenerationSpec


class SessionState(enum.IntEnum):
    """Numbers equal those of the contract's Session.State."""

    LIVE = 1
    STORED = 2
    TOKENS_ONLY = 3
    CORRUPT = 4
    DELETED = 5


@dataclass(frozen=True)
class SessionView:
    """One look at a session. Times are Unix seconds.

    `position`: committed tokens; `durable_position`: tokens in the log that survive a power cut; `kv_position`:
    positions whose KV is on disk. `degraded` says why KV (or the log) is not being stored any more, "" while all is
    well.
    CORRUPT: a part of the log failed its check; the readable prefix is kept, and the next turn must name its length in
    `expected_position`, which acknowledges the loss.
    """

    session: str  # the id, without "sessions/"
    display_name: str
    labels: Mapping[str, str]
    state: SessionState
    content_id: str
    numerics_id: str
    position: int
    durable_position: int
    kv_position: int
    context_limit: int
    disk_bytes: int
    etag: str
    create_time: float
    last_used_time: float
    active_generation: str  # "" when idle
    degraded: str


@dataclass(frozen=True)
class EngineStats:
    """Counters since start, but for the rates, which cover the last seconds.

    `core_ns` and `between_ns`: time inside the core's step and between two steps, while something was decoding.
    """

    queued: int
    running: int
    decode_tokens: int
    prefill_tokens: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    expert_hits: int
    expert_loads: int
    expert_bytes: int
    core_ns: int
    between_ns: int
    steps: int
    live_sequences: int
    kv_pages_used: int
    draining: bool
    degraded: tuple[str, ...]


class EngineApi(Protocol):
    def start(self) -> None:
        """Starts the engine thread; the model is loaded."""

    def submit(self, spec: GenerationSpec) -> Generation:
        """[disk] Queues a generation, or returns the one that this request_id started.

        Raises (daemon/errors.py): InvalidFieldError, TokenOutOfRangeError, ContextExceededError, QueueFullError,
        DrainingError, SessionNotFoundError, SessionBusyError, PositionMismatchError, ContentMismatchError,
        SessionCorruptError, DiskFullError, RequestIdReusedError. After any of them nothing has changed.
        """

    def find(self, request_id: str, session: str | None, body_hash: bytes) -> Generation | None:
        """[disk] The generation that this request has started, perhaps in an earlier life of the daemon. Raises
        RequestIdReusedError if it was another request."""

    def cancel(self, name: str) -> Generation:
        """Asks a generation to end within one work item; idempotent. Wait for the generation to be finished.
        Raises GenerationNotFoundError."""

    def get(self, name: str) -> Generation:
        """[disk] A live or retained generation, or one read back from its session's log.
        Raises GenerationNotFoundError."""

    def generations(self) -> list[Generation]:
        """Live and retained ones, oldest first."""

    def create_session(
        self,
        session: str | None = None,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> SessionView:
        """[disk] Makes an empty session; a fresh id if none is given. The same id or request_id with the same fields
        returns the existing one. Raises SessionExistsError, InvalidFieldError, DiskFullError."""

    def session(self, session: str) -> SessionView:
        """[disk] Raises SessionNotFoundError."""

    def sessions(self) -> list[SessionView]:
        """[disk] All, by id."""

    def session_tokens(self, session: str, first: int = 0, end: int | None = None) -> list[int]:
        """[disk] Committed tokens [first, end)."""

    def delete_session(self, session: str, etag: str = "", force: bool = False) -> None:
        """[disk] Removes log and KV. Busy sessions are refused (SessionBusyError) unless `force`, which cancels first.
        Raises SessionNotFoundError, EtagMismatchError."""

    def stats(self) -> EngineStats: ...

    def between_steps(self, work: Callable[[], None]) -> None:
        """Runs `work` on the engine's thread while no step is under way, and waits for it; a step may take seconds.
        What it raises is raised here."""

    def drain(self, timeout: float | None = None) -> bool:
        """[disk] Refuses new work, stops every generation at its next token boundary (PAUSED), writes logs and tail
        pages, ends the engine thread; whether that was done within `timeout` seconds. Idempotent."""
