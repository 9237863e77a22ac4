"""The built-in reward ``multiple_choice``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import RewardKind, Row
from rljob.api.templates import kind_of, value_of


class MultipleChoiceOptions(Model):
    """Options of `multiple_choice`."""

    column: Text = "answer"
    """column with the correct choice: its letter, or its number from 0"""
    choices: Annotated[int, Field(ge=2, le=26)] = 4
    """number of choices: 4 are A to D"""
    answer: Literal["boxed", "tag", "text"] = "text"
    """where the completion has its answer: in the last \\boxed{}, between the last <answer> and </answer>, or anywhere:
    the last of box, tag and "answer is B", or a completion that is a choice"""


def correct_letter(row: Row, options: MultipleChoiceOptions) -> str:
    """Return the letter of the row's correct choice.

    Raises:
        ValueError: the row lacks the column, or it names no choice.
    """
    value, last = value_of(row, options.column), chr(ord("A") + options.choices - 1)
    remedy = f"it must hold a letter from A to {last}, or a number from 0 to {options.choices - 1}"
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < options.choices:
            return chr(ord("A") + value)
        raise ValueError(f"column {options.column!r} holds {value}; {remedy}")
    if not isinstance(value, str):
        raise ValueError(f"column {options.column!r} holds {kind_of(value)}; {remedy}")
    letter = re.fullmatch(r"\s*\(?([A-Za-z])[).]?\s*", value)
    if letter is None or letter[1].upper() > last:
        raise ValueError(f"column {options.column!r} holds {value[:80]!r}; {remedy}")
    return letter[1].upper()


def check_row(row: Row, options: MultipleChoiceOptions) -> None:
    """Check that the row names one of the choices.

    Raises:
        ValueError: it does not.
    """
    correct_letter(row, options)


NAME = "multiple_choice"
KIND = RewardKind(
    make="rljob.rewards.multiple_choice_reward:MultipleChoiceReward",
    options=MultipleChoiceOptions,
    row_check=check_row,
    summary="1 when the completion chooses the letter of a column of the row, else 0.",
)
