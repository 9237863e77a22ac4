"""Reads the verdict in the reply of a judge: the last one after its reasoning, in one of several common forms.

A reply without a verdict, with one out of its scale, or with reasoning that does not end has none. The tag that the
prompt asks for counts before the other forms: [[7]], JSON, "Score: 7". These must not contradict one another.
"""

from __future__ import annotations

import re

_NUMBER = r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_OF_THE_SCALE = "".join(
    f"(?<!{word} )" for word in ("lowest", "highest", "minimum", "maximum", "possible", "best", "worst")
)
_SCORES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"<score>([^<]*)</score>",
        r"\[\[([^\[\]]*)\]\]",
        r'"score"\s*:\s*"?([^",}\s]*)',
        rf"{_OF_THE_SCALE}\b(?:score|rating)\b[*_`]*\s*(?:[:=]|is)\s*+[*_`]*+\s*+"
        r"([-+]?[0-9][^\s*_`;!?)<\u2014]*(?:[ \t]*(?:/|\b(?:out of|or|to)\b|[-\u2013])[ \t]*[0-9]+)?)",
    )
)
_CHOICES = tuple(
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        r"<better>([^<]*)</better>",
        r"\[\[([^\[\]]*)\]\]",
        r'"(?:better|winner)"\s*:\s*"([^"]*)"',
        r"\b(?:better|winner)\b[*_`]*\s*(?:[:=]|is)\s*+[*_`]*+\s*+(?:response\s+)?"
        r"((?:\b(?-i:[AB])\b|(?<=response )[ab]\b|\b[ab](?=[\s*_`.]*$)|\btie\b)"
        r"(?:\s*(?:/|,|\bor\b|\band\b)\s*(?:response\s+)?[AB]\b(?!\s+(?:is|was|has|does|did|fails|lacks)\b))?)",
    )
)
"""The first form is the tag. A small "a" is an article, unless the line ends with it."""
_WORTH = {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5}  # C is a tie in the form of MT-Bench


def read_score(reply: str, lowest: int, highest: int) -> float | None:
    """Return the score in a reply; None: it has none from ``lowest`` to ``highest``."""
    return _agreed([_score(text, lowest, highest) for text in _verdicts(_SCORES, reply)])


def read_choice(reply: str) -> float | None:
    """Return 1 if the reply prefers response A, 0 for B, 0.5 for a tie; None: it has no verdict."""
    return _agreed(
        [_WORTH.get(text.lower().removeprefix("response ").rstrip(".")) for text in _verdicts(_CHOICES, reply)]
    )


def _score(text: str, lowest: int, highest: int) -> float | None:
    """Return the score that a text is, without the punctuation behind it; None: it is none of the scale."""
    match = re.fullmatch(rf"({_NUMBER})(?:\s*(?:/|out of)\s*([0-9]+))?", text.rstrip(".,:"), re.IGNORECASE)
    if match is None or (match[2] is not None and int(match[2]) != highest):
        return None
    score = float(match[1])
    return score if lowest <= score <= highest else None


def _agreed(values: list[float | None]) -> float | None:
    return values[0] if len(set(values)) == 1 else None


def _verdicts(forms: tuple[re.Pattern[str], ...], reply: str) -> list[str]:
    """Return the last tag after the reasoning; without a tag, the last match of each other form."""
    _, closed, after = reply.rpartition("</think>")
    if not closed and "<think>" in reply:  # it was cut
        return []
    found = [[text.strip(" \t\r\n*_`") for text in form.findall(after)[-1:]] for form in forms]
    return found[0] or [text for texts in found for text in texts]
