"""Options of a part of a job: a model of the manifest's ``config``, with checks whose messages name the option."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from rljob.api.base import Model
from rljob.api.errors import path_text, sentences_of
from rljob.api.field_docs import documented_schema
from rljob.api.unsupported import on_one_line


class NoOptions(Model):
    """No options."""


class Configurable(Protocol):
    """What :func:`parse` and :func:`option_problems` need: ``options`` is the model of ``config``."""

    @property
    def options(self) -> type[Model]:
        """Model of ``config``."""


def check_options(options: Any, owner: str) -> None:
    """Check that the options of an ``owner`` (RewardKind) are a model.

    Raises:
        ValueError: they are not.
    """
    if not (isinstance(options, type) and issubclass(options, Model)):
        raise ValueError(f"options of {owner} is {options!r}; name a subclass of rljob.api.base.Model")


def parse(kind: Configurable, config: Mapping[str, Any]) -> Model:
    """Return the options in ``config``. Types are JSON types, as in the manifest.

    Raises:
        pydantic.ValidationError: an option is unknown, invalid or missing.
    """
    return kind.options.model_validate_json(json.dumps(config), strict=True, by_alias=True, by_name=False)


def option_problems(kind: Configurable, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``config.OPTION: sentence`` for each invalid option."""
    try:
        parse(kind, config)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["type"] in ("value_error", "assertion_error"):  # raised by a validator of the model itself
                path, sentence = path_text(["config", *detail["loc"]]), on_one_line(str(detail["ctx"]["error"]))
                yield f"{path}{sentence}" if sentence.startswith("[") else f"{path}: {sentence}"  # [0].name: …
            else:
                yield from (f"config.{sentence}" for sentence in sentences_of(detail, kind.options))


def describe_options(options: type[Model]) -> str:
    """Return the options of a model, each with its description and default, for the documentation; or none."""
    schema = documented_schema(options)
    lines = [
        f"`{option}` ({' '.join(field.get('description', '').split())}; {_default(field)})"
        for option, field in schema.get("properties", {}).items()
    ]
    return ", ".join(lines) or "none"


def _default(field: Mapping[str, object]) -> str:
    return f"default {json.dumps(field['default'])}" if "default" in field else "required"
