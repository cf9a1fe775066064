"""What the model's lookahead does and what came of it, as WatchStats shows it.

Owns the words for where the switch stands: the configuration's `lookahead` and, with auto, the core's own verdict.
"""

from __future__ import annotations

from typing import Protocol

from colibri.v1 import admin_service_pb2 as admin_pb2

_Lookahead = admin_pb2.Lookahead


class LookaheadCounters(Protocol):
    """The fields of colibri.core's ModelStats that are shown; times in microseconds, counts since the start."""

    @property
    def lookahead_predicted(self) -> int: ...
    @property
    def lookahead_right(self) -> int: ...
    @property
    def lookahead_loads(self) -> int: ...
    @property
    def lookahead_bytes(self) -> int: ...
    @property
    def lookahead_wasted_bytes(self) -> int: ...
    @property
    def lookahead_late(self) -> int: ...
    @property
    def lookahead_saved_us(self) -> int: ...
    @property
    def lookahead_us(self) -> int: ...
    @property
    def lookahead_active(self) -> int: ...
    @property
    def lookahead_trying(self) -> int: ...


def state_of(switch: str, counters: LookaheadCounters) -> admin_pb2.Lookahead.State:
    """`switch`: on, off or auto, as configured."""
    if switch != "auto":
        return _Lookahead.STATE_ON if switch == "on" else _Lookahead.STATE_OFF
    if counters.lookahead_trying:
        return _Lookahead.STATE_TRYING
    return _Lookahead.STATE_WINNING if counters.lookahead_active else _Lookahead.STATE_LOSING


def lookahead_message(switch: str, counters: LookaheadCounters) -> admin_pb2.Lookahead:
    """`switch`: on, off or auto, as configured."""
    return _Lookahead(
        state=state_of(switch, counters),
        predicted=counters.lookahead_predicted,
        right=counters.lookahead_right,
        loads=counters.lookahead_loads,
        read_bytes=counters.lookahead_bytes,
        wasted_bytes=counters.lookahead_wasted_bytes,
        late=counters.lookahead_late,
        saved_seconds=counters.lookahead_saved_us / 1e6,
        spent_seconds=counters.lookahead_us / 1e6,
    )
