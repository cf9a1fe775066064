"""A byte-level BPE tokenizer of 128 to a few hundred entries, written as a model folder's tokenizer files.

It is the "TOK" of the field reports: `<bos> <eos> <end_turn>` and `<turn>` are added special tokens at the end of the
vocabulary, `<note>` is an added token with `special: false`; the emoji U+1F469 takes two tokens, the character U+6F22
takes two. With 268 entries or more every byte has a token, so every text survives the round trip; below that, printable
ASCII, newline and the letters above do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ADDED = ("<bos>", "<eos>", "<end_turn>", "<turn>", "<note>")
EMOJI, HAN = "\U0001f469", "漢"

# ChatML in shape: BOS once, every message closed by <end_turn> and a newline.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<turn>' + message['role'] + '\\n' + message['content'] + '<end_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\\n' }}{% endif %}"
)

_WORDS = [
    "th",
    "he",
    "in",
    "er",
    "an",
    "re",
    "on",
    "at",
    "en",
    "nd",
    "ti",
    "es",
    "or",
    "te",
    "of",
    "ed",
    "is",
    "it",
    "al",
]


def byte_letter(byte: int) -> str:
    """The letter that stands for a byte in a byte-level vocabulary (GPT-2's table)."""
    if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
        return chr(byte)
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return chr(0x100 + hidden.index(byte))


def _letters(data: bytes) -> str:
    return "".join(byte_letter(byte) for byte in data)


def _base(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`size` vocabulary entries and the merges behind them."""
    emoji, han = EMOJI.encode(), HAN.encode()
    needed = [*range(0x20, 0x7F), 0x0A, *dict.fromkeys(emoji + han)]
    merges = [
        (_letters(emoji[:1]), _letters(emoji[1:2])),
        (_letters(emoji[2:3]), _letters(emoji[3:4])),
        (_letters(han[:1]), _letters(han[1:2])),
    ]
    entries = [_letters(bytes([byte])) for byte in needed] + ["".join(merge) for merge in merges]
    spare = size - len(entries)
    if spare < 0:
        raise ValueError(f"vocab_size must be at least {len(entries) + len(ADDED)}")
    others = [_letters(bytes([byte])) for byte in range(256) if byte not in needed]
    # Every byte if they all fit, else half of the room for words, so that a tiny vocabulary still merges something.
    byte_room = min(len(others), spare) if spare >= len(others) else spare // 2
    entries += others[:byte_room]
    pairs = [(word[0], word[1]) for word in _WORDS]
    pairs += [("Ġ", word) for word in _WORDS] + [(a, b) for a in "bcdfglmpst" for b in "aeiou"]
    for left, right in pairs:
        if len(entries) == size:
            break
        if left + right not in entries:
            entries.append(left + right)
            merges.append((left, right))
    while len(entries) < size:  # beyond all words: entries that no merge reaches
        entries.append(f"extra{len(entries)}")
    return entries, merges


def tokenizer_json(vocab_size: int = 128, *, post_processor: Any = None, ignore_merges: bool = False) -> dict[str, Any]:
    """The tokenizer.json object: ids 0 .. vocab_size-1, the five added tokens last."""
    entries, merges = _base(vocab_size - len(ADDED))
    vocab = {entry: index for index, entry in enumerate(entries)}
    added = [
        {
            "id": len(entries) + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content != "<note>",
        }
        for index, content in enumerate(ADDED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def added_ids(vocab_size: int = 128) -> dict[str, int]:
    """The ids of the added tokens, by content."""
    return {content: vocab_size - len(ADDED) + index for index, content in enumerate(ADDED)}


def write_tokenizer(
    folder: Path,
    vocab_size: int = 128,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos_token: bool | None = None,
    **options: Any,
) -> dict[str, int]:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja into `folder`.

    `chat_template` None writes no template. `options` go to `tokenizer_json`. Returns the added tokens' ids.
    generation_config.json holds only what concerns text: eos_token_id is [<eos>, <end_turn>].
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = added_ids(vocab_size)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    if add_bos_token is not None:
        config["add_bos_token"] = add_bos_token
    generation = {"bos_token_id": ids["<bos>"], "eos_token_id": [ids["<eos>"], ids["<end_turn>"]]}
    _write_json(folder / "tokenizer.json", tokenizer_json(vocab_size, **options))
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", generation)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return ids


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
