"""Chat templates, rendered to the same bytes as the `apply_chat_template` of transformers 5.24.

Owns the Jinja environment and the choice of the template. A template is code from a stranger: it runs in Jinja's
immutable sandbox, sees plain JSON values only, and every failure becomes a TemplateError. What a template does not
use is refused rather than ignored: an unknown template argument, tools given to a template without tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colibri.daemon.chat.errors import TemplateError, TokenizerError
from colibri.daemon.chat.files import read_text

Message = Mapping[str, Any]
Clock = Callable[[], datetime]

MAX_RENDERED_CHARS = 64 << 20  # the largest request is 64 MiB; a template that writes more is running away
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
# The names under which a message's reasoning arrives; the first is what current templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Raised(jinja2.TemplateError):
    """Thrown by `raise_exception`: the template's own refusal, to be passed on word for word."""


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`, a mark for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja gives it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        # transformers wraps the body in a call block, so names set inside do not leak out: the same here.
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without names that begin with an underscore (they could reach the interpreter)."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` must stay free as a keyword, as in Jinja's own class
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)` for templates, without the class behind them."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes `<>&'` for HTML and everything beyond ASCII; transformers' does neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise _Raised(message)


def make_environment(now: Clock) -> ImmutableSandboxedEnvironment:
    """The Jinja environment of a chat template; `now` is the clock behind `strftime_now`."""

    def strftime_now(format: str) -> str:  # noqa: A002 - the name that templates may use as a keyword
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=strftime_now, namespace=_Namespace, dict=_Dict())
    return environment


class ChatTemplate:
    """One model's chat template, or its several named ones.

    `source` says which file it came from; `note` is set if another, different template was passed over.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str],
        *,
        source: str,
        note: str = "",
        now: Clock = datetime.now,
    ) -> None:
        """`sources`: name to Jinja text. `variables`: bos_token and its like. Raises TemplateError on bad syntax."""
        self.source = source
        self.note = note
        self._variables = dict(variables)
        self._environment = make_environment(now)
        self._templates: dict[str, jinja2.Template] = {}
        self._names: dict[str, frozenset[str]] = {}
        for name, text in sources.items():
            try:
                self._names[name] = frozenset(jinja2.meta.find_undeclared_variables(self._environment.parse(text)))
                self._templates[name] = self._environment.from_string(text)
            except (jinja2.TemplateError, RecursionError) as error:
                line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise TemplateError(f"chat template {source} ({name}){line}: {error}") from error

    def arguments(self, *, tools: bool = False) -> frozenset[str]:
        """The names that may be given as template arguments: what the template reads and is not ours to set."""
        return self._names[self._select(tools)] - _ARGUMENTS - self._variables.keys() - self._environment.globals.keys()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text that the template writes for a whole conversation.

        Raises TemplateError: no messages, arguments or tools that the template does not read, its own refusal
        (`raise_exception`, word for word), or a failure inside it.
        """
        name = self._select(tools is not None)
        self._check_request(name, messages, tools, documents, arguments or {})
        try:
            values = {
                **self._variables,
                **{key: _plain(value, f"template argument {key!r}") for key, value in (arguments or {}).items()},
                "messages": [_message(message, index) for index, message in enumerate(messages)],
                "tools": None if tools is None else _plain(list(tools), "tools"),
                "documents": None if documents is None else _plain(list(documents), "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError:
            raise TemplateError("the chat's values are nested too deeply") from None
        return self._run(self._templates[name], values)

    def _select(self, tools: bool) -> str:
        if tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        raise TemplateError(f"chat template {self.source}: no default among the named ones: {sorted(self._templates)}")

    def _check_request(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> None:
        if not messages:
            raise TemplateError("a chat needs at least one message")
        allowed = self.arguments(tools=tools is not None)
        for key in arguments:
            if key not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                raise TemplateError(
                    f"template argument {key!r} is not read by this model's chat template (it reads: {known})"
                )
        for key, given in (("tools", tools), ("documents", documents)):
            if given and key not in self._names[name]:
                raise TemplateError(f"{key} are given, but this model's chat template does not read them")

    def _run(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(values):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise TemplateError(f"chat template {self.source} writes more than {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except (_Raised, TemplateError) as error:
            raise TemplateError(str(error)) from error
        except Exception as error:  # a template is a program: any operation in it can fail on any value
            raise TemplateError(f"chat template {self.source} failed: {type(error).__name__}: {error}") from error
        return "".join(pieces)


def _message(message: Message, index: int) -> dict[str, Any]:
    """A message as a template sees it: plain values, no None, reasoning under the names that templates read."""
    if not isinstance(message, Mapping):
        raise TemplateError(f"message {index} is not an object")
    plain = {key: _plain(value, f"message {index}: {key}") for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, what: str) -> Any:
    """A copy made of plain JSON types only, so that no object with methods of its own reaches the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in value]
    raise TemplateError(f"{what}: values of type {type(value).__name__} cannot be given to a chat template")


def load_template(
    folder: Path, config: Mapping[str, Any], variables: Mapping[str, str], now: Clock = datetime.now
) -> ChatTemplate | None:
    """The template of a model folder, in transformers' order: chat_template.jinja and additional_chat_templates/*.jinja
    together, or else `chat_template` of tokenizer_config.json (text, list of named ones). None if there is none.

    Raises TemplateError for a template that does not compile, TokenizerError for a malformed entry.
    """
    files: dict[str, str] = {}
    main = read_text(folder / TEMPLATE_FILE)
    if main is not None:
        files["default"] = main
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        files[path.stem] = read_text(path) or ""
    listed = _listed_templates(folder / "tokenizer_config.json", config.get("chat_template"))
    listed_name = "tokenizer_config.json:chat_template"
    if not files:
        return ChatTemplate(listed, variables, source=listed_name, now=now) if listed else None
    source = TEMPLATE_FILE if main is not None else TEMPLATE_FOLDER
    differs = bool(listed) and _without_last_newline(listed) != _without_last_newline(files)
    note = f"{source} is used; {listed_name} differs and is passed over" if differs else ""
    return ChatTemplate(files, variables, source=source, note=note, now=now)


def _without_last_newline(templates: Mapping[str, str]) -> dict[str, str]:
    """Jinja drops one newline at the end of a template, so it makes no difference."""
    return {name: text.removesuffix("\n") for name, text in templates.items()}


def _listed_templates(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise TokenizerError(f"{path}: chat_template is neither a text nor a list of objects with name and template")
    return value
