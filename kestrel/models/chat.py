"""Chat templates: messages to the text a model was trained on, rendered as Hugging Face does."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kestrel.errors import ModelError, TemplateError

Message = Mapping[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; its text is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Sandboxed: it can neither reach Python's internals nor change what it is given."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """`special_tokens`: bos_token, eos_token… by name, as text. `tool_source` is used when tools are given.

        ModelError if a template does not compile.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.source = source
        self.takes_tools = "tools" in (tool_source or source)  # else it would leave them out silently
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text, special tokens written out; `kwargs` reach the template (enable_thinking=False …).

        TemplateError when the template refuses the messages or fails on them.
        """
        template = self._tool_template if tools else self._template
        variables: dict[str, Any] = {**self._special_tokens, **kwargs}
        variables |= {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return template.render(variables, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            raise
        except Exception as error:  # a template is foreign code: whatever it raises is its failure
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


def compile_templates(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Choose among named templates: "default" (else the first one), and "tool_use" for requests with tools."""
    source = templates.get("default") or next(iter(templates.values()))
    return ChatTemplate(source, special_tokens, templates.get("tool_use"))


def load_chat_template(path: Path, like: ChatTemplate | None) -> ChatTemplate:
    """A template from a jinja file, with the special tokens of the template it replaces; ModelError if unreadable."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"cannot read the chat template {path}: {error}; check model.chat_template"
        ) from error
    return ChatTemplate(source, {} if like is None else like._special_tokens)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps: jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses these messages: {message}")
