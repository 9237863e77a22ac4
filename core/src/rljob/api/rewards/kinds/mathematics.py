"""The built-in reward ``math``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Literal

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import RewardKind, Row
from rljob.api.templates import text_of


class MathOptions(Model):
    """Options of `math`."""

    column: Text = "answer"
    """column with the correct answer, as text, LaTeX or a number"""
    answer: Literal["boxed", "tag", "text"] = "boxed"
    """where the completion has its answer: in the last \\boxed{}, between the last <answer> and </answer>, or the last
    expression of the text"""
    copied: bool = False
    """whether an answer with an operator that is copied from the prompt counts, such as 2+2 for 4"""


def check_row(row: Row, options: MathOptions) -> None:
    """Check that the row has an answer. Only the reward service can read mathematics.

    Raises:
        ValueError: the row lacks the column, or the column contains neither text nor a number, or no character.
    """
    if not text_of(row, options.column).strip():
        raise ValueError(f"column {options.column!r} is empty; it must hold the correct answer")


NAME = "math"
KIND = RewardKind(
    make="rljob.rewards.math_reward:MathReward",
    options=MathOptions,
    row_check=check_row,
    summary="1 when the answer is mathematically equal to a column of the row, else 0.",
)
