"""CRC-32C of many ranges of one buffer, each in time that does not depend on the range's length.

A damaged token log is searched for valid records: any pair of words may be the head of one, and the content of a
hostile or unlucky log makes every second word a candidate of megabytes. So the CRC's state is kept for every place
(4 bytes per 4 bytes of the buffer), and the CRC of a range follows from the states at its two ends, because the CRC is
linear over GF(2): feeding zeros is a linear map of the state, its powers of two are made by squaring (as in Mark
Adler's crc32_combine, zlib), and the data only adds to it. Used by token_log.py alone; what a record is stands there.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reflected (RFC 3720, appendix B.4)
ALL_ONES = np.uint32(0xFFFFFFFF)


class RangeChecksums:
    """The CRCs of ranges of `words`, little-endian u32."""

    def __init__(self, words: U32) -> None:
        self._powers = [_Map(_one_word_of_zeros())]
        self._states = self._prefix_states(words)

    def crc(self, begin: I64, end: I64, seed: int) -> U32:
        """crc32c of words[begin:end] continuing from `seed`, for each pair of 0 <= begin <= end <= len(words)."""
        state = self._advance(self._states[begin] ^ (np.uint32(seed) ^ ALL_ONES), end - begin)
        result: U32 = state ^ self._states[end] ^ ALL_ONES
        return result

    def _power(self, exponent: int) -> _Map:
        """Feeding 2**exponent words of zeros."""
        while len(self._powers) <= exponent:
            self._powers.append(self._powers[-1].squared())
        return self._powers[exponent]

    def _advance(self, state: U32, counts: I64) -> U32:
        """The states after so many words of zeros each."""
        state = state.copy()
        for exponent in range(int(counts.max(initial=0)).bit_length()):
            chosen = np.flatnonzero(counts >> exponent & 1)
            if chosen.size:
                state[chosen] = self._power(exponent)(state[chosen])
        return state

    def _prefix_states(self, words: U32) -> U32:
        """The state in front of each word and behind the last, from 0 on.

        The words are cut into about as many rows as each row has words; numpy goes through all rows side by side, first
        to learn how each changes the state, then from the state in which it really begins.
        """
        width = max(1, math.isqrt(words.size))
        rows = words.size // width + 1  # the last one is at least partly padding
        padded = np.zeros(rows * width, np.uint32)
        padded[: words.size] = words
        columns = np.ascontiguousarray(padded.reshape(rows, width).T)
        step = self._power(0)
        ends = np.zeros(rows, np.uint32)
        for column in columns:
            ends = step(ends ^ column)
        begins, count = np.zeros(rows, np.uint32), np.array([width])
        for row in range(1, rows):
            begins[row] = self._advance(begins[row - 1 : row], count)[0] ^ ends[row - 1]
        states = np.empty_like(columns)
        state = begins
        for number, column in enumerate(columns):
            states[number] = state
            state = step(state ^ column)
        return np.ascontiguousarray(states.T).reshape(-1)[: words.size + 1]


class _Map:
    """A linear map of 32 bits. `images`: of the 32 single bits, the lowest first."""

    def __init__(self, images: U32) -> None:
        self._images = images
        self._tables = np.zeros((4, 256), np.uint32)
        for bit, image in enumerate(images):
            table, low = self._tables[bit // 8], 1 << bit % 8
            table[low : 2 * low] = table[:low] ^ image

    def __call__(self, values: U32) -> U32:
        first, second, third, fourth = self._tables
        result: U32 = first[values & 255] ^ second[values >> 8 & 255] ^ third[values >> 16 & 255] ^ fourth[values >> 24]
        return result

    def squared(self) -> _Map:
        return _Map(self(self._images))


def _one_word_of_zeros() -> U32:
    images = [1 << bit for bit in range(32)]
    for _ in range(32):
        images = [image >> 1 ^ (POLYNOMIAL if image & 1 else 0) for image in images]
    return np.array(images, np.uint32)
