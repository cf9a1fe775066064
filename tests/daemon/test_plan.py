"""The memory plan: what fits, what is refused, and that the table adds up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from colibri.daemon.config import Address, Config
from colibri.daemon.machine import Limit
from colibri.daemon.plan import REQUEST_BYTES, MemoryTable, PlanError, make_table, resolve_sizes

MIB = 1 << 20
PROCESS = 100 * MIB
EXPERTS = 40


@dataclass(frozen=True)
class FakeBytes:
    """A core whose slots cost 10 MiB each, and 7 MiB of buffers beside what it names."""

    slots: int
    dense_bytes: int = 200 * MIB
    kv_bytes: int = 50 * MIB
    slot_bytes: int = 10 * MIB
    ring_bytes: int = 40 * MIB
    prefill_bytes: int = 20 * MIB
    buffers_bytes: int = 7 * MIB

    @property
    def slots_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return (
            self.dense_bytes
            + self.kv_bytes
            + self.slots_bytes
            + self.ring_bytes
            + self.prefill_bytes
            + self.buffers_bytes
        )


FIXED = FakeBytes(0).total_bytes + PROCESS + REQUEST_BYTES


def config(**values: object) -> Config:
    base = Config(container=Path("/c"), listen=Address("unix:/s"), state=Path("/t"))
    return dataclasses.replace(base, **values)  # type: ignore[arg-type]


def table(available: int = 1 << 40, **values: object) -> MemoryTable:
    chosen = config(**values)
    return make_table(chosen, resolve_sizes(chosen, 4096), EXPERTS, FakeBytes, Limit(available, "a test"), PROCESS)


def test_all_experts_stay_if_they_fit() -> None:
    found = table()
    assert found.expert_slots == found.experts == EXPERTS
    assert found.left > 0


@pytest.mark.parametrize(("room", "slots"), [(10 * MIB, 1), (99 * MIB, 9), (100 * MIB, 10), (4000 * MIB, EXPERTS)])
def test_what_is_left_becomes_expert_slots(room: int, slots: int) -> None:
    assert table(memory=FIXED + room).expert_slots == slots


def test_the_table_adds_up_and_shows_every_part() -> None:
    found = table(memory=FIXED + 55 * MIB)
    assert found.planned == FIXED + 50 * MIB
    assert found.left == 5 * MIB
    lines = found.text().splitlines()
    parts = ["dense", "keys", "expert", "read", "prefill", "buffers", "daemon", "requests", "planned", "budget", "left"]
    assert [line.split()[0] for line in lines] == parts
    assert "5 of 40 experts, 10.0 MiB each" in found.text()
    assert sum(row["bytes"] for row in found.as_json()["rows"]) == found.as_json()["planned_bytes"]
    assert found.as_json()["fits"] is True


def test_what_does_not_fit_is_refused_with_the_table() -> None:
    with pytest.raises(PlanError, match="even with one expert slot") as refused:
        table(memory=FIXED + 9 * MIB)
    found = refused.value.table
    assert found is not None
    assert "missing                 1.0 MiB" in found.text()
    assert str(refused.value) == f"{found.text()}\n{refused.value.message}"
    assert (found.as_json()["fits"], found.as_json()["left_bytes"]) == (False, -MIB)


def test_a_wanted_number_of_slots_is_kept_or_refused() -> None:
    assert table(expert_slots=3).expert_slots == 3
    with pytest.raises(PlanError, match="this does not fit: "):
        table(memory=FIXED + 25 * MIB, expert_slots=3)
    with pytest.raises(PlanError, match="expert_slots 41: this container has 40 experts"):
        table(expert_slots=41)


def test_c18_a_budget_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match=r"memory = 1,024.0 MiB is more than the 256.0 MiB .*\(a test\)"):
        table(available=256 * MIB - PROCESS, memory=1 << 30)


def test_an_automatic_budget_leaves_something_for_others() -> None:
    found = table(available=1600 * MIB - PROCESS)
    assert found.budget.bytes == 1500 * MIB - 64 * MIB
    assert found.budget.source == "auto, from a test"
    assert found.left >= 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (4096, 128, 512)),
        ({"max_context": 0}, (4096, 128, 512)),
        ({"max_context": 100}, (100, 4, 100)),
        ({"max_context": 64, "kv_tokens": 65, "pass_tokens": 7}, (64, 2, 7)),
    ],
)
def test_lengths_follow_from_the_model(values: dict[str, int], expected: tuple[int, int, int]) -> None:
    sizes = resolve_sizes(config(**values), 4096)
    assert (sizes.max_context, sizes.kv_pages, sizes.pass_tokens) == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_context": 4097}, "max_context 4097: this model has at most 4096"),
        ({"max_context": 100, "kv_tokens": 99}, "kv_tokens 99 is less than max_context 100"),
    ],
)
def test_lengths_that_contradict_are_refused(values: dict[str, int], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        resolve_sizes(config(**values), 4096)
