"""When experts are read: at most once per pass of a prompt, ahead of their use, and never at the cost of decoding."""

from collections.abc import Iterator
from typing import Literal

import pytest

from colibri.core.core import Model, Row
from testkit.models import F32, GREEDY, Tiny, opened, prefill, run, same_bits, some_tokens, step_rows

TOKENS = some_tokens(75)
EXPERTS, LAYERS, TOP_K = 8, 2, 3  # tiny_int4: two MoE layers of eight, after a dense one
ALL_EXPERTS = EXPERTS * LAYERS


@pytest.fixture(scope="module")
def expected(tiny_int4: Tiny) -> F32:
    with opened(tiny_int4, expert_slots=ALL_EXPERTS, threads=1, isa="generic") as model:
        return prefill(model, model.sequence(), TOKENS)


@pytest.fixture
def record_bytes(tiny_int4: Tiny) -> Iterator[int]:
    """Bytes of one expert's record, the same in both layers."""
    with opened(tiny_int4) as model:
        (row,) = step_rows(model, [Row(model.sequence(), TOKENS[0], GREEDY)])
        assert row.counts.bytes % row.counts.loads == 0
        yield row.counts.bytes // row.counts.loads


@pytest.mark.parametrize("ring", [2, 3, 20])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("cut", [75, 40, 7])
def test_a_prompt_reads_an_expert_at_most_once_per_pass(
    tiny_int4: Tiny, expected: F32, record_bytes: int, ring: int, slots: int, cut: int
) -> None:
    with opened(tiny_int4, expert_slots=slots, ring_slots=ring, max_prefills=1) as model:
        seq = model.sequence()
        for start in range(0, len(TOKENS), cut):
            before = model.stats()
            cursor = model.prefill(seq, TOKENS[start : start + cut], GREEDY, all_logits=True)
            run(model, cursor, budget_us=0)
            assert cursor.logits is not None
            assert same_bits(cursor.logits, expected[start : start + cut])
            after = model.stats()
            read = after.expert_bytes - before.expert_bytes
            wasted = after.prefill_wasted_bytes - before.prefill_wasted_bytes
            assert read == cursor.counts.bytes + wasted
            assert read <= ALL_EXPERTS * record_bytes
            assert after.expert_loads - before.expert_loads == cursor.counts.loads


@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("prefills", [1, 2, 3])
@pytest.mark.parametrize("lookahead", ["on", "off"])
def test_decoding_in_between_does_not_make_a_prompt_read_twice(
    tiny_int4: Tiny, expected: F32, ring: int, slots: int, prefills: int, lookahead: Literal["on", "off"]
) -> None:
    """Every item is a step of its own, with rows that want all slots, and the cursors take turns."""
    changes = {"expert_slots": slots, "ring_slots": ring, "max_prefills": prefills, "lookahead": lookahead}
    with opened(tiny_int4, kv_pages=40, **changes) as model:
        cursors = [model.prefill(model.sequence(), TOKENS, GREEDY, all_logits=True) for _ in range(prefills)]
        others = [model.sequence() for _ in range(3)]
        decoded = steps = 0
        while waiting := [cursor for cursor in cursors if not cursor.done]:
            if others[0].length == len(TOKENS):
                others = [model.sequence() for _ in others]
            rows = [Row(seq, TOKENS[seq.length], GREEDY, True) for seq in others]
            model.step(rows, [waiting[steps % len(waiting)]], 0)
            assert not any(row.error for row in rows)
            assert not any(cursor.error for cursor in cursors)
            decoded += sum(row.counts.bytes for row in rows)
            steps += 1
        stats = model.stats()
        for cursor in cursors:
            assert cursor.logits is not None
            assert same_bits(cursor.logits, expected)
            assert cursor.counts.hits + cursor.counts.loads == ALL_EXPERTS  # 75 tokens want every expert
        assert stats.prefill_wasted_bytes == 0
        counted = decoded + sum(cursor.counts.bytes for cursor in cursors)
        assert counted <= stats.expert_bytes <= counted + stats.lookahead_bytes


def test_a_short_pass_reads_nothing_before_the_router_has_chosen(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=1, ring_slots=8, max_prefills=1) as model:
        cursor = run(model, model.prefill(model.sequence(), TOKENS[:1], GREEDY))
        assert cursor.counts.loads == LAYERS * TOP_K
        assert model.stats().expert_bytes == cursor.counts.bytes


def test_a_long_pass_reads_while_the_first_layer_still_runs(tiny_int4: Tiny, record_bytes: int) -> None:
    with opened(tiny_int4, expert_slots=1, ring_slots=5, max_prefills=1) as model:
        cursor = model.prefill(model.sequence(), TOKENS, GREEDY)
        model.step([], [cursor], 0)  # a tile of attention in a dense layer
        cursor.close()
        stats = model.stats()
        assert stats.expert_loads == 0
        assert stats.prefill_wasted_bytes == 4 * record_bytes  # closed before anybody wanted them


def _loads(model: Model, steps: int) -> list[int]:
    """Experts read in each of `steps` decode steps of a fresh sequence."""
    seq = model.sequence()
    loads = [step_rows(model, [Row(seq, TOKENS[n % 5], GREEDY)])[0].counts.loads for n in range(steps)]
    seq.close()
    return loads


@pytest.mark.parametrize("budget", [None, 0])
def test_a_long_prompt_leaves_the_hot_set_alone(tiny_int4: Tiny, budget: int | None) -> None:
    """It has the ring; what decoding must read more than without it is at most what the ring held."""
    after, ring = {}, 3
    for with_prompt in (False, True):
        with opened(tiny_int4, expert_slots=6, ring_slots=ring, max_prefills=1, lookahead="off") as model:
            before, evicted = _loads(model, 80), model.stats().expert_evictions
            assert 0 < sum(before) < 80 * LAYERS * TOP_K
            assert evicted > 0
            if with_prompt:
                prefill(model, model.sequence(), TOKENS, budget_us=budget)
                assert model.stats().expert_evictions == evicted
            after[with_prompt] = sum(_loads(model, 40))
    assert after[True] <= after[False] + ring


@pytest.mark.parametrize("slots", [1, 3, 8, ALL_EXPERTS])
@pytest.mark.parametrize("lookahead", ["on", "off", "auto"])
def test_lookahead_changes_no_bit_and_its_counters_fit_each_other(
    tiny_int4: Tiny, expected: F32, record_bytes: int, slots: int, lookahead: Literal["auto", "on", "off"]
) -> None:
    with opened(tiny_int4, expert_slots=slots, ring_slots=4, lookahead=lookahead) as model:
        assert model.stats().lookahead_active == (lookahead == "on"), "known before the first step"
        assert model.stats().lookahead_trying == (lookahead == "auto")
        seqs = [model.sequence() for _ in range(3)]
        loaded = 0
        for position, token in enumerate(TOKENS):
            rows = step_rows(model, [Row(seq, token, GREEDY, True) for seq in seqs])
            for row in rows:
                assert row.logits is not None
                assert same_bits(row.logits, expected[position])
            loaded += sum(row.counts.loads for row in rows)
        stats = model.stats()
        assert stats.lookahead_right <= stats.lookahead_predicted
        assert stats.lookahead_loads <= stats.lookahead_predicted
        assert stats.lookahead_bytes == stats.lookahead_loads * record_bytes
        assert stats.lookahead_wasted_bytes <= stats.lookahead_bytes
        assert stats.lookahead_late <= stats.lookahead_right
        assert stats.expert_loads == loaded
        assert stats.lookahead_active == (lookahead == "on")
        if lookahead == "on" and slots < ALL_EXPERTS:
            # Three equal rows; the second MoE layer is guessed, where not all of it is in memory.
            assert stats.lookahead_predicted == len(TOKENS) * TOP_K or slots >= EXPERTS
            assert 0 < stats.lookahead_predicted <= len(TOKENS) * TOP_K
            assert stats.lookahead_right > stats.lookahead_predicted / 2
            assert stats.lookahead_loads > 0
            assert stats.lookahead_us > 0
        if lookahead == "off":
            assert stats.lookahead_predicted == stats.lookahead_loads == stats.lookahead_us == 0


def test_lookahead_costs_nothing_while_everything_is_in_memory(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=ALL_EXPERTS, lookahead="on") as model:
        prefill(model, model.sequence(), TOKENS)  # reads all
        before = model.stats()
        _loads(model, 20)
        after = model.stats()
        assert (after.lookahead_predicted, after.lookahead_us) == (before.lookahead_predicted, before.lookahead_us)


def test_without_lookahead_a_prompt_waits_for_its_router(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=1, ring_slots=5, max_prefills=1, lookahead="off") as model:
        cursor = model.prefill(model.sequence(), TOKENS, GREEDY)
        model.step([], [cursor], 0)
        cursor.close()
        assert model.stats().expert_bytes == 0
