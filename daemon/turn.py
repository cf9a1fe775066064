"""One generation on its way: what the engine thread knows of it between its admission and its end.

Owns the running state (sequence, cursor, the sampled token whose KV is still to come), the usage, and the two JSON
records that tell a session's log when a generation began and how it ended, so that it can be read back after a restart.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from colibri.daemon.errors import DaemonError, SessionCorruptError, error_of_reason
from colibri.daemon.generation import (
    FinishReason,
    Generation,
    GenerationSpec,
    GenerationState,
    SamplingSpec,
    Usage,
    evolve,
)
from colibri.daemon.model_port import Counts, PrefillPort, SequencePort
from colibri.daemon.sessions import Session
from colibri.daemon.store.pages import PageChain, PageName
from colibri.daemon.store.token_log import LoggedGeneration


@dataclass
class Turn:
    """`prompt`: every position of the prompt, the session's history included; `chain`: its page names. `limit`: tokens
    to produce at most, and `limit_reason` what reaching it is called. `restoring`: pages still to be imported.
    `pending`: the last sampled token, whose KV the next step computes. `kv_before`: positions of KV that were there
    before this turn added any."""

    generation: Generation
    spec: GenerationSpec
    session: Session | None
    prompt: list[int]
    chain: PageChain
    limit: int
    limit_reason: FinishReason
    sequence: SequencePort | None = None
    restoring: deque[PageName] = field(default_factory=deque)
    cursor: PrefillPort | None = None
    cursor_positions: int = 0
    kv_before: int = 0
    pending: int = -1
    produced: int = 0
    cancel_requested: bool = False
    stepping: bool = False
    usage: Usage = field(default_factory=Usage)
    created_ns: int = field(default_factory=time.monotonic_ns)
    admitted_ns: int = 0
    first_token_ns: int = 0

    @property
    def name(self) -> str:
        return self.generation.name

    @property
    def overdue(self) -> bool:
        limit = self.spec.max_duration
        return limit is not None and time.monotonic_ns() - self.created_ns >= limit * 1e9

    def count(self, counts: Counts) -> None:
        usage = self.usage
        self.usage = evolve(
            usage,
            expert_hits=usage.expert_hits + counts.hits,
            expert_loads=usage.expert_loads + counts.loads,
            expert_bytes_read=usage.expert_bytes_read + counts.bytes,
        )

    def admitted(self) -> None:
        self.admitted_ns = time.monotonic_ns()
        self.usage = evolve(self.usage, prompt_tokens=len(self.prompt), queue_ns=self.admitted_ns - self.created_ns)

    def ready(self, cached: int) -> None:
        """The KV of the first `cached` positions is there; the rest is to be computed."""
        self.kv_before = cached
        self.usage = evolve(self.usage, cached_prompt_tokens=cached)

    def close_cursor(self) -> None:
        """Gives the prefill's workspace back; without one nothing happens."""
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None

    def token(self) -> None:
        """One more was sampled; updates the times."""
        now = time.monotonic_ns()
        self.produced += 1
        if self.produced == 1:
            self.first_token_ns = now
            self.usage = evolve(
                self.usage,
                completion_tokens=1,
                prefill_ns=now - self.admitted_ns,
                time_to_first_token_ns=now - self.created_ns,
            )
        else:
            self.usage = evolve(self.usage, completion_tokens=self.produced, decode_ns=now - self.first_token_ns)

    @property
    def re_prefilled(self) -> bool:
        """Whether KV that the session had once is computed again. Its last token never had any: it was only sampled."""
        return self.session is not None and self.kv_before < self.history - 1

    @property
    def history(self) -> int:
        """Positions that the session had before this turn."""
        return len(self.prompt) - len(self.spec.input_ids)


def start_record(turn: Turn) -> dict[str, Any]:
    spec = turn.spec
    return {
        "generation": turn.name,
        "request_id": spec.request_id,
        "body_hash": spec.body_hash.hex(),
        "sampling": asdict(spec.sampling),
        "limit": turn.limit,
        "time": turn.generation.view().create_time,
    }


def end_record(
    turn: Turn, state: GenerationState, reason: FinishReason, stop_token: int | None, error: DaemonError | None
) -> dict[str, Any]:
    failure = None
    if error is not None:
        failure = {"reason": error.reason, "message": error.message, "metadata": error.metadata}
    return {
        "generation": turn.name,
        "state": int(state),
        "finish_reason": int(reason),
        "stop_token": stop_token,
        "stop_sequence": getattr(turn.spec.stop_check, "matched", None),
        "usage": asdict(turn.usage),
        "re_prefilled": turn.re_prefilled,
        "error": failure,
        "time": time.time(),
    }


def read_back(session: Session, logged: LoggedGeneration) -> Generation:
    """A generation out of its session's log; without an end record it is PAUSED: the daemon died while it ran.
    Raises SessionCorruptError if the records are not what this program writes."""
    try:
        return _read_back(session, logged)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SessionCorruptError(f"session {session.id}: a generation in its log makes no sense: {error!r}") from error


def _read_back(session: Session, logged: LoggedGeneration) -> Generation:
    start, end = logged.start, logged.end or {}
    spec = GenerationSpec(
        request_id=str(start["request_id"]),
        input_ids=(),
        sampling=SamplingSpec(**start["sampling"]),
        session=session.id,
        max_tokens=int(start["limit"]),
        body_hash=bytes.fromhex(start["body_hash"]),
    )
    generation = Generation(str(start["generation"]), spec, logged.first)
    failure = end.get("error")
    usage = Usage(prompt_tokens=logged.first, completion_tokens=logged.count)
    generation.restore(
        session.tokens[logged.first : logged.first + logged.count].tolist(),
        state=GenerationState(end.get("state", GenerationState.PAUSED)),
        finish_reason=FinishReason(end.get("finish_reason", FinishReason.UNSPECIFIED)),
        stop_token=end.get("stop_token"),
        stop_sequence=None if end.get("stop_sequence") is None else str(end["stop_sequence"]),
        usage=Usage(**end["usage"]) if end else usage,
        re_prefilled=bool(end.get("re_prefilled", False)),
        error=error_of_reason(failure["reason"], failure["message"], failure["metadata"]) if failure else None,
        durable_offset=logged.count,
        prompt_tokens_done=logged.first,
        create_time=float(start["time"]),
    )
    return generation
