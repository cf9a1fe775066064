"""The forward pass against transformers, and against itself: every family, prefill and decode."""

from collections.abc import Callable

import numpy as np
import pytest

from colibri.core.core import Row, Sampling
from testkit.checkpoints import TINY_FAMILIES
from testkit.models import (
    GREEDY,
    Tiny,
    decode,
    opened,
    prefill,
    reference_logits,
    run,
    same_bits,
    some_tokens,
    step_rows,
)

TOKENS = some_tokens(72)  # more than one KV page and one tile


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_equal_those_of_transformers(tiny_f32: Callable[[str], Tiny], family: str) -> None:
    tiny = tiny_f32(family)
    expected = reference_logits(tiny, TOKENS)
    with opened(tiny, kv_dtype="f32") as model:
        logits = prefill(model, model.sequence(), TOKENS)
    error = np.abs(logits - expected).max() / (expected.max() - expected.min())
    assert error < 1e-5
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_one_token_at_a_time_gives_the_bits_of_a_whole_pass(tiny_f32: Callable[[str], Tiny], family: str) -> None:
    with opened(tiny_f32(family)) as model:
        whole = prefill(model, model.sequence(), TOKENS)
        assert same_bits(decode(model, model.sequence(), TOKENS), whole)


def test_records_cut_over_two_drives_are_put_together(tiny_split: Tiny) -> None:
    expected = reference_logits(tiny_split, TOKENS)
    with opened(tiny_split, kv_dtype="f32", expert_slots=2) as model:
        logits = prefill(model, model.sequence(), TOKENS)
        stats = model.stats()
    assert np.abs(logits - expected).max() / (expected.max() - expected.min()) < 1e-5
    assert stats.expert_bytes == stats.expert_loads * sum_of_record_bytes(tiny_split)


def sum_of_record_bytes(tiny: Tiny) -> int:
    """Record bytes of the one size that all layers of tiny_split have."""
    from colibri.core.container import open_container

    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        (size,) = {layer.record_bytes for layer in container.manifest.expert_layers}
        assert all(container.extents_per_record(index) == 2 for index in range(len(container.manifest.expert_layers)))
    return size


@pytest.mark.parametrize("activation", ["i8", "i16"])
@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_quantised_weights_give_the_same_bits_both_ways(tiny_int4: Tiny, activation: str, kv_dtype: str) -> None:
    with opened(tiny_int4, activation=activation, kv_dtype=kv_dtype) as model:
        assert model.numerics_id == f"1/{activation}/{kv_dtype}/64"
        whole = prefill(model, model.sequence(), TOKENS)
        assert same_bits(decode(model, model.sequence(), TOKENS), whole)


def test_the_last_logits_choose_the_next_token(tiny_int4: Tiny) -> None:
    with opened(tiny_int4) as model:
        seq = model.sequence()
        cursor = run(model, model.prefill(seq, TOKENS, GREEDY, all_logits=True))
        assert cursor.logits is not None
        assert cursor.next_token == int(cursor.logits[-1].argmax())
        assert seq.length == len(TOKENS)
        (row,) = step_rows(model, [Row(seq, cursor.next_token, GREEDY, want_logits=True)])
        assert row.logits is not None
        assert row.next_token == int(row.logits.argmax())
        assert seq.length == len(TOKENS) + 1


def test_banned_tokens_are_never_chosen(tiny_int4: Tiny) -> None:
    with opened(tiny_int4) as model:
        best = run(model, model.prefill(model.sequence(), TOKENS, GREEDY)).next_token
    with opened(tiny_int4, banned_tokens=(best,)) as model:
        cursor = run(model, model.prefill(model.sequence(), TOKENS, GREEDY, all_logits=True))
        assert cursor.logits is not None
        assert cursor.next_token == int(np.argsort(-cursor.logits[-1], kind="stable")[1])


def test_what_is_drawn_depends_on_seed_and_position_only(tiny_int4: Tiny) -> None:
    warm = Sampling(temperature=1.5, seed=7)
    with opened(tiny_int4) as model:
        alone = run(model, model.prefill(model.sequence(), TOKENS, warm)).next_token
        seq = model.sequence()
        prefill(model, seq, TOKENS[:-1])
        (row,) = step_rows(model, [Row(seq, TOKENS[-1], warm)])
        assert row.next_token == alone
        others = set()
        for seed in range(20):
            seq = model.sequence()
            others.add(run(model, model.prefill(seq, TOKENS[:8], Sampling(temperature=1.5, seed=seed))).next_token)
            seq.close()
        assert len(others) > 3
