"""The events of a generation, and the numbers that explain its speed. Plain values over the protocol's messages."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from colibri.v1 import types_pb2


@dataclass(frozen=True)
class Started:
    """Always first: the generation's name, seed, position and effective sampling."""

    generation: types_pb2.Generation
    next_offset: int
    durable_offset: int


@dataclass(frozen=True)
class Progress:
    """How far queue and prefill are; also the heartbeat."""

    state: types_pb2.Generation.State
    queue_position: int
    prompt_tokens_done: int
    prompt_tokens_total: int
    eta_seconds: float | None
    tokens_per_second: float
    next_offset: int
    durable_offset: int


@dataclass(frozen=True)
class Delta:
    """New tokens, from token `offset` on, and the text that became complete with them (it can lag behind)."""

    text: str
    offset: int
    token_count: int
    token_ids: tuple[int, ...]
    reasoning_text: str
    next_offset: int
    durable_offset: int


@dataclass(frozen=True)
class PromptTokens:
    """The ids that the prompt became."""

    ids: tuple[int, ...]
    next_offset: int
    durable_offset: int


@dataclass(frozen=True)
class Finished:
    """Always last: finish reason, usage, error."""

    generation: types_pb2.Generation
    next_offset: int
    durable_offset: int

    @property
    def finish_reason(self) -> str:
        """The reason's name without its prefix: "EOS", "MAX_TOKENS", "CANCELLED" ..."""
        return types_pb2.FinishReason.Name(self.generation.finish_reason).removeprefix("FINISH_REASON_")

    @property
    def statistics(self) -> Statistics:
        return Statistics.of(self.generation.usage)


Event = Started | Progress | Delta | PromptTokens | Finished


def read_event(message: types_pb2.GenerateEvent) -> Event | None:
    """The typed event, or None for a kind that this client does not know (a newer daemon may add kinds)."""
    kind = message.WhichOneof("event")
    at = (message.next_offset, message.durable_offset)
    if kind == "started":
        return Started(message.started, *at)
    if kind == "finished":
        return Finished(message.finished, *at)
    if kind == "prompt_tokens":
        return PromptTokens(tuple(message.prompt_tokens.ids), *at)
    if kind == "delta":
        delta = message.delta
        return Delta(delta.text, delta.offset, delta.token_count, tuple(delta.token_ids), delta.reasoning_text, *at)
    if kind == "progress":
        progress = message.progress
        return Progress(
            progress.state,
            progress.queue_position,
            progress.prompt_tokens_done,
            progress.prompt_tokens_total,
            seconds(progress.eta) if progress.HasField("eta") else None,
            progress.tokens_per_second,
            *at,
        )
    return None


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


@dataclass(frozen=True)
class Statistics:
    """What an answer cost. Rates are tokens per second, None where there is nothing to divide.

    `prefill_rate`: the prompt tokens that were computed (not reused) over the prefill time. `decode_rate`: every token
    but the first, which prefill yields, over the decode time. `expert_hits` of `expert_uses` came from memory.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    prefill_rate: float | None
    decode_rate: float | None
    expert_hits: int
    expert_uses: int
    bytes_read: int

    @classmethod
    def of(cls, usage: types_pb2.Usage) -> Statistics:
        computed = usage.prompt_tokens - usage.cached_prompt_tokens
        return cls(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prefill_rate=_rate(computed, seconds(usage.prefill_time)),
            decode_rate=_rate(usage.completion_tokens - 1, seconds(usage.decode_time)),
            expert_hits=usage.expert_hits,
            expert_uses=usage.expert_hits + usage.expert_loads,
            bytes_read=usage.expert_bytes_read,
        )

    def line(self) -> str:
        """One line for people."""
        hits = f"{self.expert_hits}/{self.expert_uses}"
        if self.expert_uses:
            hits += f" ({100 * self.expert_hits / self.expert_uses:.1f} %)"
        return (
            f"prompt {self.prompt_tokens} tokens ({self.cached_prompt_tokens} cached), "
            f"prefill {_show(self.prefill_rate)} | {self.completion_tokens} tokens, decode {_show(self.decode_rate)}"
            f" | expert hits {hits}, {show_bytes(self.bytes_read)} read on demand"
        )


def _rate(count: int, elapsed: float) -> float | None:
    return count / elapsed if count > 0 and elapsed > 0 else None


def _show(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f} tok/s"


def show_bytes(count: int) -> str:
    """A number of bytes in binary units: "0 B", "1.5 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
