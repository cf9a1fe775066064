"""Items of a step that end otherwise than well, and calls that are refused: each says why and leaves the rest alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from colibri.core.core import Model, Row, Sampling
from colibri.core.errors import CancelledError, CoreError, FullError, InvalidError
from testkit.models import GREEDY, Tiny, decode, opened, prefill, run, same_bits, some_tokens, step_rows

TOKENS = some_tokens(75)


@pytest.fixture
def model(tiny_int4: Tiny) -> Iterator[Model]:
    with opened(tiny_int4, expert_slots=2, ring_slots=2, kv_pages=6) as opened_model:
        yield opened_model


@contextmanager
def leaves_no_trace(model: Model) -> Iterator[None]:
    """Pages and workspaces that were free before are free afterwards."""
    before = model.stats()
    yield
    after = model.stats()
    assert (after.kv_pages_free, after.prefills_free) == (before.kv_pages_free, before.prefills_free)


def error_of(model: Model, row: Row) -> CoreError:
    model.step([row], [])
    assert row.error is not None
    assert row.next_token == -1
    assert row.logits is None
    return row.error


def test_a_cancelled_row_fails_alone_and_the_next_one_runs(model: Model) -> None:
    seq, other = model.sequence(), model.sequence()
    prefill(model, seq, TOKENS[:64])
    expected = decode(model, model.sequence(), TOKENS[:1])[0]
    with leaves_no_trace(model):
        seq.cancel()
        rows = [Row(seq, TOKENS[64], GREEDY, True), Row(other, TOKENS[0], GREEDY, True)]
        model.step(rows, [])
        other.close()
    assert isinstance(rows[0].error, CancelledError)
    assert rows[1].error is None
    assert rows[1].logits is not None
    assert same_bits(rows[1].logits, expected)
    assert seq.length == 64
    step_rows(model, [Row(seq, TOKENS[64], GREEDY)])
    assert seq.length == 65


@pytest.mark.parametrize("items", [0, 1, 5, 20])
def test_a_cancelled_prefill_leaves_its_sequence_as_it_was(model: Model, items: int) -> None:
    seq = model.sequence()
    expected = prefill(model, seq, TOKENS[:10])
    with leaves_no_trace(model):
        cursor = model.prefill(seq, TOKENS[10:], GREEDY)
        for _ in range(items):
            model.step([], [cursor], 0)
        assert not cursor.done
        seq.cancel()
        model.step([], [cursor], 0)
        assert isinstance(cursor.error, CancelledError)
        cursor.close()
        assert seq.length == 10
    assert same_bits(prefill(model, model.sequence(), TOKENS[:10]), expected)
    run(model, model.prefill(seq, TOKENS[10:], GREEDY))
    assert seq.length == len(TOKENS)


def test_a_prefill_may_be_closed_at_any_time(model: Model) -> None:
    for items in range(12):
        with leaves_no_trace(model):
            seq = model.sequence()
            cursor = model.prefill(seq, TOKENS, GREEDY)
            for _ in range(items):
                model.step([], [cursor], 0)
            seq.close()
            with pytest.raises(InvalidError, match="prefill is closed"):
                model.step([], [cursor])


def test_a_finished_or_failed_prefill_does_not_run_again(model: Model) -> None:
    cursor = model.prefill(model.sequence(), TOKENS, GREEDY)
    model.step([], [cursor])
    with pytest.raises(InvalidError, match="cursor 0: its prefill has already ended"):
        model.step([], [cursor])


def test_without_a_free_page_a_row_fails_alone(model: Model) -> None:
    seqs = [model.sequence() for _ in range(3)]
    for seq in seqs:
        prefill(model, seq, TOKENS[:64])
    hoarders = [model.sequence() for _ in range(2)]
    for seq in hoarders:
        prefill(model, seq, TOKENS[:1])
    assert model.stats().kv_pages_free == 1
    rows = [Row(seq, TOKENS[64], GREEDY) for seq in seqs]
    model.step(rows, [])
    assert rows[0].error is None
    for row in rows[1:]:
        assert isinstance(row.error, FullError)
        assert "0 of 6 are free" in str(row.error)
    assert [seq.length for seq in seqs] == [65, 64, 64]
    hoarders[0].close()
    step_rows(model, rows[1:2])


def test_without_enough_pages_a_prefill_is_refused_and_takes_none(model: Model) -> None:
    for _ in range(5):
        prefill(model, model.sequence(), TOKENS[:2])
    seq = model.sequence()
    with leaves_no_trace(model), pytest.raises(FullError, match="2 KV pages are needed for 75 positions, 1 of 6 are"):
        model.prefill(seq, TOKENS, GREEDY)
    prefill(model, seq, TOKENS[:64])


def test_without_a_free_workspace_a_prefill_is_refused(model: Model) -> None:
    cursors = [model.prefill(model.sequence(), TOKENS[:3], GREEDY) for _ in range(2)]
    with leaves_no_trace(model), pytest.raises(FullError, match="all 2 prefill workspaces are taken"):
        model.prefill(model.sequence(), TOKENS[:3], GREEDY)
    cursors[0].close()
    model.prefill(model.sequence(), TOKENS[:3], GREEDY)


def test_a_sequence_ends_at_max_context(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, max_context=70) as model:
        seq = model.sequence()
        prefill(model, seq, TOKENS[:70])
        error = error_of(model, Row(seq, TOKENS[70], GREEDY))
        assert isinstance(error, FullError)
        assert "max_context, 70" in str(error)
        with pytest.raises(FullError, match="max_context, 70"):
            model.prefill(seq, TOKENS[70:71], GREEDY)
        assert seq.length == 70


@pytest.mark.parametrize(
    ("token", "sampling", "words"),
    [
        (139, GREEDY, "token 139 is not in 0..138"),
        (-1, GREEDY, "token -1 is not in 0..138"),
        (5, Sampling(temperature=-1.0), "temperature is -1"),
        (5, Sampling(temperature=float("nan")), "temperature is nan"),
        (5, Sampling(temperature=1.0, top_p=0.0), "top_p is 0"),
        (5, Sampling(temperature=1.0, top_p=1.5), "top_p is 1.5"),
    ],
)
def test_a_row_with_bad_numbers_fails_alone(model: Model, token: int, sampling: Sampling, words: str) -> None:
    seq, other = model.sequence(), model.sequence()
    rows = [Row(seq, token, sampling), Row(other, 5, GREEDY)]
    with leaves_no_trace(model):
        model.step(rows, [])
        other.close()
    assert isinstance(rows[0].error, InvalidError)
    assert words in str(rows[0].error)
    assert seq.length == 0
    assert rows[1].error is None
    with pytest.raises(InvalidError, match=words if token == 5 else f"token 1 is {token}, not in 0..138"):
        model.prefill(seq, [5, token], sampling)


@pytest.mark.parametrize("tokens", [[], list(range(129))])
def test_a_pass_that_is_empty_or_too_long_is_refused(model: Model, tokens: list[int]) -> None:
    with pytest.raises(InvalidError, match=f"n is {len(tokens)}, a pass has 1..128 tokens"):
        model.prefill(model.sequence(), tokens, GREEDY)


def malformed_calls() -> dict[str, tuple[str, Callable[[Model, Model], object]]]:
    def twice(model: Model, _: Model) -> None:
        seq = model.sequence()
        model.step([Row(seq, 1, GREEDY), Row(seq, 2, GREEDY)], [])

    def foreign(model: Model, other: Model) -> None:
        model.step([Row(other.sequence(), 1, GREEDY)], [])

    def foreign_prefill(model: Model, other: Model) -> None:
        model.step([], [other.prefill(other.sequence(), [1], GREEDY)])

    def row_of_a_prefill(model: Model, _: Model) -> None:
        seq = model.sequence()
        model.prefill(seq, [1], GREEDY)
        model.step([Row(seq, 1, GREEDY)], [])

    def two_prefills(model: Model, _: Model) -> None:
        seq = model.sequence()
        model.prefill(seq, [1], GREEDY)
        model.prefill(seq, [1], GREEDY)

    def closed(model: Model, _: Model) -> None:
        seq = model.sequence()
        seq.close()
        model.step([Row(seq, 1, GREEDY)], [])

    return {
        "twice": ("row 1: its sequence is in this step twice", twice),
        "foreign": ("row 0: its sequence is not this model's", foreign),
        "foreign prefill": ("cursor 0: no prefill of this model", foreign_prefill),
        "row of a prefill": ("row 0: its sequence is used by a prefill", row_of_a_prefill),
        "two prefills": ("already used by a prefill", two_prefills),
        "closed": ("the sequence is closed", closed),
        "too many": ("5 rows are more than max_rows, 4", lambda m, _: m.step([Row(m.sequence(), 1, GREEDY)] * 5, [])),
    }


@pytest.mark.parametrize("name", malformed_calls())
def test_a_malformed_call_is_refused_and_runs_nothing(model: Model, tiny_int4: Tiny, name: str) -> None:
    words, call = malformed_calls()[name]
    with opened(tiny_int4) as other, pytest.raises(InvalidError, match=words):
        call(model, other)
    assert model.stats().steps == 0
    assert model.stats().kv_pages_free >= 5


def test_handles_refuse_use_after_the_model_is_closed(tiny_int4: Tiny) -> None:
    with opened(tiny_int4) as model:
        seq = model.sequence()
        cursor = model.prefill(seq, [1, 2], GREEDY)
    model.close()
    seq.close()
    cursor.close()
    seq.cancel()
    with pytest.raises(InvalidError, match="the model is closed"):
        model.step([], [])
    with pytest.raises(InvalidError, match="the model is closed"):
        model.stats()
    with pytest.raises(InvalidError, match="the sequence is closed"):
        _ = seq.length
    with pytest.raises(InvalidError, match="the sequence is closed"):
        seq.export_page(0)


@pytest.mark.parametrize(
    ("length", "positions", "size", "words"),
    [
        (0, 0, 0, "positions is 0, must be 1..64"),
        (0, 65, 0, "positions is 65, must be 1..64"),
        (3, 1, 0, "its last page is not full"),
        (0, 1, -1, "a page has"),
        (0, 1, 1, "a page has"),
    ],
)
def test_a_page_that_does_not_fit_is_refused(model: Model, length: int, positions: int, size: int, words: str) -> None:
    seq = model.sequence()
    if length:
        prefill(model, seq, TOKENS[:length])
    with leaves_no_trace(model), pytest.raises(InvalidError, match=words):
        seq.import_page(bytes(model.kv_page_bytes + size), positions)
    assert seq.length == length


def test_a_page_that_is_not_there_is_not_exported(model: Model) -> None:
    seq = model.sequence()
    prefill(model, seq, TOKENS[:64])
    for index in (-1, 1, 1000):
        with pytest.raises(InvalidError, match=f"page {index}"):
            seq.export_page(index)
