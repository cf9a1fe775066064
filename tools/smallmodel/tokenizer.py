"""Writes the tokenizer of the small model as Hugging Face files, from what the GGUF says of it.

Owns tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json. Refuses token data
that the `tokenizers` library does not take back with the same ids.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from smallmodel.source import SourceError, TokenizerData


def build_tokenizer(data: TokenizerData) -> Tokenizer:
    """Byte-level BPE that splits digits one by one first, which is what the GGUF calls the `smollm` rule."""
    vocab = {token: i for i, token in enumerate(data.tokens)}
    if len(vocab) != len(data.tokens):
        raise SourceError("the GGUF's vocabulary holds a token twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=data.merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [data.tokens[i] for i in data.control_ids]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if [tokenizer.token_to_id(token) for token in control] != data.control_ids:
        raise SourceError("control tokens got other ids than the GGUF gives them")
    return tokenizer


def write_tokenizer(data: TokenizerData, directory: Path) -> Tokenizer:
    """Write the four files into `directory` and return the tokenizer."""
    tokenizer = build_tokenizer(data)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": data.tokens[data.bos_id],
        "eos_token": data.tokens[data.eos_id],
        "pad_token": data.tokens[data.eos_id],
        "unk_token": data.tokens[0],
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": data.chat_template,
    }
    generation = {"bos_token_id": data.bos_id, "eos_token_id": data.eos_id, "pad_token_id": data.eos_id}
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "generation_config.json", generation)
    (directory / "chat_template.jinja").write_text(data.chat_template, encoding="utf-8")
    return tokenizer


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
