"""Renders messages to text with a model's chat template, without importing transformers.

The text equals that of ``apply_chat_template(messages, tokenize=False, add_generation_prompt=True)`` of transformers:
the environment, filters and variables are the same (transformers.utils.chat_template_utils; a test compares the two).
Templates come with models and are not trusted, so they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rljob.runner.model_files import read_object
from rljob.runner.prompt_content import Messages

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a model directory.

    Raises:
        ValueError: the model has no chat template, or its template is not valid jinja.
    """

    def __init__(self, model: Path) -> None:
        config = read_object(model / "tokenizer_config.json")
        source = _source(model, config)
        if source is None:
            raise ValueError(
                f"{model} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), and "
                "tasks with messages or an agent need one; add it, or write the task's prompt as plain text"
            )
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{model}: line {error.lineno} of the chat template is not valid jinja: {error.message}"
            ) from None
        named = read_object(model / "special_tokens_map.json") | config
        self._tokens = {name: _text(named[name]) for name in SPECIAL_TOKENS if named.get(name) is not None}

    def render(self, messages: Messages) -> str:
        """Return ``messages`` as text, with the generation prompt at the end.

        Raises:
            ValueError: the template rejects the messages.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except Exception as error:  # a template is a program and may raise anything; it is the prompt's error
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error


def _source(model: Path, config: dict[str, Any]) -> str | None:
    if (model / "chat_template.jinja").is_file():
        return (model / "chat_template.jinja").read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source if isinstance(source, str) else None


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks text of the assistant; it has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares the attribute like this

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
