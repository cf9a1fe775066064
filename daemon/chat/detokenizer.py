"""Token ids back to text, one id at a time, cut only at whole UTF-8 characters.

Every token has a fixed sequence of bytes; the text of an answer is those bytes, joined and decoded as UTF-8, with each
ill-formed sequence replaced by U+FFFD (the "maximal subpart" practice of the Unicode Standard, chapter 3.9, which is
also what Python's `replace` handler and Rust's `from_utf8_lossy` do). So what a stream sends, joined, is exactly what
the whole answer decodes to, and nothing has to be re-decoded. Decoder kinds for which a token has no bytes of its own
(WordPiece, CTC, a regex replacement) are refused by name.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from colibri.daemon.chat.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Maps each of the 256 letters of a byte-level vocabulary to its byte.

    Printable Latin-1 letters stand for themselves; the other 68 bytes, in ascending order, take the letters from
    U+0100 on (the table of GPT-2's encoder, which `tokenizers` uses too).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


@dataclass(frozen=True)
class PieceDecoder:
    """How the decoder of a tokenizer.json turns one vocabulary entry into bytes.

    `strip` letters `strip_letter` are dropped where the whole text begins; `first` converts the first token, where a
    decoder treats it apart.
    """

    piece: Callable[[str], bytes]
    first: Callable[[str], bytes]
    strip: int = 0
    strip_letter: str = " "


def _byte_level(_: Mapping[str, Any]) -> PieceDecoder:
    alphabet = byte_level_alphabet()

    def piece(token: str) -> bytes:
        try:
            return bytes([alphabet[letter] for letter in token])
        except KeyError:  # an added token with letters outside the alphabet stands for itself
            return token.encode("utf-8")

    return PieceDecoder(piece, piece)


def _metaspace(config: Mapping[str, Any]) -> PieceDecoder:
    mark = config.get("replacement", "▁")
    scheme = config.get("prepend_scheme", "always")
    if not isinstance(mark, str) or len(mark) != 1 or scheme not in ("always", "first", "never"):
        raise TokenizerError(f"tokenizer.json: Metaspace decoder with replacement {mark!r}, prepend_scheme {scheme!r}")

    def piece(token: str) -> bytes:
        return token.replace(mark, " ").encode("utf-8")

    def first(token: str) -> bytes:
        return token.replace(mark, "").encode("utf-8")

    return PieceDecoder(piece, piece if scheme == "never" else first)


def _sequence(config: Mapping[str, Any]) -> PieceDecoder:
    """The sentencepiece-like chain Replace*, ByteFallback?, Fuse?, Strip?; one inner decoder stands for itself."""
    parts = config.get("decoders")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts) or not parts:
        raise TokenizerError("tokenizer.json: decoder Sequence without a list of decoders")
    if len(parts) == 1:
        return piece_decoder(parts[0])
    kinds = [str(part.get("type")) for part in parts]
    if not re.fullmatch(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(kind + " " for kind in kinds)):
        raise TokenizerError(f"tokenizer.json: decoder Sequence of {', '.join(kinds)} is not supported")
    replacements = [_literal_replacement(part) for part in parts if part["type"] == "Replace"]
    byte_tokens = "ByteFallback" in kinds

    def piece(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token) if byte_tokens else None
        return bytes([int(match[1], 16)]) if match else token.encode("utf-8")

    strip, letter = _strip_rule(parts[-1]) if kinds[-1] == "Strip" else (0, " ")
    return PieceDecoder(piece, piece, strip, letter)


def _literal_replacement(part: Mapping[str, Any]) -> tuple[str, str]:
    pattern = part.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    content = part.get("content")
    if not isinstance(literal, str) or not literal or not isinstance(content, str):
        raise TokenizerError(f"tokenizer.json: decoder Replace with pattern {pattern!r} is not supported")
    return literal, content


def _strip_rule(part: Mapping[str, Any]) -> tuple[int, str]:
    letter, start, stop = part.get("content"), part.get("start"), part.get("stop")
    if not isinstance(letter, str) or len(letter) != 1 or not isinstance(start, int) or start < 0 or stop != 0:
        raise TokenizerError(f"tokenizer.json: decoder Strip with content {letter!r}, start {start!r}, stop {stop!r}")
    return start, letter


_KINDS: dict[str, Callable[[Mapping[str, Any]], PieceDecoder]] = {
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
    "Sequence": _sequence,
}


def piece_decoder(config: object) -> PieceDecoder:
    """Reads the `decoder` entry of a tokenizer.json.

    Raises TokenizerError naming a decoder whose tokens have no bytes of their own.
    """
    kind = config.get("type") if isinstance(config, dict) else None
    if not isinstance(config, dict) or kind not in _KINDS:
        raise TokenizerError(f"tokenizer.json: decoder of type {kind!r} is not supported ({', '.join(_KINDS)} are)")
    return _KINDS[kind](config)


class Detokenizer:
    """The text of a growing list of token ids. Its state is a function of the ids alone, so replaying them restores it.

    `token_of` maps an id to its vocabulary entry, or to None where the id contributes no text (a special token, an
    embedding row without a string). `at_start` says that the text begins here, where sentencepiece-like decoders drop
    a leading space; pass False for the continuation of raw text. `pieces` remembers the bytes of ids between
    detokenisers with the same decoder and `token_of`.
    """

    def __init__(
        self,
        decoder: PieceDecoder,
        token_of: Callable[[int], str | None],
        *,
        at_start: bool = True,
        pieces: dict[int, bytes | None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._token_of = token_of
        self._pieces = {} if pieces is None else pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = at_start
        self._strip_left = decoder.strip if at_start else 0

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that became complete: whole characters only, "" while one is open."""
        piece = self._first_piece(token_id) if self._is_first else self._piece(token_id)
        if piece is None:
            return ""
        self._is_first = False
        text = self._utf8.decode(piece)
        return self._strip(text) if self._strip_left else text

    def _first_piece(self, token_id: int) -> bytes | None:
        token = self._token_of(token_id)
        return None if token is None else self._decoder.first(token)

    def _piece(self, token_id: int) -> bytes | None:
        if token_id not in self._pieces:
            token = self._token_of(token_id)
            self._pieces[token_id] = None if token is None else self._decoder.piece(token)
        return self._pieces[token_id]

    def extend(self, token_ids: Iterable[int]) -> str:
        """`push` for several ids."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Ends the text: an open character becomes U+FFFD. Nothing may be pushed afterwards."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._decoder.strip_letter):
                self._strip_left = 0
                break
            self._strip_left -= 1
            text = text[1:]
        return text
