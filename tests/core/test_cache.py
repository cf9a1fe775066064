"""What stays in memory: learned heat and its import, warm-up, and its half-life."""

import numpy as np
import numpy.typing as npt
import pytest

from colibri.core.core import Model, Row
from colibri.core.errors import InvalidError
from testkit.models import GREEDY, Tiny, decode, opened, some_tokens, step_rows

ALL_EXPERTS = 2 * 8  # tiny_int4: two MoE layers of eight
TOKENS = some_tokens(12)


def learned(model: Model) -> npt.NDArray[np.float32]:
    decode(model, model.sequence(), TOKENS)
    return model.export_heat()


def test_heat_is_the_part_of_the_steps_that_wanted_an_expert(tiny_int4: Tiny) -> None:
    with opened(tiny_int4) as model:
        heat = learned(model)
        uses = model.stats().expert_hits + model.stats().expert_loads
    assert heat.shape == (ALL_EXPERTS,)
    assert 0 <= heat.min() <= heat.max() <= 1
    # Twelve steps are short beside the half-life of 512: plain averages, but for the fading.
    assert heat.sum() == pytest.approx(uses / len(TOKENS), rel=0.01)


def test_heat_outlives_the_model(tiny_int4: Tiny) -> None:
    with opened(tiny_int4) as model:
        heat = learned(model)
    with opened(tiny_int4) as model:
        assert not model.export_heat().any()
        model.import_heat(heat)
        np.testing.assert_array_equal(model.export_heat(), heat)


@pytest.mark.parametrize(("value", "said"), [(-0.1, "-0.1"), (1.5, "1.5"), (float("nan"), "nan")])
def test_heat_that_is_no_probability_is_refused(tiny_int4: Tiny, value: float, said: str) -> None:
    with opened(tiny_int4) as model:
        heat = np.zeros(ALL_EXPERTS, np.float32)
        heat[5] = value
        with pytest.raises(InvalidError, match=f"heat 5 is {said}, must be 0..1"):
            model.import_heat(heat)
        assert not model.export_heat().any()
        with pytest.raises(InvalidError, match="heat of 15 experts, the model has 16"):
            model.import_heat(heat[1:])


def test_warm_up_reads_what_was_hot_and_then_nothing(tiny_int4: Tiny) -> None:
    with opened(tiny_int4) as model:
        heat = learned(model)
    hot = int((heat > 0).sum())
    assert 2 < hot < ALL_EXPERTS
    with opened(tiny_int4, expert_slots=hot + 1) as model:
        assert not model.warm(10**6)  # nothing is known
        assert model.stats().expert_bytes == 0
        model.import_heat(heat)
        while model.warm(1000):
            pass
        warm = model.stats()
        assert (warm.expert_loads, warm.expert_evictions) == (0, 0)
        assert warm.expert_bytes > 0
        decode(model, model.sequence(), TOKENS)
        assert (model.stats().expert_loads, model.stats().expert_bytes) == (0, warm.expert_bytes)


def test_warm_up_evicts_nothing_and_ends_with_one_cacheful(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, expert_slots=3, ring_slots=2) as model:
        decode(model, model.sequence(), TOKENS)
        before = model.stats()
        model.import_heat(np.ones(ALL_EXPERTS, np.float32))
        assert not model.warm(10**6)
        assert model.stats().expert_evictions == before.expert_evictions
        assert model.stats().expert_bytes == before.expert_bytes


def test_a_short_half_life_forgets(tiny_int4: Tiny) -> None:
    kept = {}
    for half_life in (1.0, 1e6):
        with opened(tiny_int4, heat_half_life=half_life) as model:
            seq = model.sequence()
            first = step_rows(model, [Row(seq, TOKENS[0], GREEDY)])[0]
            assert first.error is None
            old = model.export_heat() > 0
            for token in TOKENS[1:]:
                step_rows(model, [Row(seq, token, GREEDY)])
            kept[half_life] = float(model.export_heat()[old].sum())
    assert kept[1.0] != kept[1e6]
    with opened(tiny_int4, heat_half_life=1.0) as model:
        heat = learned(model)
    # The last step counts half, the one before a quarter: every value is a sum of distinct powers of two.
    steps = np.round(heat * (1 - 0.5 ** len(TOKENS)) * 2 ** len(TOKENS), 2)
    np.testing.assert_allclose(steps, np.round(steps))


@pytest.mark.parametrize("half_life", [-1.0, 0.5, 2e9, float("nan"), float("inf")])
def test_a_half_life_out_of_range_is_refused(tiny_int4: Tiny, half_life: float) -> None:
    text = r"option heat_half_life is -?[\w.+]+, must be 0, for the default, or 1..1e9"
    with pytest.raises(InvalidError, match=text), opened(tiny_int4, heat_half_life=half_life):
        pass
