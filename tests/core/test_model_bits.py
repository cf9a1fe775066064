"""Placement only ever decides speed: the logits are the same bytes however the work was cut, shared or interrupted."""

from collections.abc import Iterator

import numpy as np
import pytest

from colibri.core.core import Model, Row
from testkit.models import F32, GREEDY, Tiny, decode, opened, prefill, same_bits, some_tokens, step_rows

TOKENS = some_tokens(75)
ALL_EXPERTS = 2 * 8  # tiny_int4: two MoE layers of eight


@pytest.fixture(scope="module")
def expected(tiny_int4: Tiny) -> F32:
    with opened(tiny_int4, expert_slots=ALL_EXPERTS, threads=1, isa="generic") as model:
        return prefill(model, model.sequence(), TOKENS)


@pytest.fixture
def model(tiny_int4: Tiny) -> Iterator[Model]:
    with opened(tiny_int4, expert_slots=2, ring_slots=2) as opened_model:
        yield opened_model


@pytest.mark.parametrize("slots", [1, ALL_EXPERTS // 2, ALL_EXPERTS])
@pytest.mark.parametrize("threads", [1, 2])
def test_slots_and_threads_do_not_matter(tiny_int4: Tiny, expected: F32, slots: int, threads: int) -> None:
    with opened(tiny_int4, expert_slots=slots, ring_slots=2, threads=threads) as model:
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)
        assert same_bits(decode(model, model.sequence(), TOKENS), expected)
        stats = model.stats()
        assert stats.threads == threads
        if slots < ALL_EXPERTS:
            assert stats.expert_evictions > 0
            assert stats.expert_loads > ALL_EXPERTS
        else:
            assert stats.expert_evictions == 0
            assert stats.expert_loads <= ALL_EXPERTS


@pytest.mark.parametrize("cut", [1, 7, 64])
def test_where_the_prompt_is_cut_does_not_matter(model: Model, expected: F32, cut: int) -> None:
    assert same_bits(prefill(model, model.sequence(), TOKENS, cut), expected)


@pytest.mark.parametrize("isa", ["generic", "auto"])
def test_the_instruction_set_does_not_matter(tiny_int4: Tiny, expected: F32, isa: str) -> None:
    with opened(tiny_int4, isa=isa) as model:
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_how_files_are_read_does_not_matter(tiny_int4: Tiny, expected: F32, direct: str) -> None:
    with opened(tiny_int4, direct=direct, io_threads=1) as model:
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)
        if direct == "off":
            assert (model.stats().direct_active, model.stats().buffered_stripes) == (0, 2 ** len(tiny_int4.folders) - 1)


def test_company_does_not_matter(model: Model, expected: F32) -> None:
    seqs = [model.sequence() for _ in range(4)]
    starts = [0, 3, 20, 66]  # the rows stand at different positions, in different pages
    for seq, start in zip(seqs, starts, strict=True):
        if start:
            prefill(model, seq, TOKENS[:start])
    for offset in range(9):
        rows = [Row(seq, TOKENS[start + offset], GREEDY, True) for seq, start in zip(seqs, starts, strict=True)]
        for row, start in zip(step_rows(model, rows), starts, strict=True):
            assert row.logits is not None
            assert same_bits(row.logits, expected[start + offset])


def test_a_prefill_that_is_interrupted_after_every_item_ends_the_same(model: Model, expected: F32) -> None:
    assert same_bits(prefill(model, model.sequence(), TOKENS, budget_us=0), expected)


def test_decoding_between_the_items_of_two_prefills_changes_nothing(model: Model, expected: F32) -> None:
    other = model.sequence()
    cursors = [model.prefill(model.sequence(), TOKENS, GREEDY, all_logits=True) for _ in range(2)]
    steps = 0
    while not all(cursor.done for cursor in cursors):
        waiting = [cursor for cursor in cursors if not cursor.done]
        turn = [waiting[steps % len(waiting)]]  # one at a time: both hold slots of the ring while suspended
        row = Row(other, TOKENS[steps % 60], GREEDY, True)
        model.step([row], turn, 0)
        assert row.error is None
        assert all(cursor.error is None for cursor in cursors)
        if steps < 60:
            assert row.logits is not None
            assert same_bits(row.logits, expected[steps])
        steps += 1
        if other.length == 300:
            break
    assert steps > 8
    for cursor in cursors:
        assert cursor.logits is not None
        assert same_bits(cursor.logits, expected)


@pytest.mark.parametrize("at", [5, 64, 70])
def test_pages_taken_out_and_put_back_continue_with_the_same_bits(tiny_int4: Tiny, expected: F32, at: int) -> None:
    with opened(tiny_int4, expert_slots=1, ring_slots=2) as model:
        seq = model.sequence()
        prefill(model, seq, TOKENS[:at])
        pages = [seq.export_page(index) for index in range((at + 63) // 64)]
    with opened(tiny_int4, expert_slots=3) as model:
        seq = model.sequence()
        for index, page in enumerate(pages):
            seq.import_page(page, min(64, at - 64 * index))
        assert seq.length == at
        assert same_bits(prefill(model, seq, TOKENS[at:]), expected[at:])


def test_an_exported_page_is_zero_beyond_the_length(model: Model) -> None:
    seq = model.sequence()
    prefill(model, seq, TOKENS[:70])
    page = seq.export_page(1)
    for section in model.kv_layout():
        planes = np.frombuffer(page, np.float16, section.bytes // 2, section.offset).reshape(-1, 64, 12)
        assert planes[:, :6].any(axis=(1, 2)).all()
        assert not planes[:, 6:].any()


def test_counters_are_exact(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=3, max_rows=4) as model:
        seqs = [model.sequence() for _ in range(4)]
        hits = loads = read = 0
        for token in TOKENS[:10]:
            rows = [Row(seq, token + number, GREEDY) for number, seq in enumerate(seqs)]
            step_rows(model, rows)
            for row in rows:
                assert row.counts.hits + row.counts.loads == 2 * 3  # two MoE layers, top-3
            hits += sum(row.counts.hits for row in rows)
            loads += sum(row.counts.loads for row in rows)
            read += sum(row.counts.bytes for row in rows)
        stats = model.stats()
        assert (stats.expert_hits, stats.expert_loads, stats.expert_bytes) == (hits, loads, read)
        assert stats.decode_tokens == 40
        assert stats.steps == 10
        assert stats.heartbeat > 10 * 3
        cursor = model.prefill(model.sequence(), TOKENS, GREEDY)
        model.step([], [cursor])
        assert cursor.counts.hits + cursor.counts.loads <= ALL_EXPERTS  # each expert at most once for the whole pass
        assert model.stats().expert_loads == loads + cursor.counts.loads
        assert model.stats().prefill_tokens == len(TOKENS)


def test_an_expert_is_read_once_per_layer_and_step(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=1, ring_slots=2, max_rows=4) as model:
        rows = [Row(model.sequence(), TOKENS[0], GREEDY) for _ in range(4)]
        step_rows(model, rows)
        assert sum(row.counts.loads for row in rows) == 2 * 3  # four equal rows want the same experts
        assert rows[0].counts.loads == 2 * 3


def test_a_prompt_does_not_push_out_what_decoding_keeps(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=6, ring_slots=2) as model:
        (before,) = step_rows(model, [Row(model.sequence(), TOKENS[0], GREEDY)])
        assert before.counts.loads == 6
        prefill(model, model.sequence(), TOKENS)
        (after,) = step_rows(model, [Row(model.sequence(), TOKENS[0], GREEDY)])
        assert after.counts.loads == 0
        assert model.stats().expert_evictions == 0
