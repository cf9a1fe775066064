"""The memory budget: what fits where, as a table, before anything is allocated.

Adds what the core would allocate to what the daemon's own process uses, holds that against the budget, and turns what
is left into expert slots. Refuses what does not fit with the whole table, so that the reader sees which line to shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from colibri.daemon.config import Config
from colibri.daemon.machine import Limit
from colibri.daemon.model_port import PAGE_POSITIONS

REQUEST_BYTES = 64 << 20  # requests in flight, streams, thread stacks: what the process may still grow by
# Of an automatic budget, the share and the bytes that stay for everybody else on the machine.
_AUTO_SHARE, _AUTO_BYTES = 16, 64 << 20


class PlanError(ValueError):
    """The configuration does not fit the model or the machine. `table` is the whole plan, None where there is none; the
    text has the table, `message` only the last line."""

    def __init__(self, message: str, table: MemoryTable | None = None) -> None:
        super().__init__(f"{table.text()}\n{message}" if table else message)
        self.message = message
        self.table = table


class CoreBytes(Protocol):
    """The fields of colibri.core's MemoryPlan that the table shows."""

    @property
    def dense_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots_bytes(self) -> int: ...
    @property
    def ring_bytes(self) -> int: ...
    @property
    def prefill_bytes(self) -> int: ...
    @property
    def buffers_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


@dataclass(frozen=True)
class Sizes:
    """What the configuration's lengths become for this model."""

    max_context: int
    kv_pages: int
    pass_tokens: int

    @property
    def kv_positions(self) -> int:
        return self.kv_pages * PAGE_POSITIONS


def resolve_sizes(config: Config, max_positions: int) -> Sizes:
    """Fills in what "0" stands for. Raises PlanError for lengths that contradict each other or the model."""
    context = config.max_context or max_positions
    if context > max_positions and config.max_context != Config.max_context:
        raise PlanError(f"max_context {context}: this model has at most {max_positions} positions")
    context = min(context, max_positions)
    tokens = config.kv_tokens or 2 * context
    if tokens < context:
        raise PlanError(f"kv_tokens {tokens} is less than max_context {context}: one full context must fit")
    return Sizes(context, -(-tokens // PAGE_POSITIONS), min(config.pass_tokens, context))


def ring_for(expert_slots: int) -> int:
    """Read buffers beside so many expert slots: enough to keep drives busy, and of a small budget not too much."""
    return min(max(expert_slots // 3, 2), 8)


def ring_slots(config: Config, expert_slots: int) -> int:
    return config.ring_slots or ring_for(expert_slots)


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class MemoryTable:
    """The plan. `expert_slots` of `experts` records stay in memory."""

    rows: tuple[Row, ...]
    budget: Limit
    expert_slots: int
    experts: int

    @property
    def planned(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def left(self) -> int:
        return self.budget.bytes - self.planned

    def text(self) -> str:
        lines = [*self.rows, Row("planned", self.planned, ""), Row("budget", self.budget.bytes, self.budget.source)]
        lines.append(Row("left", self.left, "") if self.left >= 0 else Row("missing", -self.left, ""))
        width = max(len(row.name) for row in lines)
        return "\n".join(f"{row.name:<{width}}  {mib(row.bytes):>14}  {row.note}".rstrip() for row in lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": [{"name": row.name, "bytes": row.bytes, "note": row.note} for row in self.rows],
            "planned_bytes": self.planned,
            "budget_bytes": self.budget.bytes,
            "budget_source": self.budget.source,
            "left_bytes": self.left,
            "fits": self.left >= 0,
            "expert_slots": self.expert_slots,
            "experts": self.experts,
        }


def mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


def choose_budget(config: Config, available: Limit, process_bytes: int) -> Limit:
    """The bytes that the whole daemon may use. `process_bytes`, which this process holds by now, are not free any more
    but are part of the budget. Raises PlanError for a budget that the machine or the cgroup does not have."""
    reachable = available.bytes + process_bytes
    if config.memory is None:
        return Limit(max(0, reachable - reachable // _AUTO_SHARE - _AUTO_BYTES), f"auto, from {available.source}")
    if config.memory > reachable:
        raise PlanError(
            f"memory = {mib(config.memory)} is more than the {mib(reachable)} that are available ({available.source})"
        )
    return Limit(config.memory, "key memory")


def make_table(
    config: Config, sizes: Sizes, experts: int, estimate: Callable[[int], CoreBytes], available: Limit, process: int
) -> MemoryTable:
    """Plans the memory. `estimate` gives the core's bytes for a number of expert slots; `process` are the anonymous
    bytes of this process by now. Raises PlanError with the table if one slot, or the wanted number, is too much."""
    if config.expert_slots > experts:
        raise PlanError(f"expert_slots {config.expert_slots}: this container has {experts} experts in all")
    budget = choose_budget(config, available, process)
    slots = config.expert_slots or _slots_that_fit(experts, estimate, budget.bytes - process - REQUEST_BYTES)
    table = MemoryTable(_rows(config, sizes, slots, experts, estimate(slots), process), budget, slots, experts)
    if table.left < 0:
        slots_note = "" if config.expert_slots else " even with one expert slot"
        raise PlanError(
            f"this does not fit{slots_note}: {mib(table.planned)} planned, {mib(budget.bytes)} allowed "
            f"({budget.source}); shrink kv_tokens, pass_tokens or expert_slots, or raise memory",
            table,
        )
    return table


def _slots_that_fit(experts: int, estimate: Callable[[int], CoreBytes], room: int) -> int:
    """The largest number of slots whose plan fits `room`, from 1 to all experts; 1 if none does."""
    low, high = 1, max(1, experts)
    while low < high:
        middle = (low + high + 1) // 2
        if estimate(middle).total_bytes <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _rows(config: Config, sizes: Sizes, slots: int, experts: int, core: CoreBytes, process: int) -> tuple[Row, ...]:
    named = core.dense_bytes + core.kv_bytes + core.slots_bytes + core.ring_bytes + core.prefill_bytes
    return (
        Row("dense weights", core.dense_bytes, "resident"),
        Row(
            "keys and values",
            core.kv_bytes,
            f"{sizes.kv_positions} positions in {sizes.kv_pages} pages, {config.kv_dtype}; context {sizes.max_context}",
        ),
        Row("expert slots", core.slots_bytes, f"{slots} of {experts} experts, {mib(core.slot_bytes)} each"),
        Row("read ring", core.ring_bytes, f"{ring_slots(config, slots)} buffers"),
        Row("prefill pass", core.prefill_bytes, f"{sizes.pass_tokens} tokens"),
        Row("buffers", core.total_bytes - named, f"{config.max_sequences} sequences"),
        Row("daemon process", process, "Python, gRPC, tokenizer: measured"),
        Row("requests", REQUEST_BYTES, "texts, streams and threads in flight"),
    )
