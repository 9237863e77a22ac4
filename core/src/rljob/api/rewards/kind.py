"""Declaration of a reward without its scorer: options, accepted data, row check, and the reference to its factory.

The API, the operator and the runner read a :class:`RewardKind` without importing the scorer, which may need libraries
that only the reward service has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rljob.api.base import Model
from rljob.api.errors import path_text, sentences_of
from rljob.api.rewards.outcome import Parts
from rljob.api.tasks import SOURCES, Task
from rljob.api.unsupported import on_one_line

Row: TypeAlias = Mapping[str, Any]
"""A row of a task's data, its columns renamed by ``data.columns``."""
Scorer: TypeAlias = Callable[..., float | tuple[float, Mapping[str, float]] | Parts | None]
"""Scores one finished sample. Its parameters are described in :mod:`rljob.rewards.sdk`."""


class NoOptions(Model):
    """No options."""


@dataclass(frozen=True)
class RewardKind:
    """A reward with options, restrictions on data, or a factory. ``spec.rewards[].function`` may name a RewardKind.

    ``make(options, tasks)`` returns the scorer; ``tasks`` are the job's tasks that use the reward. The reward service
    calls ``make`` once, before it listens. ``options``: model of ``config``. ``data``: sources whose rows the reward
    scores; None: all. ``row_check(row, options)`` raises ValueError if the reward cannot score a row; the runner calls
    it for rows before the run. ``summary``: one sentence for the documentation.

    ``make`` and ``row_check`` may be module:attribute of a module that is imported only by the process that needs it.

    Raises:
        ValueError: ``data`` contains an unknown source, or ``options`` is not a Model.
    """

    make: str | Callable[[Any, Sequence[Task]], Scorer]
    options: type[Model] = NoOptions
    data: Collection[str] | None = None
    row_check: str | Callable[[Row, Any], None] | None = None
    summary: str = ""

    def __post_init__(self) -> None:
        for source in self.data or ():
            if source not in SOURCES:
                raise ValueError(f"data of a RewardKind contains {source!r}; sources are {', '.join(SOURCES)}")
        if not (isinstance(self.options, type) and issubclass(self.options, Model)):
            raise ValueError(f"options of a RewardKind is {self.options!r}; name a subclass of rljob.api.base.Model")

    def accepts(self, sources: Sequence[str]) -> bool:
        """Return whether the reward scores rows of data with these sources."""
        return self.data is None or all(source in self.data for source in sources)

    @property
    def accepted(self) -> str:
        """Text of the accepted sources: jsonl or parquet."""
        return " or ".join(source for source in SOURCES if self.data is None or source in self.data)

    def parse(self, config: Mapping[str, Any]) -> Model:
        """Return the options in ``config``. Types are JSON types, as in the manifest.

        Raises:
            pydantic.ValidationError: an option is unknown, invalid or missing.
        """
        return self.options.model_validate_json(json.dumps(config), strict=True, by_alias=True, by_name=False)

    def option_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield ``config.OPTION: sentence`` for each invalid option."""
        try:
            self.parse(config)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                if detail["type"] in ("value_error", "assertion_error"):  # raised by a validator of the model itself
                    path, sentence = path_text(["config", *detail["loc"]]), on_one_line(str(detail["ctx"]["error"]))
                    yield f"{path}{sentence}" if sentence.startswith("[") else f"{path}: {sentence}"  # [0].name: …
                else:
                    yield from (f"config.{sentence}" for sentence in sentences_of(detail, self.options))


@dataclass(frozen=True)
class _Compiled:
    """Annotation: the text is a regular expression; the value is the compiled pattern."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_compile, core_schema.str_schema())


def _compile(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise PydanticCustomError(
            "regex",
            "{value} is not a regular expression: {cause}; correct it",
            {"value": repr(text), "cause": str(error)},
        ) from None


Regex = Annotated[re.Pattern[str], _Compiled()]
"""Option that is a regular expression."""
