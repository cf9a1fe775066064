"""Appending a turn to a session: the sentinel rule.

Nothing that is already in a session's log is ever written again, so a template that rewrites history (drops old
reasoning, inserts a date, re-serialises tool calls) cannot break the prefix. The text to append is what the template
writes *behind* a sentinel reply when the new messages are rendered behind it:

    render([user, assistant: SENTINEL, new messages ...], generation prompt)  =  head SENTINEL tail

`tail` begins with what closes a reply: for a ChatML-like template `<|im_end|>\\n`, for GLM the role marker of the next
message. The first added token in it is the template's *end of turn*. Which tokens enter the KV:

- The reply ended because that end of turn was sampled: it is the last id of the log and enters the KV as sampled; the
  tail is appended from behind it, so it is there once.
- The reply ended otherwise (token limit, stop string, cancel, another end-of-sequence id): what was sampled stays, and
  the whole tail is appended, end of turn included.

Where the sentinel does not come out once, unchanged, or would be joined with the closing text into one token, the
template is refused for incremental chat, by name and with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colibri.daemon.chat.errors import TemplateError
from colibri.daemon.chat.template import ChatTemplate, Message
from colibri.daemon.chat.tokenizer import Tokenizer

# Letters only, so that no template trims it and no pre-tokenizer joins it with what follows.
_SENTINEL = "colibrisentinel"
_PROBE = "colibriprobe"


@dataclass(frozen=True)
class Closing:
    """How a template closes a reply in front of a user's message.

    `text` is everything between the reply and that message's own text; `ids` are its tokens. `end_of_turn` is the
    first added token among them and `index` its place; both are None if the template closes with ordinary text only.
    """

    text: str
    ids: tuple[int, ...]
    end_of_turn: int | None
    index: int | None


class TurnAppender:
    """Applies the sentinel rule to one template. Raises TemplateError if the template cannot be used incrementally."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.closing = self._probe()

    def append_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """What is written behind a reply that has not been closed: `tail`.

        Raises TemplateError as ChatTemplate.render does, and where a system message, tools or template arguments
        would have to change text that the session already holds.
        """
        return self._split(messages, tools, arguments, add_generation_prompt)[1]

    def append_ids(
        self,
        messages: Sequence[Message],
        last_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids to append to a session whose log ends in `last_ids` (the last one decides; empty is a TemplateError).

        Raises TemplateError as `append_text`.
        """
        if not last_ids:
            raise TemplateError("an empty session has no reply to append to: render its first turn whole")
        head, tail, sentinel = self._split(messages, tools, arguments, add_generation_prompt)
        ids = self._tail_ids(head, sentinel, tail)
        index = self.closing.index
        if index is None or last_ids[-1] not in self._sampled_ends(ids, index):
            return ids
        return ids[index + 1 :]

    def _sampled_ends(self, ids: Sequence[int], index: int) -> Sequence[int]:
        """The token at the end-of-turn place of this tail, if what precedes it is the template's own closing.

        It can differ from `closing.end_of_turn`: where the next message's role marker ends the turn, a tool result
        brings another marker than a user's message.
        """
        is_closing = tuple(ids[:index]) == self.closing.ids[:index] and len(ids) > index
        return [ids[index]] if is_closing and self._tokenizer.is_added(ids[index]) else []

    def _split(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> tuple[str, str, str]:
        """(head, tail, sentinel), checked to honour everything that was asked for."""
        if not messages:
            raise TemplateError("a chat needs at least one message")
        sentinel = _absent_word(_SENTINEL, (messages, tools, arguments))
        head, tail = self._render(sentinel, messages, tools, arguments, add_generation_prompt)
        self._refuse_late(sentinel, messages, tools, arguments or {}, add_generation_prompt, (head, tail))
        for message in messages:
            content = message.get("content")
            if message.get("role") == "system" and isinstance(content, str) and content.strip() not in tail:
                raise TemplateError("this model's chat template writes a system message only at the start of a chat")
        return head, tail, sentinel

    def _refuse_late(
        self,
        sentinel: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        add_generation_prompt: bool,
        rendered: tuple[str, str],
    ) -> None:
        """Refuses tools or an argument that would only change what the session already holds.

        What changes the tail too is honoured from this turn on (GLM's `enable_thinking` marks every user message).
        """
        head, tail = rendered
        others: list[tuple[str, Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]] = []
        if tools:
            others.append(("tools", None, arguments))
        for key in arguments:
            rest = {name: value for name, value in arguments.items() if name != key}
            others.append((f"template argument {key!r}", tools, rest))
        for what, fewer_tools, fewer_arguments in others:
            try:
                without = self._render(sentinel, messages, fewer_tools, fewer_arguments, add_generation_prompt)
            except TemplateError:
                continue  # the template cannot do without it, so it does not go unused
            if without[0] != head and without[1] == tail:
                raise TemplateError(
                    f"{what}: this model's chat template writes it only at the start of a chat, so it belongs to a "
                    "session's first turn"
                )

    def _render(
        self,
        sentinel: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> tuple[str, str]:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": sentinel}, *messages]
        text = self._template.render(
            turns, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
        )
        if text.count(sentinel) != 1:
            raise TemplateError(
                f"chat template {self._template.source} cannot be used for incremental chat: it writes a past reply "
                f"{text.count(sentinel)} times"
            )
        head, _, tail = text.partition(sentinel)
        return head, tail

    def _tail_ids(self, head: str, sentinel: str, tail: str) -> list[int]:
        """The tail's ids as they come out behind a reply: some tokenizers treat the very start of a text apart."""
        before = self._tokenizer.encode(head + sentinel)
        whole = self._tokenizer.encode(head + sentinel + tail)
        if whole[: len(before)] != before:
            raise TemplateError(
                f"chat template {self._template.source} cannot be used for incremental chat: the tokenizer joins the "
                f"end of a reply with the text that closes it ({tail[:20]!r})"
            )
        return whole[len(before) :]

    def _probe(self) -> Closing:
        """Tries the rule once and reads off how this template closes a reply."""
        head, tail = self._render(_SENTINEL, [{"role": "user", "content": _PROBE}], None, None, True)
        if tail.count(_PROBE) != 1:
            raise TemplateError(
                f"chat template {self._template.source} cannot be used for incremental chat: it writes a user's "
                f"message {tail.count(_PROBE)} times behind a past reply"
            )
        text = tail.partition(_PROBE)[0]
        if not text:
            raise TemplateError(
                f"chat template {self._template.source} cannot be used for incremental chat: it writes nothing "
                "between a reply and the next message"
            )
        self._tail_ids(head, _SENTINEL, tail)
        ids = tuple(self._tail_ids(head, _SENTINEL, text))
        index = next((i for i, token_id in enumerate(ids) if self._tokenizer.is_added(token_id)), None)
        return Closing(text, ids, None if index is None else ids[index], index)


def _absent_word(word: str, values: object) -> str:
    """`word`, lengthened until it occurs nowhere in the values."""
    text = repr(values)
    while word in text:
        word += "x"
    return word
