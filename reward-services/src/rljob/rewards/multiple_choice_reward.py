"""Scorer of the reward ``multiple_choice``: 1 if the completion chooses the row's letter, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.multiple_choice import MultipleChoiceOptions, correct_letter
from rljob.api.tasks import Task
from rljob.rewards.answer_text import TAG, ascii_digits, boxes, last_box, last_tag

OPEN, CLOSE = r"[\s*_`\"'($\[{:\\]*", r"[\s*_`\"')$\]}.\\]*"
WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|textrm|bf|rm)(?![A-Za-z])\s*")
CHOICE = re.compile(rf"{OPEN}(?:(?:option|choice)\b{OPEN})?([A-Za-z]){CLOSE}", re.IGNORECASE)
LABELLED = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[).:])\s+\S[^\n]*")
"""A choice with its text: B) Paris. The text contains no other choice, which is checked apart."""
OTHER = re.compile(r"(?:\(([A-Z])\)|(?:^|\s)([A-Z])[).:](?=\s)|\b(?:or|and)\s+\(?([A-Z])\b)")
STATEMENT = re.compile(
    r"(?<!wrong )(?<!incorrect )(?<!false )\b"
    rf"(answer|choice|option)((?:\s*(?:is|=))?{OPEN})(?:(?:option|choice){OPEN})?"
    r"(?:(?:text|textbf|mathbf)\{\(?)?([A-Z])(?![A-Za-z'])",
    re.IGNORECASE,
)
MARKS = r"[)*_`$}\\]*"
QUESTION = re.compile(MARKS + r"\.?\s*\?")
NEGATED = re.compile(
    MARKS + r"\s+(?i:(?:is|was|seems|looks|must\s+be|would\s+be)\s+(?:\w+ly\s+)?"
    r"(?:not|incorrect|wrong|false|invalid|impossible|excluded|ruled\s+out|eliminated)\b"
    r"|(?:isn't|wasn't|fails|cannot|can't|can\s+be\s+(?:excluded|ruled\s+out|eliminated))(?![a-z]))"
)
SEVERAL = re.compile(
    MARKS + r"[ \t]*(?:[,/&+~-]|(?:;[ \t]*)?(?:or|and|to|through)\b)[ \t]*"
    r"(?:(?:or|and|maybe|perhaps|possibly|even|also|option|choice)\s+)*"
    rf"[($*\\]*(?!I\s+[a-z])[A-Z]\b(?!{NEGATED.pattern})"
)
"""After a letter: another one, of which the sentence does not say that it is wrong."""
EXPLAINED = re.compile(MARKS + r"\s+is\b(?!\s+(?:the\s+)?(?:correct|right|best|true|answer)\b)", re.IGNORECASE)
"""After "option B": the sentence says something of this choice."""


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
        statements = _statements(completion)
        return statements[-1] if statements else letter_of(completion)


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
    return boxes(completion) + [(match.start(), match[1]) for match in TAG.finditer(completion)]


def _statements(completion: str) -> list[str | None]:
    """Return the choices of the statements in order; None for one that names several choices or withdraws the last one.

    "Option B" states a choice only if no box, no tag and no "answer is B" does: explanations name options, too.
    """
    found: list[tuple[int, str | None, bool]] = [(start, letter_of(text), False) for start, text in _marked(completion)]
    matches = [match for match in STATEMENT.finditer(completion) if _is_letter(match)]
    clear = [match for match in matches if match[1].lower() == "answer" or re.search(r"is|[=:]", match[2], re.I)]
    for match in clear if clear or found else matches:
        end, letter = match.end(), match[3].upper()
        if QUESTION.match(completion, end) or (not clear and EXPLAINED.match(completion, end)):
            continue
        negated = NEGATED.match(completion, end) is not None
        found.append((match.start(), None if SEVERAL.match(completion, end) else letter, negated))
    statements: list[str | None] = []
    for _, choice, negated in sorted(found, key=lambda each: each[0]):
        if not negated:
            statements.append(choice)
        elif statements and statements[-1] == choice:
            statements.append(None)
    return statements


def _is_letter(match: re.Match[str]) -> bool:
    """Return whether the letter after "answer is" is a choice; «the answer is a prime» has the article."""
    return match[3].isupper() or match[0][-2:-1] == "("
