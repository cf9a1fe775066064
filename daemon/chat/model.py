"""TextModel: all that the service needs to know about a model's text, opened from the container's tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from colibri.daemon.chat.detokenizer import Detokenizer
from colibri.daemon.chat.errors import TemplateError, TokenizerError
from colibri.daemon.chat.files import read_object
from colibri.daemon.chat.output import OutputText
from colibri.daemon.chat.stops import StopMatcher
from colibri.daemon.chat.template import ChatTemplate, Clock, Message, load_template
from colibri.daemon.chat.tokenizer import Tokenizer
from colibri.daemon.chat.turns import Closing, TurnAppender

Tools = Sequence[Mapping[str, Any]]


class TextModel:
    """Tokenizer, chat template and end-of-sequence ids of one model. Immutable once open; safe from several threads.

    A chat template that is missing, does not compile or cannot be used incrementally does not keep the model from
    opening, for raw text works without it: `problems` says what is wrong, and calls that need it raise TemplateError.
    `notes` are remarks for the journal, such as a second, different template that was passed over.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, now: Clock) -> None:
        self.tokenizer = tokenizer
        self.generation_config = read_object(folder / "generation_config.json")
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._template = self._open_template(folder, now)
        self._appender = self._open_appender()
        self.eos_sources = self._eos_sources(folder)
        self.eos_ids = tuple(sorted(self.eos_sources))

    @classmethod
    def open(cls, folder: Path, *, vocab_rows: int, now: Clock = datetime.now) -> TextModel:
        """Opens tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
        generation_config.json and config.json of `folder`; all but the first may be missing.

        `vocab_rows`: rows of the embedding. `now`: clock for templates that write the date.
        Raises TokenizerError naming file and fault.
        """
        return cls(folder, Tokenizer(folder, vocab_rows), now)

    def _open_template(self, folder: Path, now: Clock) -> ChatTemplate | None:
        try:
            template = load_template(folder, self.tokenizer.config, self.tokenizer.named_tokens, now)
        except TemplateError as error:
            self.problems.append(str(error))
            return None
        if template is None:
            self.problems.append("this model has no chat template")
        elif template.note:
            self.notes.append(template.note)
        return template

    def _open_appender(self) -> TurnAppender | None:
        if self._template is None:
            return None
        try:
            return TurnAppender(self._template, self.tokenizer)
        except TemplateError as error:
            self.problems.append(str(error))
            return None

    def _eos_sources(self, folder: Path) -> dict[int, tuple[str, ...]]:
        """Every id that ends an answer, with the places that say so; a model may sample any of them."""
        config = read_object(folder / "config.json")
        inner = config.get("text_config")
        places = [
            ("generation_config.json", self.generation_config.get("eos_token_id")),
            ("config.json", config.get("eos_token_id")),
            ("config.json: text_config", inner.get("eos_token_id") if isinstance(inner, dict) else None),
            ("tokenizer_config.json", self.tokenizer.eos_id),
            ("chat template", self._appender.closing.end_of_turn if self._appender else None),
        ]
        sources: dict[int, tuple[str, ...]] = {}
        for place, value in places:
            for token_id in _ids(folder, place, value):
                self.tokenizer.check_id(token_id, f"{place}: eos_token_id")
                sources[token_id] = (*sources.get(token_id, ()), place)
        return sources

    @property
    def vocab_rows(self) -> int:
        return self.tokenizer.rows

    @property
    def renderer(self) -> str:
        """Where chats are rendered from, for GetServerInfo and RenderChat: "jinja:<source>", "" without a template."""
        return f"jinja:{self._template.source}" if self._template else ""

    @property
    def closing(self) -> Closing:
        """How the template closes a reply. Raises TemplateError if the template is refused for incremental chat."""
        return self._need_appender().closing

    def banned_ids(self) -> list[int]:
        """Ids that must never be sampled, ascending: embedding rows without a string."""
        return self.tokenizer.unknown_ids()

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """The ids of a raw prompt; see Tokenizer.encode_raw."""
        return self.tokenizer.encode_raw(text, add_bos)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of ids; raises TextError for an id without an embedding row."""
        return self.tokenizer.decode(ids, skip_special=skip_special, at_start=at_start)

    def detokenizer(self, *, at_start: bool = True) -> Detokenizer:
        return self.tokenizer.detokenizer(at_start=at_start)

    def output(self, stops: Sequence[str] = (), *, include_stop: bool = False, at_start: bool = True) -> OutputText:
        """The text of a new answer. `at_start` is False where the answer continues raw text of the prompt."""
        return OutputText(self.detokenizer(at_start=at_start), StopMatcher(stops, include_stop=include_stop))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A whole conversation as text; raises TemplateError as ChatTemplate.render, or if there is no template."""
        return self._need_template().render(
            messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
        )

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """A whole conversation as ids: exactly what the template writes; the tokenizer adds no BOS of its own."""
        return self.tokenizer.encode(
            self.render_chat(messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt)
        )

    def append_text(
        self,
        messages: Sequence[Message],
        first_turn: bool,
        *,
        tools: Tools | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a session's next turn: the whole rendering for the first one, else what follows a reply."""
        if first_turn:
            return self.render_chat(
                messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
            )
        return self._need_appender().append_text(
            messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
        )

    def append_ids(
        self,
        messages: Sequence[Message],
        last_ids: Sequence[int],
        *,
        tools: Tools | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a session's next turn. `last_ids`: the end of its log (one id suffices), empty for the first turn.

        The module turns.py states which end-of-turn tokens enter the KV. Raises TemplateError as `append_text`.
        """
        if not last_ids:
            self._need_appender()  # refuse a session that could not go on before its first turn, not at its second
            return self.chat_ids(
                messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
            )
        return self._need_appender().append_ids(
            messages, last_ids, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
        )

    def _need_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateError("; ".join(self.problems))
        return self._template

    def _need_appender(self) -> TurnAppender:
        self._need_template()
        if self._appender is None:
            raise TemplateError("; ".join(self.problems))
        return self._appender


def _ids(folder: Path, place: str, value: Any) -> list[int]:
    """eos_token_id may be missing, one id or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise TokenizerError(f"{folder}: {place}: eos_token_id {token_id!r} is not an integer")
    return ids
