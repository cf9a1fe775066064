"""tokenizer.json and its companions: text to ids, and which ids there are.

Owns the `tokenizers` object and the vocabulary checks. Three numbers are told apart: the entries of the vocabulary,
the largest id, and the rows of the embedding. An embedding is often padded, so an id below `rows` may have no string:
it decodes to nothing and must not be sampled. An id at or above `rows` is refused when the model is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from colibri.daemon.chat.detokenizer import Detokenizer, piece_decoder
from colibri.daemon.chat.errors import TextError, TokenizerError
from colibri.daemon.chat.files import MAX_TOKENIZER_BYTES, parse_object, read_object, read_text

SCHEMA_VERSION = "1.0"
# The attributes that transformers 5 calls named special tokens: a template sees them as variables.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder.

    `rows` is the number of embedding rows. Raises TokenizerError naming the file and what is wrong with it.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        self.rows = rows
        path = folder / "tokenizer.json"
        text = read_text(path, MAX_TOKENIZER_BYTES)
        if text is None:
            raise TokenizerError(f"{path}: no such file")
        schema = parse_object(path, text)
        self._check_schema(path, schema)
        self._backend = self._load(path, text, schema)
        if _keep_written_ids(self._backend, schema):
            self._backend = self._load(path, json.dumps(schema), schema)
        self.config = read_object(folder / "tokenizer_config.json")
        self.named_tokens = _named_tokens(folder, self.config)
        self._check_added(path, schema)
        self._add_listed(folder / "tokenizer_config.json")
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self._check_rows(path, vocabulary)
        self._ids = frozenset(vocabulary.values())
        self._added = dict(self._backend.get_added_tokens_decoder())
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        self._decoder = piece_decoder(schema.get("decoder"))
        # Bytes by id, filled as ids come up; one table where special tokens are skipped, one where they are shown.
        self._pieces: dict[bool, dict[int, bytes | None]] = {True: {}, False: {}}
        self.bos_id = self._named_id(folder, "bos_token")
        self.eos_id = self._named_id(folder, "eos_token")

    @staticmethod
    def _check_schema(path: Path, schema: Mapping[str, Any]) -> None:
        version, model = schema.get("version"), schema.get("model")
        if version != SCHEMA_VERSION:
            raise TokenizerError(f"{path}: schema version {version!r} is not known, only {SCHEMA_VERSION!r} is")
        if not isinstance(model, dict):
            raise TokenizerError(f"{path}: schema version {version!r} without a `model` object")

    @staticmethod
    def _load(path: Path, text: str, schema: Mapping[str, Any]) -> tokenizers.Tokenizer:
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            kind = schema["model"].get("type")
            raise TokenizerError(
                f"{path}: tokenizers {tokenizers.__version__} cannot read this schema (version "
                f"{schema['version']!r}, model type {kind!r}): {error}"
            ) from error
        # A saved truncation or padding would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _check_added(self, path: Path, schema: Mapping[str, Any]) -> None:
        """Refuses an added token that did not get the id it is written with: the embedding was trained on that id."""
        for token in schema.get("added_tokens") or []:
            found = self._backend.token_to_id(token["content"])
            if found != token["id"]:
                raise TokenizerError(
                    f"{path}: added token {token['content']!r} is written with id {token['id']} but would "
                    f"get id {found}"
                )

    def _add_listed(self, path: Path) -> None:
        """Adds the tokens that only tokenizer_config.json lists (`added_tokens_decoder`), as transformers does."""
        listed = self.config.get("added_tokens_decoder") or {}
        if not isinstance(listed, dict):
            raise TokenizerError(f"{path}: added_tokens_decoder is not an object")
        for key, entry in sorted(listed.items(), key=lambda item: (len(item[0]), item[0])):
            if not key.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise TokenizerError(f"{path}: added_tokens_decoder entry {key!r} is malformed")
            content = entry["content"]
            if self._backend.token_to_id(content) is None:
                flags = {
                    flag: entry[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized") if flag in entry
                }
                token = tokenizers.AddedToken(content, special=bool(entry.get("special", False)), **flags)
                self._backend.add_tokens([token])
            if self._backend.token_to_id(content) != int(key):
                raise TokenizerError(
                    f"{path}: added_tokens_decoder gives {content!r} id {key}, the tokenizer gives it "
                    f"id {self._backend.token_to_id(content)}"
                )

    def _check_rows(self, path: Path, vocabulary: Mapping[str, int]) -> None:
        token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
        if largest < 0:
            raise TokenizerError(f"{path}: the vocabulary is empty")
        if largest >= self.rows:
            raise TokenizerError(f"{path}: token {token!r} has id {largest}, but the embedding has {self.rows} rows")

    def _named_id(self, folder: Path, name: str) -> int | None:
        token = self.named_tokens.get(name)
        if token is None:
            return None
        found: int | None = self._backend.token_to_id(token)
        if found is None:
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: {name} {token!r} is not in tokenizer.json")
        return found

    def is_added(self, token_id: int) -> bool:
        """Whether the id is an added token: matched as a whole in text, never the result of a merge."""
        return token_id in self._added

    def unknown_ids(self) -> list[int]:
        """Ids below `rows` that have no string, ascending."""
        return [id_ for id_ in range(self.rows) if id_ not in self._ids]

    def check_id(self, token_id: int, what: str = "token id") -> int:
        """Returns the id if the embedding has a row for it; raises TextError naming both numbers otherwise."""
        if not 0 <= token_id < self.rows:
            raise TextError(f"{what} {token_id} is out of range: the embedding has {self.rows} rows")
        return token_id

    def encode(self, text: str) -> list[int]:
        """Exactly the ids of the text: nothing is added, nothing cut. Added tokens written out in it are recognised."""
        return self._encode(text, add_special_tokens=False)

    def encode_raw(self, text: str, add_bos: bool | None = None) -> list[int]:
        """The ids of a raw prompt.

        With `add_bos` unset the model's files decide: `add_bos_token` of tokenizer_config.json if it is there, else the
        post-processor of tokenizer.json. True or False overrides both. Raises TextError if BOS is asked for and the
        model has none.
        """
        ids = self._encode(text, add_special_tokens=True)
        adds_bos = self._encode("", add_special_tokens=True)[:1] == [self.bos_id]
        configured = self.config.get("add_bos_token")
        wanted = add_bos
        if wanted is None:
            wanted = configured if isinstance(configured, bool) and self.bos_id is not None else adds_bos
        if wanted and not adds_bos:
            if self.bos_id is None:
                raise TextError("add_bos: this model's tokenizer has no BOS token")
            return [self.bos_id, *ids]
        return ids[1:] if adds_bos and not wanted else ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")  # the library's own complaint about a lone surrogate says nothing useful
        except UnicodeEncodeError as error:
            raise TextError(f"text is not valid Unicode: lone surrogate at character {error.start}") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, None where the embedding row has no string. Raises TextError as check_id."""
        found: str | None = self._backend.id_to_token(self.check_id(token_id))
        return found

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of ids: what a Detokenizer says in pieces, joined."""
        detokenizer = self.detokenizer(skip_special=skip_special, at_start=at_start)
        return detokenizer.extend(ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special: bool = True, at_start: bool = True) -> Detokenizer:
        """A new incremental detokeniser. `skip_special` drops added tokens marked `special: true`, and only those."""
        skipped = self.special_ids if skip_special else frozenset()

        def token_of(token_id: int) -> str | None:
            return None if token_id in skipped else self.token(token_id)

        return Detokenizer(self._decoder, token_of, at_start=at_start, pieces=self._pieces[skip_special])


def _keep_written_ids(backend: tokenizers.Tokenizer, schema: dict[str, Any]) -> bool:
    """If the library renumbered an added token, enters them all into the vocabulary of `schema` and returns True.

    The library hands out the next free ids to added tokens and drops a gap that the file has (it warns only). A token
    that the model's vocabulary holds keeps its id, and without merges nothing else can produce it.
    """
    vocabulary = schema["model"].get("vocab")
    added = {token["content"]: token["id"] for token in schema.get("added_tokens") or []}
    if not isinstance(vocabulary, dict) or all(backend.token_to_id(content) == id_ for content, id_ in added.items()):
        return False
    missing = {content: id_ for content, id_ in added.items() if content not in vocabulary}
    if set(missing.values()) & set(vocabulary.values()):
        return False
    vocabulary.update(missing)
    return True


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, as transformers finds them: tokenizer_config.json, and special_tokens_map.json above it
    in old folders, which are those without `added_tokens_decoder`."""
    sources = [(folder / "tokenizer_config.json", config)]
    if "added_tokens_decoder" not in config:
        path = folder / "special_tokens_map.json"
        sources.append((path, read_object(path)))
    found: dict[str, str] = {}
    for path, source in sources:
        for name in NAMED_TOKENS:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if value is None:
                continue
            if not isinstance(value, str):
                raise TokenizerError(f"{path}: {name} is {json.dumps(value)}, a string is expected")
            found[name] = value
    return found
