"""Appending turns by the sentinel rule: what a session holds equals what transformers renders for the whole chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from colibri.daemon.chat import TemplateError, TextModel
from testkit.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

VOCAB = 400
CHATML = CHAT_TEMPLATE
SYSTEM_FIRST = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}{{ '<turn>system\nYou are Colibri<end_turn>\n' }}{% endif %}"
    + CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
)
# Alternation enforced, the reply closed by <eos>, no header for the assistant: Mixtral's shape.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
# Nothing closes a reply but the next role marker, which the model itself samples as its end: GLM's shape.
ROLE_MARKER = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<turn>{{ m.content }}"
    "{% elif m.role == 'tool' %}<note>{{ m.content }}{% else %}A:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
# Old reasoning is dropped from all but the last reply, as Qwen3's template does.
THINKING = (
    "{% for m in messages %}<turn>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<end_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALPACA = (
    "{% for m in messages %}{{ '\n\n### ' + m.role + ':\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### assistant:\n' }}{% endif %}"
)
USER = {"role": "user", "content": "What is the capital of France?"}
TURNS = [[USER], [{"role": "user", "content": " and of Spain?\n"}], [{"role": "user", "content": "Thanks"}]]
REPLIES = ["Paris.", "Madrid, of course", "Any time!\n"]


def open_model(folder: Path, template: str) -> tuple[TextModel, Any]:
    write_tokenizer(folder, VOCAB, chat_template=template)
    return TextModel.open(folder, vocab_rows=VOCAB), transformers.AutoTokenizer.from_pretrained(str(folder))


def talk(model: TextModel, end: int | None) -> tuple[list[int], list[list[int]]]:
    """A session's log after all turns, and at each turn; replies end by sampling `end` (None: by a limit)."""
    log: list[int] = []
    prompts = []
    for turn, reply in zip(TURNS, REPLIES, strict=True):
        log += model.append_ids(turn, log[-1:])
        prompts.append(list(log))
        log += model.tokenizer.encode(reply) + ([] if end is None else [end])
    return log, prompts


def whole_chats() -> list[list[dict[str, str]]]:
    """The conversation as a stateless client would send it at each turn."""
    chats, messages = [], []
    for turn, reply in zip(TURNS, REPLIES, strict=True):
        messages += turn
        chats.append(list(messages))
        messages.append({"role": "assistant", "content": reply})
    return chats


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<end_turn>"), (SYSTEM_FIRST, "<end_turn>"), (INSTRUCT, "<eos>"), (ROLE_MARKER, "<turn>")],
)
@pytest.mark.parametrize("sampled", [True, False])
def test_each_turns_prompt_equals_the_whole_rendering(tmp_path: Path, template: str, end: str, sampled: bool) -> None:
    model, theirs = open_model(tmp_path, template)
    end_id = theirs.convert_tokens_to_ids(end)
    assert model.closing.end_of_turn == end_id
    assert end_id in model.eos_ids
    _, prompts = talk(model, end_id if sampled else None)
    for prompt, chat in zip(prompts, whole_chats(), strict=True):
        assert prompt == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


@pytest.mark.oracle
def test_the_finished_session_is_the_whole_rendering_up_to_the_last_end_of_turn(tmp_path: Path) -> None:
    model, theirs = open_model(tmp_path, CHATML)
    log, _ = talk(model, theirs.convert_tokens_to_ids("<end_turn>"))
    chat = [*whole_chats()[-1], {"role": "assistant", "content": REPLIES[-1]}]
    assert [*log, *model.tokenizer.encode("\n")] == theirs.apply_chat_template(chat)["input_ids"]


def test_another_end_of_sequence_stays_and_the_turn_is_closed_behind_it(tmp_path: Path) -> None:
    model, theirs = open_model(tmp_path, CHATML)
    eos, end = theirs.convert_tokens_to_ids(["<eos>", "<end_turn>"])
    appended = model.append_ids(TURNS[1], [1, 2, eos])
    assert appended[0] == end
    assert model.append_ids(TURNS[1], [1, 2, end]) == appended[1:]


def test_a_role_marker_that_the_next_message_does_not_have_is_written_out(tmp_path: Path) -> None:
    model, theirs = open_model(tmp_path, ROLE_MARKER)
    turn, note = theirs.convert_tokens_to_ids(["<turn>", "<note>"])
    result = [{"role": "tool", "content": "7"}]
    assert model.append_ids(result, [note])[0] != note  # sampled by the model: not repeated
    assert model.append_ids(result, [turn])[0] == note
    assert model.append_ids(TURNS[1], [note])[0] == turn


def test_an_end_of_turn_in_the_users_text_is_not_taken_for_the_replys(tmp_path: Path) -> None:
    model, theirs = open_model(tmp_path, ALPACA)
    eos = theirs.convert_tokens_to_ids("<eos>")
    assert model.closing.end_of_turn is None
    appended = model.append_ids([{"role": "user", "content": "<eos>hi"}], [eos])
    assert model.decode(appended, skip_special=False) == "\n\n### user:\n<eos>hi\n\n### assistant:\n"


def test_old_reasoning_stays_in_the_session(tmp_path: Path) -> None:
    model, _ = open_model(tmp_path, THINKING)
    assert model.append_text(TURNS[1], False) == "<end_turn>\n<turn>user\n and of Spain?\n<end_turn>\n<turn>assistant\n"
    assert model.append_text(TURNS[1], False, arguments={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert model.append_text(TURNS[0], True).startswith("<turn>user\nWhat")


def test_the_sentinel_gives_way_to_the_users_words(tmp_path: Path) -> None:
    model, _ = open_model(tmp_path, CHATML)
    word = "colibrisentinel"
    text = model.append_text([{"role": "user", "content": word}], False)
    assert text == f"<end_turn>\n<turn>user\n{word}<end_turn>\n<turn>assistant\n"


def test_several_new_messages_are_appended_together(tmp_path: Path) -> None:
    model, _ = open_model(tmp_path, CHATML)
    messages = [{"role": "system", "content": "Be brief"}, USER]
    assert "<turn>system\nBe brief<end_turn>\n<turn>user" in model.append_text(messages, False)


def test_what_belongs_to_the_start_of_a_chat_is_refused_later(tmp_path: Path) -> None:
    late_system = "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}{% endif %}" + CHATML.replace(
        "%}{{ '<turn>'", "if message.role != 'system' %}{{ '<turn>'"
    )
    model, _ = open_model(tmp_path, late_system)
    with pytest.raises(TemplateError, match="system message only at the start"):
        model.append_ids([{"role": "system", "content": "Be brief"}, USER], [1])
    tools_first = "{{ tools | tojson }}{{ style }}" + CHATML
    model, _ = open_model(tmp_path, tools_first)
    assert model.append_ids([USER], [], tools=[{"name": "t"}], arguments={"style": "x"})
    with pytest.raises(TemplateError, match=r"tools: .* first turn"):
        model.append_ids([USER], [1], tools=[{"name": "t"}])
    with pytest.raises(TemplateError, match=r"template argument 'style': .* first turn"):
        model.append_ids([USER], [1], arguments={"style": "x"})


def test_an_argument_that_marks_every_message_is_honoured_from_now_on(tmp_path: Path) -> None:
    every = CHATML.replace("message['content'] +", "message['content'] + ('/nothink' if think is false else '') +")
    model, _ = open_model(tmp_path, every)
    assert "Thanks/nothink<end_turn>" in model.append_text(TURNS[2], False, arguments={"think": False})
    assert "Thanks<end_turn>" in model.append_text(TURNS[2], False, arguments={"think": True})


EACH = "{% for m in messages %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (EACH + "{% if m.role == 'user' %}<turn>{{ m.content }}{% endif %}" + END, "a past reply 0 times"),
        (EACH + "<turn>{{ m.content }}{{ m.content }}" + END, "a past reply 2 times"),
        (EACH + "<turn>{{ m.content | upper }}" + END, "a past reply 0 times"),
        (EACH + "{{ m.content }}" + END, "nothing between a reply and the next message"),
        (
            "{{ messages[0].content }}<turn>{{ messages[1].content if messages[1] is defined }}<turn>",
            "a user's message 0 times",
        ),
        (EACH + "{{ m.content }}a " + END, "joins the end of a reply"),
        (
            "{% if messages[1] is defined %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}",
            "one question",
        ),
    ],
)
def test_a_template_without_a_working_sentinel_is_refused_by_name(tmp_path: Path, template: str, why: str) -> None:
    model, _ = open_model(tmp_path, template)
    assert model.render_chat([USER])
    for last_ids in ([], [1]):
        with pytest.raises(TemplateError, match=why):
            model.append_ids([USER], last_ids)
    assert any(why in problem for problem in model.problems)
