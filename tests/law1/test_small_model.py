"""Law 1 on the small real model: a covering array over the dimensions of the full matrix, and real text.

Every pair of values of every two dimensions occurs in some row; each row is one opening with one course.
"""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from colibri.daemon.chat import TextModel
from testkit.law1 import (
    DIMENSIONS,
    STRIPES,
    Case,
    Course,
    Opening,
    Text,
    case_of,
    check_courses,
    combination,
    needs_avx2,
)
from testkit.models import Tiny
from testkit.pairwise import covering_array, missing_pairs

SENTENCE = (
    "The capital of France is Paris. The city lies on the Seine, and its oldest part is an island in that river, "
    "where the cathedral of Notre-Dame stands."
)
TOKENS, PROMPT, RESTART = 32, 24, 13


def rows_of(isa: str) -> list[tuple[Opening, Course]]:
    return [combination(row) for row in covering_array(DIMENSIONS) if row["isa"] == isa]


def name_of(value: Opening | Course) -> str:
    if isinstance(value, Opening):
        return f"{value.slots}-slots-{value.threads}-threads-{value.stripes}-stripes"
    return f"cut-{value.cut}-company-{value.company}{'-resumed' if value.resumed else ''}"


@pytest.fixture(scope="module")
def case(small_pack: Callable[[int], Tiny]) -> Case:
    packs = {stripes: small_pack(stripes) for stripes in STRIPES}
    text = TextModel.open(packs[1].folders[0], vocab_rows=49152)
    tokens = text.encode(SENTENCE)[:TOKENS]
    assert len(tokens) == TOKENS
    return case_of(packs, Text(tokens, PROMPT, RESTART, companions=(1, 3, 6)))


def test_the_rows_hold_every_pair() -> None:
    rows = covering_array(DIMENSIONS)
    assert missing_pairs(DIMENSIONS, rows) == []
    sizes = [len(values) for values in DIMENSIONS.values()]
    fewest = max(a * b for a, b in combinations(sizes, 2))
    assert fewest <= len(rows) < 2 * fewest
    assert len(missing_pairs(DIMENSIONS, [])) == sum(a * b for a, b in combinations(sizes, 2))
    assert missing_pairs(DIMENSIONS, rows[:-1]) != []  # a row is only made for a pair that is still missing
    assert sorted(map(combination, rows)) == sorted(rows_of("generic") + rows_of("avx2"))


@pytest.mark.parametrize(("opening", "course"), rows_of("generic"), ids=name_of)
def test_generic_code(case: Case, opening: Opening, course: Course, tmp_path: Path) -> None:
    assert check_courses(*case, opening, [course], tmp_path) == {course}


@needs_avx2
@pytest.mark.parametrize(("opening", "course"), rows_of("avx2"), ids=name_of)
def test_avx2(case: Case, opening: Opening, course: Course, tmp_path: Path) -> None:
    assert check_courses(*case, opening, [course], tmp_path) == {course}
