"""CRCs of ranges from the states at their ends are those of the core, which reads every byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.core.tensors import crc32c
from colibri.daemon.store.range_checksums import RangeChecksums


@pytest.mark.parametrize("words", [0, 1, 2, 3, 4, 15, 16, 17, 1000])
def test_every_range_of_a_short_buffer(words: int) -> None:
    data = np.random.default_rng(words).integers(0, 2**32, words, np.uint32)
    places = range(words + 1) if words < 20 else (0, 1, 500, 999, 1000)
    begins, ends = np.array([(begin, end) for begin in places for end in places if begin <= end]).T
    found = RangeChecksums(data).crc(begins, ends, 12345)
    expected = [crc32c(data[begin:end].tobytes(), 12345) for begin, end in zip(begins, ends, strict=True)]
    assert found.tolist() == expected


@given(data=st.binary(max_size=400), seed=st.integers(0, 2**32 - 1), cut=st.tuples(st.integers(0), st.integers(0)))
def test_any_range_of_any_bytes(data: bytes, seed: int, cut: tuple[int, int]) -> None:
    words = np.frombuffer(data, "<u4", len(data) // 4)
    begin, end = sorted(place % (len(words) + 1) for place in cut)
    (found,) = RangeChecksums(words).crc(np.array([begin]), np.array([end]), seed)
    assert found == crc32c(words[begin:end].tobytes(), seed)


def test_no_range_is_no_crc() -> None:
    none = np.zeros(0, np.int64)
    assert RangeChecksums(np.ones(9, np.uint32)).crc(none, none, 0).tolist() == []
