"""Law 1 on the small real model: a covering array over the dimensions of the full matrix, and real text.

Every pair of values of every two dimensions occurs in some row; each row is one opening with one course.
"""

from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import pytest

from colibri.daemon.chat import TextModel
from testkit.law1 import (
    COMPANY,
    CUTS,
    ISAS,
    RESUMED,
    SLOTS,
    STRIPES,
    THREADS,
    Course,
    Opening,
    Reference,
    Subject,
    Text,
    check_courses,
    experts_of,
    machine_has_avx2,
    reference_of,
)
from testkit.models import Tiny
from testkit.pairwise import Value, covering_array, missing_pairs

SENTENCE = (
    "The capital of France is Paris. The city lies on the Seine, and its oldest part is an island in that river, "
    "where the cathedral of Notre-Dame stands."
)
TOKENS, PROMPT, RESTART = 32, 24, 13

# The cheaper value first: it is the one that a row takes when nothing depends on it.
DIMENSIONS: Mapping[str, tuple[Value, ...]] = {
    "isa": ISAS[::-1],
    "slots": SLOTS,
    "stripes": STRIPES,
    "threads": THREADS[::-1],
    "cut": CUTS,
    "company": COMPANY,
    "resumed": RESUMED,
}


def combination(row: Mapping[str, Value]) -> tuple[Opening, Course]:
    opening = Opening(str(row["isa"]), int(row["stripes"]), str(row["slots"]), int(row["threads"]))
    return opening, Course(int(row["cut"]), int(row["company"]), bool(row["resumed"]))


def rows_of(isa: str) -> list[tuple[Opening, Course]]:
    return [combination(row) for row in covering_array(DIMENSIONS) if row["isa"] == isa]


def name_of(value: Opening | Course) -> str:
    if isinstance(value, Opening):
        return f"{value.slots}-slots-{value.threads}-threads-{value.stripes}-stripes"
    return f"cut-{value.cut}-company-{value.company}{'-resumed' if value.resumed else ''}"


@pytest.fixture(scope="module")
def case(small_pack: Callable[[int], Tiny]) -> tuple[Subject, Reference]:
    packs = {stripes: small_pack(stripes) for stripes in STRIPES}
    text = TextModel.open(packs[1].folders[0], vocab_rows=49152)
    tokens = text.encode(SENTENCE)[:TOKENS]
    assert len(tokens) == TOKENS
    subject = Subject(packs, experts_of(packs[1]), Text(tokens, PROMPT, RESTART, companions=(1, 3, 6)))
    return subject, reference_of(subject)


def test_the_rows_hold_every_pair() -> None:
    rows = covering_array(DIMENSIONS)
    assert missing_pairs(DIMENSIONS, rows) == []
    assert len(CUTS) * len(SLOTS) <= len(rows) < 2 * len(CUTS) * len(SLOTS)
    sizes = [len(values) for values in DIMENSIONS.values()]
    assert len(missing_pairs(DIMENSIONS, [])) == sum(a * b for a, b in combinations(sizes, 2))
    assert missing_pairs(DIMENSIONS, rows[:-1]) != []  # a row is only made for a pair that is still missing
    assert sorted(map(combination, rows)) == sorted(rows_of("generic") + rows_of("avx2"))


@pytest.mark.parametrize(("opening", "course"), rows_of("generic"), ids=name_of)
def test_generic_code(case: tuple[Subject, Reference], opening: Opening, course: Course, tmp_path: Path) -> None:
    assert check_courses(*case, opening, [course], tmp_path) == {course}


@pytest.mark.skipif(not machine_has_avx2(), reason="this CPU has no AVX2")
@pytest.mark.parametrize(("opening", "course"), rows_of("avx2"), ids=name_of)
def test_avx2(case: tuple[Subject, Reference], opening: Opening, course: Course, tmp_path: Path) -> None:
    assert check_courses(*case, opening, [course], tmp_path) == {course}
