"""C11: stop strings over token borders, against a model that reads one character at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.daemon.chat import StopMatcher, TextError, TextModel
from testkit.tiny_tokenizer import EMOJI, write_tokenizer


def run(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """What each piece releases, what the end releases, and the stop that matched."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    released = [matcher.push(piece) for piece in pieces]
    return [*released, matcher.flush()], matcher.matched


TOKENS = ["ab", "cd", "ef"]


@pytest.mark.parametrize(
    ("stops", "released", "matched"),
    [
        (["bc"], ["a", "", "", ""], "bc"),
        (["bcde"], ["a", "", "", ""], "bcde"),
        (["f"], ["ab", "cd", "e", ""], "f"),
        (["cd", "bcd"], ["a", "", "", ""], "bcd"),
        (["bcd", "cd"], ["a", "", "", ""], "bcd"),
        (["bx"], ["a", "bcd", "ef", ""], None),
        (["fg"], ["ab", "cd", "e", "f"], None),
        (["bcde", "cd"], ["a", "b", "", ""], "cd"),
        ([], ["ab", "cd", "ef", ""], None),
    ],
)
def test_only_what_may_become_a_stop_is_held(stops: list[str], released: list[str], matched: str | None) -> None:
    assert run(TOKENS, stops) == (released, matched)


def test_the_stop_itself_is_released_on_request() -> None:
    assert run(TOKENS, ["bc"], include_stop=True) == (["a", "bc", "", ""], "bc")


def test_after_a_match_nothing_more_is_released() -> None:
    assert run(["xSTOPy", "z"], ["STOP"]) == (["x", "", ""], "STOP")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(TextError, match="stop string 1 is empty"):
        StopMatcher(["a", ""])


def reference(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """One character at a time; the answer stops once it ends in a stop string, the longest if there are several."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_any_cut_gives_what_the_character_model_gives(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        held = matcher.held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    shown += matcher.flush()
    assert (shown, matcher.matched) == reference("".join(pieces), stops, include_stop)


WORDS = st.text("ab", min_size=1, max_size=4)


@given(st.lists(WORDS, max_size=8), st.lists(WORDS, max_size=3))
def test_what_is_held_is_the_longest_possible_end_and_no_more(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for piece in pieces:
        seen += piece
        matcher.push(piece)
        if matcher.matched:
            return
        open_ends = [len(seen) - i for i in range(len(seen)) if any(stop.startswith(seen[i:]) for stop in stops)]
        assert len(matcher.held) == max(open_ends, default=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = tmp_path_factory.mktemp("tok")
    write_tokenizer(folder, 300)
    return TextModel.open(folder, vocab_rows=300)


def test_a_stop_in_the_prompt_does_not_count(model: TextModel) -> None:
    output = model.output(["STOP"])  # the prompt "... ST" never enters the output's state
    assert output.replay(model.encode("OP and on")) + output.flush().text == "OP and on"
    assert not output.stopped


def test_an_emoji_can_be_a_stop_though_its_bytes_come_apart(model: TextModel) -> None:
    output = model.output([EMOJI + "!"])
    texts = [output.push(id_).text for id_ in model.encode("a" + EMOJI + "!b")]
    assert "".join(texts) == "a"
    assert output.stopped
    assert output.flush().text == ""


def test_held_text_and_an_open_character_come_out_at_the_end(model: TextModel) -> None:
    output = model.output(["xyz"])
    ids = [*model.encode("axy"), model.encode(EMOJI)[0]]
    assert output.replay(ids) == "a"
    assert output.flush().text == "xy�"
    completing = model.output(["y�"])
    assert completing.replay(ids) == "ax"
    assert completing.flush().stop == "y�"


IDS = st.lists(st.integers(0, 299), max_size=20)


@given(IDS, st.integers(0, 20), st.lists(st.text("abe ", min_size=1, max_size=3), max_size=2))
def test_replay_of_the_log_continues_where_the_stream_was(
    model: TextModel, ids: list[int], cut: int, stops: list[str]
) -> None:
    straight = model.output(stops)
    pieces = [straight.push(id_) for id_ in ids]
    again = model.output(stops)
    assert again.replay(ids[:cut]) == "".join(piece.text for piece in pieces[:cut])
    assert [again.push(id_) for id_ in ids[cut:]] == pieces[cut:]
    assert again.flush() == straight.flush()
