"""Tiny packed models that the tests of the core share; each is made once per run."""

from collections.abc import Callable
from typing import Any

import pytest

from testkit.models import Tiny, make_tiny

MakeTiny = Callable[[str], Tiny]


@pytest.fixture(scope="session")
def tiny_f32(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """A maker of tiny models of a family in f32, exact enough to compare with transformers."""
    made: dict[str, Tiny] = {}

    def make(family: str) -> Tiny:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_int4(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny glm4_moe (dense first layer, shared expert, groups, biases) as int4 and int8, over two stripes."""
    return make_tiny("glm4_moe", tmp_path_factory.mktemp("int4"), precision="", weights=(2, 1))


@pytest.fixture(scope="session")
def tiny_split(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny qwen3_moe whose records are large enough to be cut in two, over two stripes."""
    folder = tmp_path_factory.mktemp("split")
    sizes: dict[str, Any] = {"hidden_size": 236, "moe_intermediate_size": 108, "num_hidden_layers": 2}
    return make_tiny("qwen3_moe", folder, weights=(1, 1), mlp_only_layers=[], **sizes)
