"""Reads the verdict in the reply of a judge: the last one after its reasoning, in one of several common forms.

A reply without a verdict, with one out of its scale, or with reasoning that does not end has none. Forms are tried in
this order, and only the first form that occurs counts: the tag that the prompt asks for, [[7]], JSON, "Score: 7".
"""

from __future__ import annotations

import re

_NUMBER = r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_SCORES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"<score>([^<]*)</score>",
        r"\[\[([^\[\]]*)\]\]",
        r'"score"\s*:\s*"?([^",}\s]*)',
        rf"\b(?:score|rating)\b[*_`]*\s*(?:[:=]|is)\s*[*_`]*\s*({_NUMBER}(?:\s*(?:/|out of)\s*[0-9]+)?)",
    )
)
_CHOICES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"<better>([^<]*)</better>",
        r"\[\[([^\[\]]*)\]\]",
        r'"(?:better|winner)"\s*:\s*"([^"]*)"',
        r"\b(?:better|winner)\b[*_`]*\s*(?:[:=]|is)\s*[*_`]*\s*(?:response\s+)?\b(A|B|tie)\b",
    )
)
_WORTH = {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5}  # C is a tie in the form of MT-Bench


def read_score(reply: str, lowest: int, highest: int) -> float | None:
    """Return the score in a reply; None: it has none from ``lowest`` to ``highest``."""
    text = _last(_SCORES, reply)
    match = (
        re.fullmatch(rf"({_NUMBER})(?:\s*(?:/|out of)\s*([0-9]+))?", text, re.IGNORECASE) if text is not None else None
    )
    if match is None or (match[2] is not None and int(match[2]) != highest):
        return None
    score = float(match[1])
    return score if lowest <= score <= highest else None


def read_choice(reply: str) -> float | None:
    """Return 1 if the reply prefers response A, 0 for B, 0.5 for a tie; None: it has no verdict."""
    text = _last(_CHOICES, reply)
    return None if text is None else _WORTH.get(text.lower())


def _last(forms: tuple[re.Pattern[str], ...], reply: str) -> str | None:
    """Return the last match of the first form that occurs after the reasoning."""
    _, closed, after = reply.rpartition("</think>")
    if not closed and "<think>" in reply:  # it was cut
        return None
    for form in forms:
        if found := form.findall(after):
            return str(found[-1]).strip(" \t\r\n*_`")
    return None
