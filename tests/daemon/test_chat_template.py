"""A17, A18: chat templates give the bytes that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

from colibri.daemon.chat import TemplateError, TextModel, TokenizerError
from testkit.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

VOCAB = 300
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{% for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
  {% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
  {% endif %}
"""
# All five functions of A18 and `namespace`, loop controls, dict, and what trim_blocks and lstrip_blocks do to it.
EVERYTHING = """{%- set ns = namespace(last=-1, system='') %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
{%- endfor %}
Year {{ strftime_now('%Y') | length }}
{% if tools %}
  Tools:
  {% for tool in tools %}
{{ tool | tojson }}|{{ tool | tojson(indent=2) }}
{{ tool | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}
  {% endfor %}
{% endif %}
{% for message in messages %}
  {% if message.role not in ['user', 'assistant', 'tool'] %}
    {{ raise_exception('role ' + message.role + ' <b> is not known') }}
  {% endif %}
  {% if message.role == 'assistant' %}
<a>{% generation %}{{ message.content }}
    {% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% endgeneration %}</a>
  {% else %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
<{{ message.role }}{{ ' last' if loop.index0 == ns.last else '' }}>{{ message.content }}</{{ message.role }}>
  {% endif %}
{% endfor %}
{{ dict(a=1)['a'] }}{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ enable_thinking is defined and enable_thinking }}
{% if add_generation_prompt %}<a>{% endif %}

"""
REASONING = (
    "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}|{{ m.content }}"
    "|{{ m.name is defined }}]{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA_LIKE,
    "everything": EVERYTHING,
    "reasoning": REASONING,
    "tiny": CHAT_TEMPLATE,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "天気 <b> & 'x'",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <&>"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "What is the capital of France?"}],
    "turns": [
        {"role": "user", "content": " Hi <b>& 'x'\n"},
        {"role": "assistant", "content": "Hello 漢 \n"},
        {"role": "user", "content": "skip"},
        {"role": "user", "content": "Again\r\n\ttab"},
    ],
    "calls": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "content": "7 °C", "name": None},
    ],
}


def reference(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.oracle
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_the_bytes_are_those_of_transformers(tmp_path: Path, name: str, chat: str, prompt: bool) -> None:
    write_tokenizer(tmp_path, VOCAB, chat_template=TEMPLATES[name])
    model, theirs = TextModel.open(tmp_path, vocab_rows=VOCAB), reference(tmp_path)
    tools = [TOOL] if "tools" in TEMPLATES[name] else None
    arguments = {"enable_thinking": True} if name == "everything" else {}
    want = theirs.apply_chat_template(
        CHATS[chat], tools=tools, add_generation_prompt=prompt, tokenize=False, **arguments
    )
    got = model.render_chat(CHATS[chat], tools=tools, arguments=arguments, add_generation_prompt=prompt)
    assert got == want
    ids = theirs.apply_chat_template(CHATS[chat], tools=tools, add_generation_prompt=prompt, **arguments)["input_ids"]
    assert model.chat_ids(CHATS[chat], tools=tools, arguments=arguments, add_generation_prompt=prompt) == ids


def configure(folder: Path, **entries: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.oracle
@pytest.mark.parametrize("newlines", [0, 1, 2])
@pytest.mark.parametrize("place", ["config", "file", "both", "named"])
def test_file_order_and_the_last_newline(tmp_path: Path, place: str, newlines: int) -> None:
    end = "\n" * newlines
    write_tokenizer(
        tmp_path, VOCAB, chat_template=f"file {{{{ messages[0].content }}}}{end}" if place in ("file", "both") else None
    )
    if place in ("config", "both"):
        configure(tmp_path, chat_template=f"config {{{{ messages[0].content }}}}{end}")
    if place == "named":
        named = [("default", "plain"), ("tool_use", "tools {{ tools | length }}"), ("rag", "rag")]
        configure(
            tmp_path,
            chat_template=[{"name": n, "template": f"{text} {{{{ messages[0].content }}}}{end}"} for n, text in named],
        )
    model, theirs = TextModel.open(tmp_path, vocab_rows=VOCAB), reference(tmp_path)
    for tools in (None, [TOOL]) if place == "named" else (None,):
        want = theirs.apply_chat_template(CHATS["one"], tools=tools, tokenize=False)
        assert model.render_chat(CHATS["one"], tools=tools, add_generation_prompt=False) == want
    source = "chat_template.jinja" if place in ("file", "both") else "tokenizer_config.json:chat_template"
    assert model.renderer == f"jinja:{source}"
    noted = ["chat_template.jinja is used; tokenizer_config.json:chat_template differs and is passed over"]
    assert model.notes == (noted if place == "both" else [])


@pytest.mark.oracle
def test_templates_in_the_additional_folder_are_named_ones(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, chat_template="main {{ messages[0].content }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools[0].function.name }}")
    model, theirs = TextModel.open(tmp_path, vocab_rows=VOCAB), reference(tmp_path)
    for tools in (None, [TOOL]):
        want = theirs.apply_chat_template(CHATS["one"], tools=tools, tokenize=False)
        assert model.render_chat(CHATS["one"], tools=tools, add_generation_prompt=False) == want


@pytest.mark.oracle
@pytest.mark.parametrize("map_file", [False, True])
def test_named_special_tokens_are_variables(tmp_path: Path, map_file: bool) -> None:
    write_tokenizer(tmp_path, VOCAB, chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ sep_token }}|")
    configure(
        tmp_path,
        pad_token={
            "content": "<note>",
            "__type": "AddedToken",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": True,
        },
    )
    if map_file:
        (tmp_path / "special_tokens_map.json").write_text(
            json.dumps({"bos_token": "<turn>", "pad_token": {"content": "<eos>"}})
        )
    model, theirs = TextModel.open(tmp_path, vocab_rows=VOCAB), reference(tmp_path)
    want = theirs.apply_chat_template(CHATS["one"], tokenize=False)
    assert model.render_chat(CHATS["one"], add_generation_prompt=False) == want


def with_template(folder: Path, template: str, **options: Any) -> TextModel:
    write_tokenizer(folder, VOCAB, chat_template=template)
    return TextModel.open(folder, vocab_rows=VOCAB, **options)


def test_the_clock_is_injectable_and_takes_any_format(tmp_path: Path) -> None:
    model = with_template(
        tmp_path,
        "{{ strftime_now('%d %b %Y, %H:%M') }}|{{ strftime_now(format='%j') }}",
        now=lambda: datetime(2024, 2, 29, 7, 5),
    )
    assert model.render_chat(CHATS["one"]) == "29 Feb 2024, 07:05|060"


def test_a_refusal_comes_out_word_for_word(tmp_path: Path) -> None:
    model = with_template(
        tmp_path,
        "{% if messages[1].role == 'user' %}{{ raise_exception('Roles must alternate: <user> & user') }}{% endif %}",
    )
    with pytest.raises(TemplateError) as caught:
        model.render_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert str(caught.value) == "Roles must alternate: <user> & user"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% set ns = namespace(_x=1) %}",
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_failure_inside_a_template_is_a_template_error(tmp_path: Path, template: str) -> None:
    model = with_template(tmp_path, template)
    with pytest.raises(TemplateError, match=r"chat template chat_template\.jinja"):
        model.render_chat(CHATS["one"])


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% generation %}a", "{{ x | nofilter }}"])
def test_a_broken_template_leaves_raw_text_usable(tmp_path: Path, template: str) -> None:
    model = with_template(tmp_path, template)
    assert model.decode(model.encode("still here")) == "still here"
    with pytest.raises(TemplateError, match=r"chat_template\.jinja"):
        model.render_chat(CHATS["one"])


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, chat_template=None)
    model = TextModel.open(tmp_path, vocab_rows=VOCAB)
    assert model.renderer == ""
    for call in (model.render_chat, model.chat_ids, lambda messages: model.append_ids(messages, [1])):
        with pytest.raises(TemplateError, match="no chat template"):
            call(CHATS["one"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"enable_thinkin": True}, "'enable_thinkin' .*it reads: enable_thinking"),
        ({"messages": []}, "messages"),
        ({"bos_token": "x"}, "bos_token"),
        ({"namespace": 1}, "namespace"),
        ({"enable_thinking": object()}, "'enable_thinking': values of type object"),
    ],
)
def test_arguments_that_the_template_does_not_read_are_refused_by_name(
    tmp_path: Path, arguments: Mapping[str, Any], named: str
) -> None:
    model = with_template(tmp_path, EVERYTHING)
    with pytest.raises(TemplateError, match=named):
        model.render_chat(CHATS["one"], arguments=arguments)


def test_tools_for_a_template_without_tools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="tools are given"):
        with_template(tmp_path, CHATML).render_chat(CHATS["one"], tools=[TOOL])


def test_values_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        with_template(tmp_path, EVERYTHING).render_chat(CHATS["one"], tools=[{"deep": deep}])


def test_an_empty_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="at least one message"):
        with_template(tmp_path, CHATML).render_chat([])


def test_named_templates_without_a_default_are_named_in_the_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, chat_template=None)
    configure(tmp_path, chat_template=[{"name": "rag", "template": "x"}])
    model = TextModel.open(tmp_path, vocab_rows=VOCAB)
    with pytest.raises(TemplateError, match="rag"):
        model.render_chat(CHATS["one"])


@pytest.mark.parametrize("value", [5, [1], [{"name": "default"}]])
def test_a_malformed_template_entry_is_refused(tmp_path: Path, value: object) -> None:
    write_tokenizer(tmp_path, VOCAB, chat_template=None)
    configure(tmp_path, chat_template=value)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template"):
        TextModel.open(tmp_path, vocab_rows=VOCAB)
