"""Scorer of the reward ``multiple_choice``: 1 if the completion chooses the row's letter, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.multiple_choice import MultipleChoiceOptions, correct_letter
from rljob.api.tasks import Task
from rljob.rewards.answer_text import BOX, TAG, ascii_digits, box_at, last_box, last_tag

OPEN = r"(?:[\s*_`\"'($\[{:]|\\[(\[])*+"
CLOSE = r"(?:[\s*_`\"')$\]}.]|\\[)\]])*"
WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|textrm|bf|rm)(?![A-Za-z])\s*")
CHOICE = re.compile(rf"{OPEN}([A-Za-z]){CLOSE}")
LABELLED = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[).:])\s+\S[^\n]*")
"""A choice with its text: B) Paris. The text contains no other choice, which is checked apart."""
OTHER = re.compile(r"(?:\(([A-Z])\)|(?:^|\s)([A-Z])[).:](?=\s)|\b(?:or|and)\s+\(?([A-Z])\b)")
ANOTHER = r"\(?(?-i:[B-HJ-Z]|[AI](?!\s+[a-z]))\b"
"""A further choice; not the article, nor the pronoun."""
STATEMENT = re.compile(
    r"\b(?:answer\s*+(?:is|:|=)?+(?:\s*+(?:choice|option)(?=[\s*(]))?|(?:choice|option)\s*+(?:is|:|=)"
    r"|(?:choose|pick|select)\s++(?:choice|option)(?=[\s*(]))"
    rf"{OPEN}(?:\\(?:text|textbf|mathbf)\{{\(?)?([A-Z])(?![A-Za-z'])"
    r"(?!\s+(?:is|was)\s*(?:not\b|n't|wrong|false|incorrect))"
    rf"(?!{CLOSE}(?:\?|(?:[,/&-]|\b(?:or|and)\b(?:\s+(?:maybe|perhaps|possibly|also|even))?)\s*{ANOTHER}))",
    re.IGNORECASE,
)


@deterministic
class MultipleChoiceReward:
    """Compares letters. The metric ``answered`` is 1 if the completion chooses exactly one of the choices.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: MultipleChoiceOptions, tasks: Sequence[Task]) -> None:
        self._options = options
        self._letters = {chr(ord("A") + i) for i in range(options.choices)}

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the row names no choice.
        """
        expected, chosen = correct_letter(problem, self._options), self._chosen(ascii_digits(completion))
        if chosen not in self._letters:
            return 0.0, {"answered": 0.0}
        return float(chosen == expected), {"answered": 1.0}

    def _chosen(self, completion: str) -> str | None:
        if self._options.answer == "boxed":
            return letter_of(last_box(completion))
        if self._options.answer == "tag":
            return letter_of(last_tag(completion))
        found = {start: letter_of(text) for start, text in _marked(completion)}
        found |= {match.start(): match[1].upper() for match in STATEMENT.finditer(completion) if _is_letter(match)}
        return found[max(found)] if found else letter_of(completion)


def letter_of(text: str | None) -> str | None:
    """Return the choice that ``text`` is, in upper case: B, (b), «B) Paris»; None if it is none or several."""
    if text is None:
        return None
    text = WRAPPED.sub("", text)
    alone = CHOICE.fullmatch(text)
    if alone is not None:
        return alone[1].upper()
    labelled = LABELLED.fullmatch(text.rstrip())
    if labelled is None:
        return None
    letter = labelled[1] or labelled[2]
    others = {one or two or three for one, two, three in OTHER.findall(text)}
    return letter if others <= {letter} else None


def _marked(completion: str) -> list[tuple[int, str | None]]:
    boxes = [(match.start(), box_at(completion, match.end())) for match in BOX.finditer(completion)]
    return boxes + [(match.start(), match[1]) for match in TAG.finditer(completion)]


def _is_letter(match: re.Match[str]) -> bool:
    """Return whether the letter after "answer is" is a choice; «the answer is a prime» has the article."""
    return match[1].isupper() or match[0][-2:-1] == "("
