"""Declaration of a reward without its scorer: options, accepted data, row check, and the reference to its factory.

The API, the operator and the runner read a :class:`RewardKind` without importing the scorer, which may need libraries
that only the reward service has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rljob.api.base import Model
from rljob.api.configurable import NoOptions, check_options, option_problems, parse
from rljob.api.rewards.outcome import Parts
from rljob.api.tasks import SOURCES, Task

Row: TypeAlias = Mapping[str, Any]
"""A row of a task's data, its columns renamed by ``data.columns``."""
Scorer: TypeAlias = Callable[..., float | tuple[float, Mapping[str, float]] | Parts | None]
"""Scores one finished sample. Its parameters are described in :mod:`rljob.rewards.sdk`."""


@dataclass(frozen=True)
class RewardKind:
    """A reward with options, restrictions on data, or a factory. ``spec.rewards[].function`` may name a RewardKind.

    ``make(options, tasks)`` returns the scorer; ``tasks`` are the job's tasks that use the reward. The reward service
    calls ``make`` once, before it listens. ``options``: model of ``config``. ``data``: sources whose rows the reward
    scores; None: all. ``row_check(row, options)`` raises ValueError if the reward cannot score a row; the runner calls
    it for rows before the run. ``summary``: one sentence for the documentation. ``limits_memory``: whether the workers
    of a built-in reward have a limit of memory by default. ``is_part``: whether a built-in reward may be a part of
    `combined`: it neither waits for a service nor scores batches.

    ``make`` and ``row_check`` may be module:attribute of a module that is imported only by the process that needs it.

    Raises:
        ValueError: ``data`` contains an unknown source, or ``options`` is not a Model.
    """

    make: str | Callable[[Any, Sequence[Task]], Scorer]
    options: type[Model] = NoOptions
    data: Collection[str] | None = None
    row_check: str | Callable[[Row, Any], None] | None = None
    summary: str = ""
    limits_memory: bool = True
    is_part: bool = True

    def __post_init__(self) -> None:
        for source in self.data or ():
            if source not in SOURCES:
                raise ValueError(f"data of a RewardKind contains {source!r}; sources are {', '.join(SOURCES)}")
        check_options(self.options, "a RewardKind")

    def accepts(self, sources: Sequence[str]) -> bool:
        """Return whether the reward scores rows of data with these sources."""
        return self.data is None or all(source in self.data for source in sources)

    @property
    def accepted(self) -> str:
        """Text of the accepted sources: jsonl or parquet."""
        return " or ".join(source for source in SOURCES if self.data is None or source in self.data)

    def parse(self, config: Mapping[str, Any]) -> Model:
        """See :func:`rljob.api.configurable.parse`."""
        return parse(self, config)

    def option_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        """See :func:`rljob.api.configurable.option_problems`."""
        return option_problems(self, config)


@dataclass(frozen=True)
class _Compiled:
    """Annotation: the text is a regular expression; the value is the compiled pattern."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_compile, core_schema.str_schema())


def compiled(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a regular expression.

    Raises:
        ValueError: ``text`` is none, for the reason that the message gives.
    """
    try:
        return re.compile(text, flags)
    except RecursionError:
        raise ValueError("its groups are nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None


def _compile(text: str) -> re.Pattern[str]:
    try:
        return compiled(text)
    except ValueError as error:
        raise PydanticCustomError(
            "regex",
            "{value} is not a regular expression: {cause}; correct it",
            {"value": repr(text), "cause": str(error)},
        ) from None


Regex = Annotated[re.Pattern[str], _Compiled()]
"""Option that is a regular expression."""
