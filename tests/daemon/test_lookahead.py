"""What WatchStats says about lookahead: where the switch stands and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from colibri.daemon.lookahead import lookahead_message
from colibri.v1 import admin_service_pb2 as admin_pb2
from testkit.models import make_tiny, some_tokens
from testkit.process import serving, write_config
from testkit.watched import stats_of, until

Lookahead = admin_pb2.Lookahead


@dataclass(frozen=True)
class Counters:
    lookahead_predicted: int = 0
    lookahead_right: int = 0
    lookahead_loads: int = 0
    lookahead_bytes: int = 0
    lookahead_wasted_bytes: int = 0
    lookahead_late: int = 0
    lookahead_saved_us: int = 0
    lookahead_us: int = 0
    lookahead_active: int = 0
    lookahead_trying: int = 0


@pytest.mark.parametrize(
    ("switch", "active", "trying", "state"),
    [
        ("off", 0, 0, Lookahead.STATE_OFF),
        ("on", 1, 0, Lookahead.STATE_ON),
        ("auto", 0, 1, Lookahead.STATE_TRYING),
        ("auto", 1, 1, Lookahead.STATE_TRYING),
        ("auto", 1, 0, Lookahead.STATE_WINNING),
        ("auto", 0, 0, Lookahead.STATE_LOSING),
    ],
)
def test_the_state_tells_configuration_from_verdict(
    switch: str, active: int, trying: int, state: admin_pb2.Lookahead.State
) -> None:
    assert lookahead_message(switch, Counters(lookahead_active=active, lookahead_trying=trying)).state == state


def test_every_counter_is_passed_on_and_times_are_seconds() -> None:
    assert lookahead_message("on", Counters(8, 6, 5, 5000, 2000, 1, 2_500_000, 1_000, 1)) == Lookahead(
        state=Lookahead.STATE_ON,
        predicted=8,
        right=6,
        loads=5,
        read_bytes=5000,
        wasted_bytes=2000,
        late=1,
        saved_seconds=2.5,
        spent_seconds=0.001,
    )


def test_a_daemon_shows_what_its_lookahead_did(tmp_path: Path) -> None:
    tiny = make_tiny("qwen3_moe", tmp_path / "model")
    with serving(write_config(tmp_path / "on", tiny, max_context=256, expert_slots=6, lookahead="on")) as process:
        assert stats_of(process).lookahead == Lookahead(state=Lookahead.STATE_ON)
        answer = process.generate(some_tokens(10), max_tokens=30)
        stats = until(process, lambda stats: not stats.warming)
        shown = stats.lookahead
        assert stats.expert_read_bytes == sum(device.read_bytes for device in stats.devices), "every byte is told"
        assert stats.expert_demand_bytes == answer[-1].finished.usage.expert_bytes_read
        assert stats.expert_read_bytes >= stats.expert_demand_bytes + shown.read_bytes, "warm-up reads too"
        assert shown.predicted >= shown.right > 0
        assert shown.loads > 0
        assert shown.read_bytes >= shown.wasted_bytes
    with serving(write_config(tmp_path / "off", tiny, max_context=256, expert_slots=6, lookahead="off")) as process:
        process.generate(some_tokens(10), max_tokens=3)
        assert stats_of(process).lookahead == Lookahead(state=Lookahead.STATE_OFF)
    with serving(write_config(tmp_path / "auto", tiny, max_context=256, expert_slots=6)) as process:
        assert stats_of(process).lookahead == Lookahead(state=Lookahead.STATE_TRYING)
