"""The format of a stored KV page: 64 positions of every layer, bound to the tokens that made them.

Owns the bytes of `<chain>.kvp` and the chain names; does no I/O. A page's name is a SHA-256 chain over the content id,
the numerics id, and every token id from position 0 to the page's end: it cannot be attached to other tokens, weights or
arithmetic. A file is a header block and then the page as the core exports it:

    magic 8, version u32, header bytes u32, content id 32, numerics id 32 (text, zero-padded), name 32,
    first position u64, positions u32, sections u32, page bytes u64,
    per section: layer u32, kind u32, dtype u32, CRC-32C u32, offset u64, bytes u64,
    zeros, and in the last 4 bytes of the block the CRC-32C of all before.

The block is a multiple of 4 KiB long, so that the page can be read with O_DIRECT. Sections follow each other without
gaps: every byte is under a checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from colibri.core.tensors import crc32c
from colibri.daemon.model_port import PAGE_POSITIONS, PageSection
from colibri.daemon.store.token_log import encode_tokens

MAGIC = b"CLBRKVP1"
VERSION = 1
FIXED = struct.Struct("<8sII32s32s32sQIIQ")
SECTION = struct.Struct("<IIIIQQ")
BLOCK = 4096


class BadPageError(Exception):
    """A page that fails a check; the text says which."""


@dataclass(frozen=True)
class PageIdentity:
    """What all pages of one running model share."""

    content_id: str  # hex SHA-256
    numerics_id: str
    sections: tuple[PageSection, ...]
    page_bytes: int

    def __post_init__(self) -> None:
        expected = 0
        for section in self.sections:
            if section.offset != expected:
                raise ValueError(f"KV section of layer {section.layer} starts at {section.offset}, not at {expected}")
            expected += section.bytes
        if expected != self.page_bytes:
            raise ValueError(f"KV sections cover {expected} of {self.page_bytes} bytes of a page")
        if len(self.numerics_id.encode()) > 32:
            raise ValueError(f"numerics id {self.numerics_id!r} is longer than 32 bytes")

    @property
    def header_bytes(self) -> int:
        needed = FIXED.size + SECTION.size * len(self.sections) + 4
        return -(-needed // BLOCK) * BLOCK

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.page_bytes


@dataclass(frozen=True)
class PageName:
    """One page of one token sequence."""

    digest: bytes
    first: int
    positions: int

    @property
    def file(self) -> str:
        return f"{self.digest.hex()}.kvp"


class PageChain:
    """The page names of one growing token sequence; each full page is hashed once."""

    def __init__(self, identity: PageIdentity) -> None:
        numerics = identity.numerics_id.encode()
        root = b"colibri kv page 1\0" + bytes.fromhex(identity.content_id) + bytes([len(numerics)]) + numerics
        self._links = [hashlib.sha256(root).digest()]  # [i]: the name of full page i - 1

    def fork(self, pages: int) -> PageChain:
        """A chain of its own that shares what is known of the first `pages` full pages, at most."""
        twin = PageChain.__new__(PageChain)
        twin._links = self._links[: pages + 1]
        return twin

    def name(self, tokens: Sequence[int], index: int, positions: int = PAGE_POSITIONS) -> PageName:
        """Page `index` of these tokens with its first `positions` positions."""
        first = index * PAGE_POSITIONS
        assert 0 < positions <= PAGE_POSITIONS
        assert first + positions <= len(tokens)
        if positions == PAGE_POSITIONS:
            return PageName(self._link(tokens, index + 1), first, positions)
        return PageName(self._hash(self._link(tokens, index), tokens[first : first + positions]), first, positions)

    def _link(self, tokens: Sequence[int], pages: int) -> bytes:
        while len(self._links) <= pages:
            start = (len(self._links) - 1) * PAGE_POSITIONS
            self._links.append(self._hash(self._links[-1], tokens[start : start + PAGE_POSITIONS]))
        return self._links[pages]

    @staticmethod
    def _hash(before: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(before + encode_tokens(list(tokens))).digest()


def encode_header(identity: PageIdentity, name: PageName, page: bytes) -> bytes:
    """The header block for `page` (identity.page_bytes bytes)."""
    assert len(page) == identity.page_bytes
    view = memoryview(page)
    parts = [
        FIXED.pack(
            *(MAGIC, VERSION, identity.header_bytes, bytes.fromhex(identity.content_id)),
            *(identity.numerics_id.encode(), name.digest, name.first, name.positions),
            *(len(identity.sections), identity.page_bytes),
        )
    ]
    for s in identity.sections:
        check = crc32c(view[s.offset : s.offset + s.bytes])
        parts.append(SECTION.pack(s.layer, s.kind, s.dtype, check, s.offset, s.bytes))
    block = b"".join(parts).ljust(identity.header_bytes - 4, b"\0")
    return block + crc32c(block).to_bytes(4, "little")


def decode_page(identity: PageIdentity, name: PageName, data: bytes) -> bytes:
    """The page in a file's bytes, every byte checked. Raises BadPageError."""
    if len(data) != identity.file_bytes:
        raise BadPageError(f"{len(data)} bytes long instead of {identity.file_bytes}")
    header = memoryview(data)[: identity.header_bytes]
    if data[: len(MAGIC)] != MAGIC:
        raise BadPageError(f"starts with {data[: len(MAGIC)]!r}, not {MAGIC!r}")
    if crc32c(header[:-4]) != int.from_bytes(header[-4:], "little"):
        raise BadPageError("the header fails its checksum")
    _check_identity(identity, name, FIXED.unpack_from(header))
    page = memoryview(data)[identity.header_bytes :]
    for number, section in enumerate(identity.sections):
        stored = SECTION.unpack_from(header, FIXED.size + number * SECTION.size)
        layer, kind, dtype, check, offset, size = stored
        if PageSection(layer, kind, dtype, offset, size) != section:
            raise BadPageError(f"section {number} is laid out as {stored}, not as {section}")
        if crc32c(page[offset : offset + size]) != check:
            raise BadPageError(f"layer {layer}, section kind {kind}: {size} bytes fail their checksum")
    return bytes(page)


def _check_identity(identity: PageIdentity, name: PageName, fields: tuple[object, ...]) -> None:
    expected = {
        "version": VERSION,
        "header bytes": identity.header_bytes,
        "content id": bytes.fromhex(identity.content_id),
        "numerics id": identity.numerics_id.encode().ljust(32, b"\0"),
        "name": name.digest,
        "first position": name.first,
        "positions": name.positions,
        "sections": len(identity.sections),
        "page bytes": identity.page_bytes,
    }
    for (field, value), found in zip(expected.items(), fields[1:], strict=True):
        if found != value:
            raise BadPageError(f"{field} is {found!r}, not {value!r}")
