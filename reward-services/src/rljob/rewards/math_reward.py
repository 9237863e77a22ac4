"""Scorer of the reward ``math``: 1 if the completion's answer equals the row's as mathematics, else 0."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sympy import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan, Union

from rljob.api.rewards.kinds.mathematics import MathOptions
from rljob.api.tasks import Task
from rljob.api.templates import text_of
from rljob.rewards.answer_text import (
    LONGEST_ANSWER,
    ascii_digits,
    last_box,
    last_tag,
    latex_symbols,
    without_exponents,
)
from rljob.rewards.math_verdicts import Parsed, accepted, read

LONGEST_TEXT = 50_000
"""Characters at the end of a completion that are read."""
MIXED = re.compile(r"(-?)(\d{1,9})\s+(\d{1,9})/(\d{1,9})")
TURNED = re.compile(r"([^=<>A-Za-z]+)=\s*([a-df-hj-zA-DF-HJ-Z])")
MONEY = re.compile(r"(?<=\d)\s*(?:dollar|cent|euro)s?$")
INEQUALITIES = (StrictLessThan, StrictGreaterThan, LessThan, GreaterThan)
OR = re.compile(r"\\(?:text|mbox|mathrm)\{\s*or\s*\}|\\lor(?![A-Za-z])")


class MathReward:
    """Compares by math-verify. The metric ``answered`` is 1 if the completion has an answer that can be read.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: MathOptions, tasks: Sequence[Task]) -> None:
        self._options = options

    def __call__(self, *, completion: str, problem: dict[str, Any], prompt: str) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the row has no answer, or its answer cannot be read as mathematics.
        """
        gold = _gold(_right_answer(problem, self._options.column))
        answer = self._answer(completion[-LONGEST_TEXT:])
        readings = [self._read(text) for text in dict.fromkeys([answer, without_exponents(answer)])]
        if readings[0].expression is None:
            return 0.0, {"answered": 0.0}
        problem_text = "" if self._options.copied else prompt
        return float(any(accepted(gold, reading, problem_text) for reading in readings)), {"answered": 1.0}

    def _answer(self, completion: str) -> str:
        """Return the text that holds the completion's answer; empty if there is none."""
        if self._options.answer == "text":
            return ascii_digits(completion)
        content = last_box(completion) if self._options.answer == "boxed" else last_tag(completion)
        return content if content is not None and len(content) <= LONGEST_ANSWER else ""

    def _read(self, answer: str) -> Parsed:
        return read(answer) if self._options.answer == "text" else read_formula(answer)


def _right_answer(problem: Mapping[str, Any], column: str) -> str:
    """Return the row's answer. In a number of JSON an e is never Euler's; in a text it is."""
    text = text_of(problem, column)
    return without_exponents(text) if isinstance(problem[column], float) else text


def read_formula(text: str) -> Parsed:
    """Return what ``text`` holds, an answer without the words around it: $7$, \\boxed{7}, 7 or 7."""
    text = text.strip().rstrip(".,;").removeprefix(r"\[").removesuffix(r"\]")
    text = (last_box(text) or text).replace("$", " ").replace(r"\(", " ").replace(r"\)", " ")
    text = _usual(latex_symbols(ascii_digits(text)).strip())
    return _either(text) or dataclasses.replace(read(f"${text}$"), source=text)


def _usual(text: str) -> str:
    """Return ``text`` in a form that math-verify reads: 3/2 for 1 1/2, x=5 for 5=x, and 5 for 5 dollars."""
    mixed = MIXED.fullmatch(text)
    if mixed is not None:
        sign, whole, numerator, denominator = mixed[1], *map(int, mixed.groups()[1:])
        return f"{sign}{whole * denominator + numerator}/{denominator}" if numerator < denominator else text
    turned = TURNED.fullmatch(text)
    return f"{turned[2]}={turned[1]}" if turned is not None else MONEY.sub("", text)


def _either(text: str) -> Parsed | None:
    """Return the union for x<1 or x>2; None if ``text`` is something else."""
    parts = OR.split(text)
    if len(parts) < 2:
        return None
    found = [read(f"${part}$").expression for part in parts]
    if not all(isinstance(each, INEQUALITIES) and _is_bound(each) for each in found):
        return None
    if len(set().union(*(each.free_symbols for each in found))) > 1:
        return None
    text = r"\text{ or }".join(parts)
    return Parsed(text, [Union(*(each.as_set() for each in found)), text], text)


def _is_bound(inequality: Any) -> bool:
    """Return whether an inequality has a variable on one side and a number on the other: x < 1."""
    sides = inequality.lhs, inequality.rhs
    return any(one.is_Symbol and other.is_number for one, other in (sides, sides[::-1]))


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> Parsed:
    gold = read_formula(text)
    if gold.expression is None:
        raise ValueError(f"the row's answer {text[:200]!r} cannot be read as mathematics; correct it, or drop the row")
    return gold
