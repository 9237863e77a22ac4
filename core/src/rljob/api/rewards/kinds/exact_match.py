"""The built-in reward ``exact_match``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import Regex, RewardKind, Row
from rljob.api.templates import text_of


class ExactMatchOptions(Model):
    """Options of `exact_match`."""

    column: Text = "answer"
    """column with the correct answer"""
    extract: Regex | None = None
    """regular expression whose last match in the completion, or that match's first group, is the answer; null: the
    whole completion"""
    ignore_case: bool = False
    """whether upper and lower case are equal"""


def check_row(row: Row, options: ExactMatchOptions) -> None:
    """Check that the row has an answer.

    Raises:
        ValueError: the row lacks the column, or the column contains neither text nor a number.
    """
    text_of(row, options.column)


NAME = "exact_match"
KIND = RewardKind(
    make="rljob.rewards.exact_match_reward:ExactMatchReward",
    options=ExactMatchOptions,
    row_check=check_row,
    summary="1 when the answer in the completion equals a column of the row, else 0.",
)
