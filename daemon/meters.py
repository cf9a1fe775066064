"""Rates over the last seconds, and where an engine's time goes.

Owns a few counters that the engine thread feeds and any thread reads. Nothing here grows with uptime.
"""

from __future__ import annotations

import time
from collections import deque

from colibri.daemon.model_port import Counts


class Rate:
    """Events per second over the last `window` seconds, in buckets of one second."""

    def __init__(self, window: int = 10) -> None:
        self._window = window
        self._buckets: deque[tuple[int, int]] = deque(maxlen=window + 1)

    def add(self, count: int) -> None:
        second = int(time.monotonic())
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1] = (second, self._buckets[-1][1] + count)
        else:
            self._buckets.append((second, count))

    def per_second(self) -> float:
        now = time.monotonic()
        recent = [(second, count) for second, count in list(self._buckets) if second > now - self._window]
        if not recent:
            return 0.0
        return sum(count for _, count in recent) / max(1.0, now - recent[0][0])


class StepClock:
    """Time inside the core's steps and between them, while something decodes: what Python costs per token."""

    def __init__(self) -> None:
        self.core_ns = 0
        self.between_ns = 0
        self.steps = 0
        self._started = 0
        self._ended: int | None = None

    def begin(self, decoding: bool) -> None:
        self._started = time.monotonic_ns()
        if decoding and self._ended is not None:
            self.between_ns += self._started - self._ended

    def end(self, decoding: bool) -> None:
        now = time.monotonic_ns()
        self.steps += 1
        if decoding:
            self.core_ns += now - self._started
        self._ended = now if decoding else None

    def idle(self) -> None:
        """What follows is waiting for work, not a cost."""
        self._ended = None


class EngineCounters:
    """What an engine has done since it started."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.decode_rate, self.prefill_rate = Rate(), Rate()
        self.decode_tokens = self.prefill_tokens = 0
        self.expert_hits = self.expert_loads = self.expert_bytes = 0

    def token(self) -> None:
        self.decode_tokens += 1
        self.decode_rate.add(1)

    def prompt(self, positions: int) -> None:
        self.prefill_tokens += positions
        self.prefill_rate.add(positions)

    def experts(self, counts: Counts) -> None:
        self.expert_hits += counts.hits
        self.expert_loads += counts.loads
        self.expert_bytes += counts.bytes
