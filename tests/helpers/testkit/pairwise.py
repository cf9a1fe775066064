"""Covering arrays: few rows that hold every pair of values of every two dimensions.

A greedy construction after the idea of AETG (Cohen, Dalal, Fredman, Patton, 1997): each row begins with a pair that is
still missing, and each further dimension takes the value that completes most of the missing pairs. Not minimal, always
complete; `missing_pairs` says so independently.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Value = int | str | bool
Pair = tuple[tuple[str, Value], tuple[str, Value]]


def all_pairs(dimensions: Mapping[str, Sequence[Value]]) -> list[Pair]:
    """Every pair of values of every two dimensions, in the order of `dimensions`."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(dimensions, 2)
        for a, b in product(dimensions[first], dimensions[second])
    ]


def missing_pairs(dimensions: Mapping[str, Sequence[Value]], rows: Sequence[Mapping[str, Value]]) -> list[Pair]:
    """The pairs that no row holds."""
    return [
        ((a, x), (b, y)) for (a, x), (b, y) in all_pairs(dimensions) if not any(r[a] == x and r[b] == y for r in rows)
    ]


def covering_array(dimensions: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Rows that hold every pair; the same for the same `dimensions`, of which there are at least two."""
    open_pairs = dict.fromkeys(all_pairs(dimensions))
    rows = []
    while open_pairs:
        row = dict(next(iter(open_pairs)))
        for name in sorted(dimensions.keys() - row.keys(), key=list(dimensions).index):
            row[name] = max(dimensions[name], key=lambda value: _gain(open_pairs, row, name, value))
        rows.append({name: row[name] for name in dimensions})
        for pair in [pair for pair in open_pairs if all(row[name] == value for name, value in pair)]:
            del open_pairs[pair]
    return rows


def _gain(open_pairs: Mapping[Pair, None], row: Mapping[str, Value], name: str, value: Value) -> int:
    """How many missing pairs `name`=`value` makes with what `row` holds so far."""
    mine = (name, value)
    return sum((mine, other) in open_pairs or (other, mine) in open_pairs for other in row.items())
