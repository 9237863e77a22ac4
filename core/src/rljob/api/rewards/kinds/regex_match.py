"""The built-in reward ``regex``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import Regex, RewardKind, Row, compiled
from rljob.api.templates import text_of


class RegexOptions(Model):
    """Options of `regex`."""

    pattern: Regex | None = None
    """regular expression for all rows; or give column"""
    column: Text | None = None
    """column with a regular expression for each row"""
    part: Literal["whole", "any"] = "whole"
    """whether the whole completion, without surrounding white space, or any part of it must match"""
    ignore_case: bool = False
    """whether upper and lower case are equal"""

    @model_validator(mode="after")
    def _one_pattern(self) -> RegexOptions:
        if (self.pattern is None) == (self.column is None):
            raise ValueError("needs exactly one of pattern and column; give one of them")
        return self


def row_pattern(row: Row, options: RegexOptions) -> re.Pattern[str]:
    """Return the expression for a row.

    Raises:
        ValueError: the row lacks the column, or the column contains no regular expression.
    """
    if options.column is None:
        assert options.pattern is not None, "the options have one of both"
        text = options.pattern.pattern
    else:
        text = text_of(row, options.column)
    try:
        return compiled(text, re.IGNORECASE if options.ignore_case else 0)
    except ValueError as error:
        raise ValueError(f"column {options.column!r} holds no regular expression ({error}); correct it") from None


def check_row(row: Row, options: RegexOptions) -> None:
    """Check that the row has an expression if the options have none.

    Raises:
        ValueError: it has none.
    """
    row_pattern(row, options)


NAME = "regex"
KIND = RewardKind(
    make="rljob.rewards.regex_reward:RegexReward",
    options=RegexOptions,
    row_check=check_row,
    summary="1 when the completion matches a regular expression, else 0.",
)
