"""Every family against transformers on CPU: the forward pass in f32, and the int4 arithmetic on the exported weights.

The f32 container proves the forward pass. The int4 container proves the kernels: `export` writes what its weights mean,
transformers runs those in f32, and what differs is only how activations and KV are rounded.
"""

from collections.abc import Callable

import numpy as np
import pytest

from colibri.core.container import open_container
from colibri.packer.export import export
from colibri.packer.progress import Silent
from testkit.checkpoints import TINY_FAMILIES
from testkit.models import F32, Tiny, make_tiny, opened, packed, prefill, reference_logits, some_tokens
from testkit.oracle import check_argmax, greedy_by, greedy_by_core, reference_model, relative_errors

POSITIONS = 64
NEW_TOKENS = 32
TOKENS = some_tokens(POSITIONS)
I16_ERROR = 0.003  # the default activation format; measured 0.0007 at most
I8_MEDIAN_ERROR = 0.04  # measured 0.018 (olmoe) to 0.035 (mixtral)

Make = Callable[[str], Tiny]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Tiny] = {}

    def make(family: str) -> Tiny:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="module")
def int4(exact: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The same checkpoint as int4 and int8; `checkpoint` is its export."""
    made: dict[str, Tiny] = {}

    def make(family: str) -> Tiny:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"{family}-int4")
            tiny = packed(exact(family).checkpoint, folder / "container", "")
            with open_container(tiny.folders[0], tiny.folders[1:]) as container:
                export(container, folder / "export", Silent())
            made[family] = Tiny(folder / "export", tiny.folders)
        return made[family]

    return make


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_f32_logits_are_within_a_ten_thousandth_of_their_range(exact: Make, family: str) -> None:
    expected = reference_logits(exact(family), TOKENS)
    with opened(exact(family), kv_dtype="f32") as model:
        logits = prefill(model, model.sequence(), TOKENS)
    assert len(logits) == POSITIONS
    assert np.abs(logits - expected).max() <= 1e-4 * (expected.max() - expected.min())
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_f32_greedy_tokens_are_those_of_transformers(exact: Make, family: str) -> None:
    prompt = TOKENS[:9]
    tokens = greedy_by_core(exact(family), prompt, NEW_TOKENS, kv_dtype="f32")
    assert tokens == greedy_by(reference_model(exact(family).checkpoint), prompt, NEW_TOKENS)


def int4_logits(tiny: Tiny, activation: str) -> F32:
    with opened(tiny, activation=activation, kv_dtype="f16") as model:
        return prefill(model, model.sequence(), TOKENS)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_int4_logits_are_those_of_the_exported_weights(int4: Make, family: str) -> None:
    expected = reference_logits(int4(family), TOKENS)
    logits = int4_logits(int4(family), "i16")
    assert relative_errors(logits, expected).max() <= I16_ERROR
    check_argmax(logits, expected)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_int8_activations_stay_near_the_exported_weights(int4: Make, family: str) -> None:
    """Half of the positions, because in random models the noise of int8 now and then tips a router's choice."""
    expected = reference_logits(int4(family), TOKENS)
    assert np.median(relative_errors(int4_logits(int4(family), "i8"), expected)) <= I8_MEDIAN_ERROR
