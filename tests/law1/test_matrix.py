"""Law 1, the full matrix on two tiny models: expert slots x threads x stripes x prompt cut x company x restart x isa.

One is a glm4_moe (dense first layer, shared expert, groups) as int4 and int8, whose records stay whole; the other a
qwen3_moe in f32 with records so large that they are cut over the stripes. Each test covers one instruction set and
number of stripes, which is 96 of a model's 576 combinations.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from colibri.core.container import open_container
from testkit.law1 import (
    IO_BACKENDS,
    ISAS,
    STRIPES,
    VERIFY,
    Case,
    Text,
    case_of,
    check_courses,
    full_matrix,
    needs_avx2,
    reading,
)
from testkit.models import Tiny, make_tiny, packed, some_tokens

# The prompt and the restart lie in the second page; the restart and two companions in the middle of a page.
TEXT = Text(some_tokens(86), prompt=75, restart=69, companions=(3, 20, 66))
MATRIX = full_matrix()
COMBINATIONS = 576

FAMILIES = {"whole-records": "glm4_moe", "cut-records": "qwen3_moe"}
PRECISION = {"whole-records": "", "cut-records": "all=f32"}
WEIGHTS = {
    "whole-records": {1: (1,), 2: (2, 1), 3: (3, 2, 1)},
    "cut-records": {1: (1,), 2: (2, 1), 3: (12, 11, 10)},  # each piece must reach 128 KiB
}
SIZES: dict[str, dict[str, object]] = {
    "whole-records": {},
    "cut-records": {
        "moe_intermediate_size": 604,
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
}
MODELS = tuple(FAMILIES)

Cases = Callable[[str], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A model with its packs, made once, and what must come out of it."""
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            made[name] = case_of(make_packs(name, tmp_path_factory.mktemp(name)), TEXT)
        return made[name]

    return make


def make_packs(name: str, folder: Path) -> dict[int, Tiny]:
    first = make_tiny(FAMILIES[name], folder, PRECISION[name], WEIGHTS[name][1], **SIZES[name])
    packs: dict[int, Tiny] = {1: first}
    for stripes in STRIPES[1:]:
        packs[stripes] = packed(first.checkpoint, folder / f"{stripes}", PRECISION[name], WEIGHTS[name][stripes])
    return packs


def check_all(case: Case, isa: str, stripes: int, folder: Path) -> None:
    finished = 0
    for opening, courses in MATRIX.items():
        if (opening.isa, opening.stripes) == (isa, stripes):
            assert check_courses(*case, opening, courses, folder / f"{opening.slots}-{opening.threads}") == set(courses)
            finished += len(courses)
    assert finished * len(ISAS) * len(STRIPES) == COMBINATIONS


def test_the_matrix_is_the_whole_one() -> None:
    assert len({(opening, course) for opening, courses in MATRIX.items() for course in courses}) == COMBINATIONS
    assert {(opening.isa, opening.stripes) for opening in MATRIX} == {(i, s) for i in ISAS for s in STRIPES}
    read = {(reading(opening).io_backend, reading(opening).verify) for opening in MATRIX}
    assert read == {(backend, verify) for backend in IO_BACKENDS for verify in VERIFY}


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_what_the_matrix_needs(case: Cases, name: str) -> None:
    subject, reference = case(name)
    contents = set()
    for stripes, pack in subject.packs.items():
        with open_container(pack.folders[0], pack.folders[1:]) as container:
            contents.add(container.content_id)
            layers = range(len(container.manifest.expert_layers))
            pieces = stripes if name == "cut-records" else 1
            assert {container.extents_per_record(layer) for layer in layers} == {pieces}
            sizes = [stripe.bytes for stripe in container.manifest.layout.stripes]
            assert len(set(sizes)) == stripes  # no two stripes hold the same share
    assert len(contents) == 1
    assert len({row.tobytes() for row in reference.logits}) == len(TEXT.tokens)  # no position could pass for another


@pytest.mark.parametrize("stripes", STRIPES)
@pytest.mark.parametrize("name", MODELS)
def test_generic_code(case: Cases, name: str, stripes: int, tmp_path: Path) -> None:
    check_all(case(name), "generic", stripes, tmp_path)


@needs_avx2
@pytest.mark.parametrize("stripes", STRIPES)
@pytest.mark.parametrize("name", MODELS)
def test_avx2(case: Cases, name: str, stripes: int, tmp_path: Path) -> None:
    check_all(case(name), "avx2", stripes, tmp_path)
