"""The token log's format: what is written is read back, and no damage passes for something else."""

import time

import pytest

from colibri.daemon.store.token_log import (
    HEADER_BYTES,
    BadRecordError,
    Damage,
    Kind,
    LogImage,
    UnknownVersionError,
    encode_json,
    encode_tokens,
    new_log,
    read_log,
    replay,
)
from testkit.sessions import CONTENT

GIVEN, SAMPLED = [5, 6, 7], [100, 2**31 - 1, 0]


def build(*records: tuple[Kind, bytes]) -> tuple[bytes, list[int]]:
    """A log's bytes, and where each of its records begins."""
    header, chain = new_log(CONTENT)
    data, offsets = bytearray(header), []
    for kind, payload in records:
        offsets.append(len(data))
        data += chain.encode(kind, payload)
    return bytes(data), offsets


def one_turn() -> tuple[bytes, list[int]]:
    return build(
        (Kind.GEN_START, encode_json({"generation": "a"})),
        (Kind.INPUT, encode_tokens(GIVEN)),
        *((Kind.SAMPLED, encode_tokens([token])) for token in SAMPLED),
        (Kind.GEN_END, encode_json({"generation": "a", "state": 5})),
    )


def readable(image: LogImage) -> list[int]:
    return replay(image.records).tokens


def test_what_is_written_is_read() -> None:
    data, _ = one_turn()
    image = read_log(data)
    assert (image.content_id, image.damage, image.valid_bytes) == (CONTENT, None, len(data))
    content = replay(image.records)
    assert content.tokens == GIVEN + SAMPLED
    (generation,) = content.generations
    assert (generation.begin, generation.first, generation.count) == (0, 3, 3)
    assert generation.end == {"generation": "a", "state": 5}


def test_a_read_log_can_be_continued() -> None:
    data, _ = one_turn()
    chain = read_log(data).chain
    assert chain is not None
    data += chain.encode(Kind.GEN_START, encode_json({"generation": "b"}))
    data += chain.encode(Kind.INPUT, encode_tokens([1])) + chain.encode(Kind.SAMPLED, encode_tokens([2]))
    image = read_log(data)
    assert image.damage is None
    assert readable(image) == [*GIVEN, *SAMPLED, 1, 2]


def test_a_write_torn_at_any_byte_keeps_every_earlier_token() -> None:
    data, offsets = one_turn()
    for index, offset in enumerate(offsets):
        end = offsets[index + 1] if index + 1 < len(offsets) else len(data)
        for length in range(offset, end):
            image = read_log(data[:length])
            assert image.damage is (Damage.TORN if length > offset else None)
            assert image.valid_bytes == offset
            kept = [*GIVEN, *SAMPLED][: max(0, index - 2) + 3] if index > 2 else []
            assert readable(image) == kept


def test_zeros_behind_the_end_are_a_torn_tail() -> None:
    data, _ = one_turn()
    image = read_log(data + bytes(512))
    assert (image.damage, image.valid_bytes) == (Damage.TORN, len(data))


def test_every_flipped_bit_is_damage_and_never_a_torn_tail() -> None:
    data, offsets = one_turn()
    for position in range(len(data)):
        for bit in (0, 3, 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            image = read_log(bytes(flipped))
            assert image.damage is Damage.CORRUPT, (position, bit, image.detail)
            before = [offset for offset in offsets if offset <= position]
            assert image.valid_bytes == (before[-1] if before else 0)


MEGABYTES = 8
# Pairs of words that may be heads of records of 128 KiB: what a search must not read for each of them.
UNLUCKY = [1 << 17, int(Kind.SAMPLED)] * (MEGABYTES << 17)


@pytest.mark.parametrize("tokens", [UNLUCKY, [0, 7] * (MEGABYTES << 17), [3] * (MEGABYTES << 18)])
@pytest.mark.parametrize("ending", ["torn", "followed", "damaged"])
def test_a_long_damaged_log_is_judged_in_seconds(tokens: list[int], ending: str) -> None:
    data, (*_, damaged, following) = build(
        (Kind.GEN_START, encode_json({})), (Kind.INPUT, encode_tokens(tokens)), (Kind.SAMPLED, encode_tokens([1]))
    )
    assert following - damaged > MEGABYTES << 20
    spoilt = bytearray(data)
    spoilt[damaged + 9] ^= 1
    rest = {"torn": following - 1, "followed": len(data), "damaged": following}[ending]
    begin = time.process_time()
    image = read_log(bytes(spoilt[:rest]))
    assert time.process_time() - begin < 10  # about one; reading 128 KiB for each pair takes a quarter of an hour
    assert (image.valid_bytes, image.damage) == (damaged, Damage.TORN if ending == "torn" else Damage.CORRUPT)
    assert (f"a valid one follows at {following}" in image.detail) == (ending == "followed")


def test_a_record_of_another_place_is_not_valid_here() -> None:
    data, offsets = one_turn()
    first, second, third = offsets[2], offsets[3], offsets[4]
    swapped = data[:first] + data[second:third] + data[first:second] + data[third:]
    image = read_log(swapped)
    assert (image.damage, image.valid_bytes) == (Damage.CORRUPT, first)


def test_a_record_of_another_file_is_not_valid_here() -> None:
    (one, offsets), (other, _) = one_turn(), one_turn()
    image = read_log(one[: offsets[2]] + other[offsets[2] :])
    assert (image.damage, image.valid_bytes) == (Damage.CORRUPT, offsets[2])


@pytest.mark.parametrize("data", [b"", b"CLBR", bytes(200), b"something else entirely" * 9])
def test_without_a_header_nothing_is_readable(data: bytes) -> None:
    image = read_log(data)
    assert (image.damage, image.records, image.chain) == (Damage.CORRUPT, [], None)


def test_a_log_of_a_later_version_is_left_alone() -> None:
    from colibri.core.tensors import crc32c

    data, _ = one_turn()
    header = bytearray(data[: HEADER_BYTES - 4])
    header[8] = 2
    with pytest.raises(UnknownVersionError, match="version 2"):
        read_log(bytes(header) + crc32c(bytes(header)).to_bytes(4, "little") + data[HEADER_BYTES:])


def test_a_turn_without_a_sampled_token_has_not_happened() -> None:
    turn = [(Kind.GEN_START, encode_json({"generation": "a"})), (Kind.INPUT, encode_tokens(GIVEN))]
    data, _ = build(*turn)
    assert readable(read_log(data)) == []
    data, _ = build(*turn, *turn, (Kind.SAMPLED, encode_tokens([9])))
    content = replay(read_log(data).records)
    assert content.tokens == [*GIVEN, 9]
    assert [g.count for g in content.generations] == [1]


def test_valid_records_that_make_no_sense_end_the_readable_prefix() -> None:
    data, offsets = build(
        (Kind.GEN_START, encode_json({})),
        (Kind.SAMPLED, encode_tokens([1])),
        (Kind.GEN_END, encode_json({})),
        (Kind.SAMPLED, encode_tokens([2])),
    )
    with pytest.raises(BadRecordError, match="outside a generation") as caught:
        replay(read_log(data).records)
    assert (caught.value.content.tokens, caught.value.offset) == ([1], offsets[3])
