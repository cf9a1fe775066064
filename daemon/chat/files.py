"""Reads the text files of a model folder, hostile until checked: sizes are bounded, JSON must be an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colibri.daemon.chat.errors import TokenizerError

MAX_TOKENIZER_BYTES = 256 << 20  # the largest published tokenizer.json files are some 30 MB
MAX_SMALL_BYTES = 16 << 20  # configs and templates; tokenizer_config.json can list thousands of added tokens


def read_text(path: Path, limit: int = MAX_SMALL_BYTES) -> str | None:
    """The file's text, or None if there is no such file. Raises TokenizerError if it is too large or not UTF-8."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    if size > limit:
        raise TokenizerError(f"{path}: {size} bytes, more than the limit of {limit}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 at byte {error.start}") from error


def read_object(path: Path, limit: int = MAX_SMALL_BYTES) -> dict[str, Any]:
    """The file's JSON object, {} if there is no such file. Raises TokenizerError if it is anything else."""
    text = read_text(path, limit)
    return {} if text is None else parse_object(path, text)


def parse_object(path: Path, text: str) -> dict[str, Any]:
    """`text` as a JSON object; `path` names it in errors."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: a JSON object is expected, found {type(value).__name__}")
    return value
