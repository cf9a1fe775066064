"""The format of a session's token log: the truth about a session, a few bytes per token.

Owns the bytes of `tokens.log` and the verdict on a damaged one; does no I/O. A file is a header and then records:

    header  magic 8, version u32, header bytes u32, salt 16, content id 32, CRC-32C of all that u32
    record  payload bytes u32, kind u8, flags u8 (0), reserved u16 (0), payload, check u32

All little-endian; payloads are a multiple of 4 bytes, so every record starts on one. `check` is the CRC-32C over salt,
previous check (the header's CRC for the first record), and the record before it: a record is valid only in its place in
its own file. Reading goes up to the first record that is not valid. What follows it decides: nothing but a piece of a
record or zeros is a torn tail, the trace of a crash in mid-write, of which nothing had been acknowledged; anything else
is damage (CORRUPT).
"""

from __future__ import annotations

import enum
import json
import secrets
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.core.tensors import crc32c
from colibri.daemon.store.range_checksums import I64, U32, RangeChecksums

MAGIC = b"CLBRLOG1"
VERSION = 1
HEADER = struct.Struct("<8sII16s32s")
HEAD = struct.Struct("<IBBH")
CHECK = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CHECK.size
MAX_PAYLOAD = 1 << 26
MAX_LOG_BYTES = 1 << 32
MAX_TOKEN = 2**31 - 1


class Kind(enum.IntEnum):
    """What a record says. INPUT and SAMPLED hold token ids as u32; GEN_START and GEN_END hold a JSON object."""

    INPUT = 1
    SAMPLED = 2
    GEN_START = 6
    GEN_END = 7


class Damage(enum.Enum):
    TORN = "torn"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class Record:
    kind: int
    payload: bytes
    offset: int


@dataclass(frozen=True)
class LogImage:
    """What reading a log found. `valid_bytes`: up to the end of the last valid record. `chain` continues there."""

    content_id: str
    records: list[Record]
    valid_bytes: int
    damage: Damage | None
    detail: str
    chain: Chain | None  # None if not even the header can be read


class Chain:
    """Makes the records of one log, each bound to all before it."""

    def __init__(self, salt: bytes, check: int) -> None:
        self._salted = crc32c(salt)
        self.check = check

    def _next(self, record: bytes | memoryview) -> int:
        return crc32c(record, crc32c(CHECK.pack(self.check), self._salted))

    def encode(self, kind: Kind, payload: bytes) -> bytes:
        """The record's bytes; the chain moves on."""
        assert len(payload) % 4 == 0
        record = HEAD.pack(len(payload), kind, 0, 0) + payload
        self.check = self._next(record)
        return record + CHECK.pack(self.check)

    def read(self, data: memoryview, offset: int) -> Record | None:
        """The valid record at `offset`, and the chain moves on; or None."""
        if len(data) - offset < HEAD.size + CHECK.size:
            return None
        payload_bytes, kind, flags, reserved = HEAD.unpack_from(data, offset)
        end = offset + HEAD.size + payload_bytes
        if flags or reserved or payload_bytes % 4 or payload_bytes > MAX_PAYLOAD or end + CHECK.size > len(data):
            return None
        (check,) = CHECK.unpack_from(data, end)
        if check != self._next(data[offset:end]):
            return None
        self.check = check
        return Record(kind, bytes(data[offset + HEAD.size : end]), offset)

    def checks_of(self, checksums: RangeChecksums, starts: I64, ends: I64) -> U32:
        """What the checks of records at words [start, end) would be, each behind the check of the record before it."""
        return checksums.crc(starts - 1, ends, self._salted)


def new_log(content_id: str) -> tuple[bytes, Chain]:
    """The header of a fresh log, with a salt of its own, and the chain behind it. `content_id` is hex SHA-256."""
    salt = secrets.token_bytes(16)
    header = HEADER.pack(MAGIC, VERSION, HEADER_BYTES, salt, bytes.fromhex(content_id))
    check = crc32c(header)
    return header + CHECK.pack(check), Chain(salt, check)


def encode_tokens(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def decode_tokens(payload: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(payload, dtype="<u4").tolist()
    return tokens


def encode_json(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return text + b" " * (-len(text) % 4)


def read_log(data: bytes) -> LogImage:
    """Reads up to the first record that is not valid, and says what comes after it. Never raises for bad bytes.
    Raises UnknownVersionError for a log that another version of this program wrote."""
    header = _read_header(data)
    if isinstance(header, str):
        return LogImage("", [], 0, Damage.CORRUPT, header, None)
    content_id, chain = header
    view = memoryview(data)
    records = []
    offset = HEADER_BYTES
    while (record := chain.read(view, offset)) is not None:
        records.append(record)
        offset += HEAD.size + len(record.payload) + CHECK.size
    damage, detail = _judge(view, offset, chain)
    return LogImage(content_id, records, offset, damage, detail, chain)


class UnknownVersionError(Exception):
    """The log is whole, but of a version that this program does not know."""


def _read_header(data: bytes) -> tuple[str, Chain] | str:
    if len(data) < HEADER_BYTES:
        return f"{len(data)} bytes, shorter than a log's header"
    magic, version, header_bytes, salt, content = HEADER.unpack_from(data)
    (check,) = CHECK.unpack_from(data, HEADER.size)
    if magic != MAGIC:
        return f"starts with {magic!r}, not {MAGIC!r}"
    if check != crc32c(data[: HEADER.size]):
        return "the header fails its checksum"
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise UnknownVersionError(f"log version {version}; this program knows {VERSION}")
    return content.hex(), Chain(salt, check)


def _judge(data: memoryview, offset: int, chain: Chain) -> tuple[Damage | None, str]:
    """What the bytes from `offset` on are, where the valid records end."""
    rest = len(data) - offset
    if rest == 0:
        return None, ""
    if not np.frombuffer(data, np.uint8, offset=offset).any():
        return Damage.TORN, f"{rest} zero bytes at offset {offset}"
    following = _find_record(data, offset, chain)
    if following is not None:
        return (
            Damage.CORRUPT,
            f"the record at offset {offset} fails its checksum, but a valid one follows at {following}",
        )
    whole = rest >= HEAD.size + CHECK.size and HEAD.unpack_from(data, offset)[0] + HEAD.size + CHECK.size <= rest
    if whole or _is_last_with_bad_length(data, offset, chain):
        return Damage.CORRUPT, f"the record at offset {offset} is complete and fails its checksum"
    return Damage.TORN, f"{rest} bytes of an unfinished record at offset {offset}"


def _is_last_with_bad_length(data: memoryview, offset: int, chain: Chain) -> bool:
    """Whether the rest is one valid record but for its length field: damage there must not pass for a torn write."""
    payload_bytes = len(data) - offset - HEAD.size - CHECK.size
    if payload_bytes < 0:
        return False
    repaired = bytearray(data[offset:])
    repaired[:4] = payload_bytes.to_bytes(4, "little")
    return Chain.read(_copy(chain), memoryview(repaired), 0) is not None


def _find_record(data: memoryview, offset: int, chain: Chain) -> int | None:
    """The first valid record after `offset`: its predecessor's check is the word before it. Takes time in proportion to
    the data, whatever stands there: a session is read while others wait."""
    words = np.frombuffer(data, "<u4", (len(data) - offset) // 4, offset)
    heads = np.flatnonzero(np.isin(words[2:], list(_KINDS))) + 1  # by the second word of a record's head
    if not heads.size:
        return None
    checksums = RangeChecksums(words)
    for some in np.split(heads, range(SEARCHED_AT_ONCE, len(heads), SEARCHED_AT_ONCE)):
        payload_bytes = words[some].astype(np.int64)
        checks = some + 2 + payload_bytes // 4
        fit = (payload_bytes % 4 == 0) & (payload_bytes <= MAX_PAYLOAD) & (checks < len(words))
        starts, checks = some[fit], checks[fit]
        valid = chain.checks_of(checksums, starts, checks) == words[checks]
        if valid.any():
            return offset + 4 * int(starts[valid.argmax()])
    return None


def _copy(chain: Chain) -> Chain:
    twin = Chain.__new__(Chain)
    twin._salted, twin.check = chain._salted, chain.check
    return twin


_KINDS = frozenset(Kind)
SEARCHED_AT_ONCE = 1 << 18


# ---- what the records mean ------------------------------------------------------------------------------------------


@dataclass
class LoggedGeneration:
    """A generation as its session's log tells it: `start` and `end` are the JSON objects, `end` None if the daemon died
    before it finished. Its input begins at position `begin`, its tokens are positions [first, first + count)."""

    start: dict[str, Any]
    begin: int
    first: int
    count: int = 0
    end: dict[str, Any] | None = None


@dataclass
class LogContent:
    tokens: list[int]
    generations: list[LoggedGeneration]


class BadRecordError(Exception):
    """A record that is valid byte for byte and makes no sense; `offset` says where, `position` what is readable."""

    def __init__(self, message: str, content: LogContent, offset: int) -> None:
        super().__init__(message)
        self.content = content
        self.offset = offset


def replay(records: list[Record]) -> LogContent:
    """The session that these records make. A turn whose first sampled token did not reach the log has not happened: its
    input is dropped. Raises BadRecordError, UnknownVersionError (a kind of a later version)."""
    content = LogContent([], [])
    for record in records:
        problem = _apply(content, record)
        if problem:
            _drop_empty_turn(content)
            raise BadRecordError(f"record at offset {record.offset}: {problem}", content, record.offset)
    _drop_empty_turn(content)
    return content


def _drop_empty_turn(content: LogContent) -> None:
    if content.generations and content.generations[-1].count == 0:
        turn = content.generations.pop()
        del content.tokens[turn.begin :]


def _apply(content: LogContent, record: Record) -> str:
    if record.kind not in _KINDS:
        raise UnknownVersionError(f"record kind {record.kind} at offset {record.offset} is not known to this program")
    current = content.generations[-1] if content.generations else None
    if record.kind in (Kind.GEN_START, Kind.GEN_END):
        value = _read_json(record.payload)
        if value is None:
            return "not a JSON object"
        if record.kind == Kind.GEN_START:
            _drop_empty_turn(content)
            position = len(content.tokens)
            content.generations.append(LoggedGeneration(value, position, position))
        elif current is None or current.end is not None:
            return "ends a generation that was not started"
        else:
            current.end = value
        return ""
    if current is None or current.end is not None:
        return "tokens outside a generation"
    tokens = decode_tokens(record.payload)
    if tokens and max(tokens) > MAX_TOKEN:
        return f"token id {max(tokens)}"
    content.tokens.extend(tokens)
    if record.kind == Kind.INPUT:
        if current.count:
            return "input after the first sampled token"
        current.first = len(content.tokens)
    else:
        current.count += len(tokens)
    return ""


def _read_json(payload: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(payload)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
