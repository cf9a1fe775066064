"""C10: characters split over tokens. The stream, joined, is the text of all ids; nothing is cut inside a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from colibri.daemon.chat import Detokenizer, TextError, TextModel, TokenizerError
from colibri.daemon.chat.detokenizer import piece_decoder
from testkit.tiny_tokenizer import EMOJI, byte_letter, tokenizer_json, write_tokenizer

VOCAB = 300
LIBRARY = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(VOCAB)))
BYTE_IDS: list[int] = [tokenizer_json(VOCAB)["model"]["vocab"][byte_letter(byte)] for byte in range(256)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("tok")
    write_tokenizer(folder, VOCAB)
    return TextModel.open(folder, vocab_rows=VOCAB + 4)


def stream(model: TextModel, ids: Sequence[int]) -> list[str]:
    """What each id releases, and what the end releases."""
    detokenizer = model.detokenizer()
    return [detokenizer.push(id_) for id_ in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("cuts", [(2, 2), (1, 3), (3, 1), (1, 1, 1, 1)])
def test_an_emoji_comes_out_once_and_whole(cuts: tuple[int, ...], tmp_path: Path) -> None:
    data, pieces, at = EMOJI.encode(), [], 0
    for cut in cuts:
        pieces.append("".join(byte_letter(byte) for byte in data[at : at + cut]))
        at += cut
    schema = tokenizer_json(VOCAB)
    for piece in pieces:  # entries that no merge reaches, so that any cut can be forced
        schema["model"]["vocab"].setdefault(piece, VOCAB + len(schema["model"]["vocab"]))
    write_tokenizer(tmp_path, VOCAB)
    (tmp_path / "tokenizer.json").write_text(json.dumps(schema))
    forced = TextModel.open(tmp_path, vocab_rows=800)
    ids = [schema["model"]["vocab"][piece] for piece in pieces]
    assert stream(forced, ids) == [""] * (len(ids) - 1) + [EMOJI, ""]


def test_a_character_left_open_at_the_end_is_flushed_as_one_replacement(model: TextModel) -> None:
    ids = [BYTE_IDS[byte] for byte in b"a" + EMOJI.encode()[:3]]
    assert stream(model, ids) == ["a", "", "", "", "�"]


def test_bad_bytes_do_not_hold_the_stream_longer_than_one_character(model: TextModel) -> None:
    assert stream(model, [BYTE_IDS[0x80], BYTE_IDS[0x41]]) == ["�", "A", ""]  # a lone continuation byte
    assert stream(model, [BYTE_IDS[0xF0], BYTE_IDS[0x41]]) == ["", "�A", ""]  # a start without its rest
    many = stream(model, [BYTE_IDS[0xFF]] * 5)
    assert many == ["�"] * 5 + [""]


@given(st.lists(st.sampled_from(range(VOCAB)), max_size=24))
def test_pieces_joined_equal_the_library_on_all_ids(model: TextModel, ids: list[int]) -> None:
    whole = LIBRARY.decode(ids, skip_special_tokens=True)
    assert "".join(stream(model, ids)) == whole == model.decode(ids)
    assert model.decode(ids, skip_special=False) == LIBRARY.decode(ids, skip_special_tokens=False)


@given(st.binary(max_size=16))
def test_any_bytes_decode_as_python_decodes_them(model: TextModel, data: bytes) -> None:
    pieces = stream(model, [BYTE_IDS[byte] for byte in data])
    assert "".join(pieces) == data.decode("utf-8", "replace")
    for index in range(len(data)):
        held = data[: index + 1].decode("utf-8", "replace")[len("".join(pieces[: index + 1])) :]
        # At most the bytes of one open character. The start of an encoded surrogate (ED A0) counts as open, and is two
        # ill-formed sequences if nothing follows.
        assert held in ("", "�", "��")


@given(st.text(max_size=20))
def test_every_text_survives_the_round_trip(model: TextModel, text: str) -> None:
    assert model.decode(model.encode(text), skip_special=False) == text


@given(st.lists(st.sampled_from(range(VOCAB)), max_size=24), st.integers(0, 24))
def test_replaying_the_ids_restores_the_state(model: TextModel, ids: list[int], cut: int) -> None:
    pieces = stream(model, ids)
    again = model.detokenizer()
    assert again.extend(ids[:cut]) == "".join(pieces[:cut] if cut < len(ids) else pieces[:-1])
    assert [again.push(id_) for id_ in ids[cut:]] + [again.flush()] == pieces[min(cut, len(ids)) :]


def test_special_tokens_are_dropped_and_other_added_tokens_are_kept(model: TextModel) -> None:
    ids = [VOCAB - 5 + index for index in range(5)]  # <bos> <eos> <end_turn> <turn> <note>
    assert model.decode(ids) == "<note>"
    assert model.decode(ids, skip_special=False) == "<bos><eos><end_turn><turn><note>"


def test_a_special_token_inside_a_character_does_not_break_it(model: TextModel) -> None:
    first, second = model.encode(EMOJI)
    assert model.decode([first, VOCAB - 3, second]) == EMOJI


def test_rows_without_a_string_decode_to_nothing_and_higher_ids_are_refused(model: TextModel) -> None:
    assert model.decode([VOCAB, VOCAB + 3]) == ""
    for id_ in (VOCAB + 4, -1, 2**31):
        with pytest.raises(TextError, match=rf"{id_} is out of range: the embedding has {VOCAB + 4} rows"):
            model.decode([id_])


CHAIN: list[dict[str, object]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
SENTENCEPIECE: dict[str, object] = {"type": "Sequence", "decoders": CHAIN}
PIECES = ["▁", "▁▁", "▁Hello", "▁wor", "ld", "é", "<0xF0>", "<0x9F>", "<0x91>", "<0xA9>", "<0x0A>", "<0xZZ>", "<0x0A>x"]


def sentencepiece_like(decoder: dict[str, object]) -> tuple[tokenizers.Tokenizer, Detokenizer]:
    schema = tokenizer_json(128)
    schema["added_tokens"], schema["decoder"], schema["pre_tokenizer"] = [], decoder, None
    schema["model"] |= {"vocab": {piece: index for index, piece in enumerate(PIECES)}, "merges": []}
    library = tokenizers.Tokenizer.from_str(json.dumps(schema))
    return library, Detokenizer(piece_decoder(decoder), library.id_to_token)


@given(st.lists(st.sampled_from(range(len(PIECES))), max_size=12))
@pytest.mark.parametrize(
    "decoder",
    [
        SENTENCEPIECE,
        SENTENCEPIECE | {"decoders": CHAIN[:3]},
        SENTENCEPIECE | {"decoders": [*CHAIN[:3], CHAIN[3] | {"start": 2}]},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    ],
    ids=["llama", "no-strip", "strip-two", "metaspace", "metaspace-never"],
)
def test_sentencepiece_decoders_equal_the_library_on_utf8(decoder: dict[str, object], ids: list[int]) -> None:
    library, detokenizer = sentencepiece_like(decoder)
    text = detokenizer.extend(ids) + detokenizer.flush()
    if "�" not in text:  # the library turns a whole run of byte tokens bad if one of them is
        assert text == library.decode(ids)


def test_byte_tokens_become_bytes_and_a_good_character_survives_a_bad_neighbour() -> None:
    _, detokenizer = sentencepiece_like(SENTENCEPIECE)
    emoji = [PIECES.index(f"<0x{byte:02X}>") for byte in EMOJI.encode()]
    assert detokenizer.extend([*emoji, emoji[1]]) + detokenizer.flush() == EMOJI + "�"


def test_a_leading_space_is_kept_where_the_text_is_a_continuation() -> None:
    library, _ = sentencepiece_like(SENTENCEPIECE)
    decoder = piece_decoder(SENTENCEPIECE)
    ids = [PIECES.index("▁wor"), PIECES.index("ld")]
    assert Detokenizer(decoder, library.id_to_token).extend(ids) == "world"
    assert Detokenizer(decoder, library.id_to_token, at_start=False).extend(ids) == " world"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "None"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "CTC"}, "CTC"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace"}]}, "Fuse, Replace"),
        ({"type": "Sequence", "decoders": []}, "Sequence"),
        ({"type": "Sequence", "decoders": [CHAIN[0] | {"pattern": {"Regex": "a"}}, CHAIN[2]]}, "Regex"),
        ({"type": "Sequence", "decoders": [CHAIN[2], CHAIN[3] | {"stop": 1}]}, "stop 1"),
        ({"type": "Metaspace", "replacement": "▁▁"}, "▁▁"),
    ],
)
def test_decoders_without_bytes_per_token_are_refused_by_name(decoder: object, named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        piece_decoder(decoder)
