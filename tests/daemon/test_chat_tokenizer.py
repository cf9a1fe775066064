"""A14-A16, A19, B01, C08: vocabulary sizes, schemas, byte fallback, BOS, end-of-sequence ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from colibri.daemon.chat import TextError, TextModel, TokenizerError
from testkit.tiny_tokenizer import ADDED, CHAT_TEMPLATE, EMOJI, HAN, added_ids, tokenizer_json, write_tokenizer

BOS_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [295], "tokens": ["<bos>"]}},
}


def rewrite(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def with_schema(folder: Path, schema: dict[str, Any]) -> Path:
    write_tokenizer(folder, 128)
    (folder / "tokenizer.json").write_text(json.dumps(schema))
    return folder


# ---- A14: three numbers ------------------------------------------------------------------------------------------


def scattered(last_id: int) -> dict[str, Any]:
    """120 entries and three added tokens at 120, 121 and `last_id`."""
    schema = tokenizer_json(125)
    tokens = zip(schema["added_tokens"][:3], (120, 121, last_id), strict=True)
    schema["added_tokens"] = [token | {"id": id_} for token, id_ in tokens]
    return schema


def test_rows_without_a_string_are_banned_and_decode_to_nothing(tmp_path: Path) -> None:
    model = TextModel.open(with_schema(tmp_path, scattered(125)), vocab_rows=128)
    assert model.banned_ids() == [122, 123, 124, 126, 127]
    assert model.decode(range(122, 125)) == ""
    assert model.encode("<bos><end_turn>") == [120, 125]
    assert model.decode([125], skip_special=False) == "<end_turn>"


def test_an_id_beyond_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'<end_turn>' has id 130, but the embedding has 128 rows"):
        TextModel.open(with_schema(tmp_path, scattered(130)), vocab_rows=128)


def test_an_added_token_whose_id_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'<end_turn>' is written with id 7 but would get id 122"):
        TextModel.open(with_schema(tmp_path, scattered(7)), vocab_rows=128)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "config.json: text_config"])
def test_an_eos_id_beyond_the_embedding_is_refused(tmp_path: Path, where: str) -> None:
    write_tokenizer(tmp_path, 128)
    entry = {"eos_token_id": [1, 128]}
    (tmp_path / where.split(":")[0]).write_text(json.dumps({"text_config": entry} if "text" in where else entry))
    with pytest.raises(TextError, match=rf"{where}: eos_token_id 128 is out of range: the embedding has 128 rows"):
        TextModel.open(tmp_path, vocab_rows=128)


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 128)
    think = {"content": "<think>", "special": False, "lstrip": False}
    listed = {"128": think, "129": {"content": "<hidden>", "special": True}}
    rewrite(tmp_path / "tokenizer_config.json", added_tokens_decoder=listed)
    model = TextModel.open(tmp_path, vocab_rows=130)
    assert model.encode("<think><hidden>") == [128, 129]
    assert model.decode([128, 129]) == "<think>"
    rewrite(tmp_path / "tokenizer_config.json", added_tokens_decoder={"126": {"content": "<eos>"}})
    with pytest.raises(TokenizerError, match="'<eos>' id 126, the tokenizer gives it id 124"):
        TextModel.open(tmp_path, vocab_rows=130)


# ---- A15: schema details -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_ids_equal_the_library(tmp_path: Path, ignore_merges: bool, pairs: bool) -> None:
    schema = tokenizer_json(300, ignore_merges=ignore_merges)
    model = schema["model"]
    model["vocab"] |= {"abc": 295, "Ġ t": 296}  # no merge reaches them
    for token in schema["added_tokens"]:
        token["id"] += 2
    if pairs:
        model["merges"] = [merge.split(" ") for merge in model["merges"]]
    mine = TextModel.open(with_schema(tmp_path, schema), vocab_rows=302)
    library = tokenizers.Tokenizer.from_str(json.dumps(schema))
    for text in ("abc", " abc abcd", "the thing " + EMOJI + HAN, "", "\x00", " \n\t", "<eos>x<note>"):
        assert mine.encode(text) == library.encode(text).ids
    assert (295 in mine.encode("abc")) is ignore_merges


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "2.0"}, "schema version '2.0' is not known"),
        ({"version": None}, "schema version None"),
        ({"model": {"type": "Quantum", "vocab": {}, "merges": []}}, "version '1.0', model type 'Quantum'"),
        ({"model": 5}, "without a `model` object"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder of type 'WordPiece'"),
        ({"model": tokenizer_json()["model"] | {"vocab": {}, "merges": []}, "added_tokens": []}, "vocabulary is empty"),
    ],
)
def test_an_unknown_schema_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with_schema(tmp_path, tokenizer_json() | change)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=named) as caught:
        TextModel.open(tmp_path, vocab_rows=128)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, data: bytes) -> None:
    write_tokenizer(tmp_path, 128)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=name):
        TextModel.open(tmp_path, vocab_rows=128)


def test_a_missing_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json: no such file"):
        TextModel.open(tmp_path, vocab_rows=128)


def test_a_saved_truncation_or_padding_changes_nothing(tmp_path: Path) -> None:
    schema = tokenizer_json()
    schema["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    schema["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    schema["padding"] |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "x"}
    model = TextModel.open(with_schema(tmp_path, schema), vocab_rows=128)
    assert model.decode(model.encode("nothing is cut")) == "nothing is cut"


# ---- A16: byte fallback ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["é", HAN, "\U0001f469‍\U0001f469‍\U0001f467", "<0x0A>", "a  b", " lead"])
def test_byte_fallback_is_the_identity(tmp_path: Path, text: str) -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    schema = tokenizer_json() | {
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    }
    schema["model"] |= {"vocab": vocab, "merges": [], "byte_fallback": True, "unk_token": "<unk>"}
    with_schema(tmp_path, schema)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    model = TextModel.open(tmp_path, vocab_rows=len(vocab))
    assert model.decode(model.encode(text)) == text


# ---- A19: BOS ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processor", [None, BOS_PROCESSOR], ids=["plain", "processor"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("template_bos", [True, False])
def test_bos_comes_from_the_template_in_chat_and_from_the_config_in_raw_text(
    tmp_path: Path, template_bos: bool, add_bos: bool | None, processor: dict[str, Any] | None
) -> None:
    template = CHAT_TEMPLATE if template_bos else CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    ids = write_tokenizer(tmp_path, 300, chat_template=template, add_bos_token=add_bos, post_processor=processor)
    model = TextModel.open(tmp_path, vocab_rows=300)
    bos, text = ids["<bos>"], model.tokenizer.encode("hi")
    expected = add_bos if add_bos is not None else processor is not None
    assert model.encode("hi") == [bos] * expected + text
    assert model.encode("hi", add_bos=True) == [bos, *text]
    assert model.encode("hi", add_bos=False) == text
    assert model.encode("") == [bos] * expected
    chat = [{"role": "user", "content": "hi"}]
    assert model.chat_ids(chat).count(bos) == int(template_bos)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert model.chat_ids(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_bos_written_by_the_user_does_not_count_as_the_tokenizers(tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path, 300, add_bos_token=True)
    model = TextModel.open(tmp_path, vocab_rows=300)
    assert model.encode("<bos>") == [ids["<bos>"]] * 2
    assert model.encode("<bos>", add_bos=False) == [ids["<bos>"]]


def test_asking_for_a_bos_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300, add_bos_token=True)
    rewrite(tmp_path / "tokenizer_config.json", bos_token=None)
    model = TextModel.open(tmp_path, vocab_rows=300)
    assert model.encode("hi") == model.encode("hi", add_bos=False)
    with pytest.raises(TextError, match="no BOS token"):
        model.encode("hi", add_bos=True)


def test_a_named_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    rewrite(tmp_path / "tokenizer_config.json", eos_token="<|nowhere|>")
    with pytest.raises(TokenizerError, match=r"eos_token '<\|nowhere\|>' is not in tokenizer.json"):
        TextModel.open(tmp_path, vocab_rows=300)


@pytest.mark.parametrize("text", ["", "<bos>", "<eos>", "<end_turn>", " \n ", "\x00"])
def test_degenerate_texts_are_ordinary(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path, 300)
    model = TextModel.open(tmp_path, vocab_rows=300)
    assert model.decode(model.encode(text), skip_special=False) == text


def test_a_lone_surrogate_is_an_error_not_a_crash(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    with pytest.raises(TextError, match="lone surrogate at character 1"):
        TextModel.open(tmp_path, vocab_rows=300).encode("a\ud800")


# ---- B01: more than one end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [9, [5, 9]])
def test_every_source_of_eos_counts_and_is_named(tmp_path: Path, generation: int | list[int]) -> None:
    ids = write_tokenizer(tmp_path, 128)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": [11]}}))
    model = TextModel.open(tmp_path, vocab_rows=128)
    assert model.eos_ids == (5, 9, 11, ids["<eos>"], ids["<end_turn>"])
    assert model.eos_sources[9] == ("generation_config.json",)
    assert model.eos_sources[ids["<eos>"]] == ("tokenizer_config.json",)
    assert model.eos_sources[ids["<end_turn>"]] == ("chat template",)


@pytest.mark.parametrize("value", ["5", [None], True, 1.0])
def test_a_malformed_eos_is_refused(tmp_path: Path, value: object) -> None:
    write_tokenizer(tmp_path, 128)
    rewrite(tmp_path / "generation_config.json", eos_token_id=value)
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id"):
        TextModel.open(tmp_path, vocab_rows=128)


def test_the_helper_covers_the_sizes_it_promises() -> None:
    for size in range(128, 301):
        schema = tokenizer_json(size)
        used = {*schema["model"]["vocab"].values(), *added_ids(size).values()}
        assert used == set(range(size)), size
        assert len(schema["model"]["vocab"]) == size - len(ADDED), size
