"""Answers in a text: boxes, tags, JSON, and characters of Unicode."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from decimal import Decimal
from typing import Any

MINUS = re.compile("[\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d]")  # hyphens, en dash, minus signs
VULGAR = re.compile("(?<!\\d)(\\d*)([\u00bc-\u00be\u2150-\u215e\u2189])")
SUPERSCRIPT = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
SUBSCRIPT = re.compile("[\u2080-\u208e]+")
ROOT = re.compile(r"\u221a\s*(\([^()]*\)|\d+(?:\.\d+)?|\w)")
SYMBOLS = {
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u00f7": "/",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u00b1": r"\pm ",
    "\u00b0": r"^\circ ",
    "\u2205": r"\emptyset ",
}
"""Character → LaTeX. The parser knows commands only."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BRACE = re.compile(r"(?<!\\)[{}]")
TOKEN = re.compile(r"-?\d+(?:\.\d+)?|\\[A-Za-z]+|[^\s{}]")
EXPONENT = re.compile(r"(?<![\w.\\])(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}(?!\w|[{^]|\.\d)")
"""A number with an exponent in the notation of Python and JSON."""
LONGEST_ANSWER = 5_000
"""Characters of an answer; a longer one is not read."""
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def ascii_digits(text: str) -> str:
    """Return ``text`` with the digits, signs and letters of other scripts' number forms as ASCII.

    Minus signs and dashes become ``-``, full-width and Arabic digits ``0`` to ``9``, 1¾ becomes 7/4, x² becomes
    ``x^{2}``.
    """
    text = MINUS.sub("-", text)
    text = VULGAR.sub(_improper, text)
    text = SUPERSCRIPT.sub(lambda found: "^{" + MINUS.sub("-", unicodedata.normalize("NFKC", found[0])) + "}", text)
    text = SUBSCRIPT.sub(lambda found: "_{" + MINUS.sub("-", unicodedata.normalize("NFKC", found[0])) + "}", text)
    text = unicodedata.normalize("NFKC", text).replace("\u066b", ".").replace("\u066c", ",").replace("\u2044", "/")
    return "".join(str(unicodedata.decimal(character, character)) for character in text)


def without_exponents(text: str) -> str:
    """Return ``text`` with numbers such as 1.5e-07 as decimals. Mathematics reads 1.5 times Euler's e, minus 7."""
    return EXPONENT.sub(lambda found: f"{Decimal(found[0]):f}", text)


def latex_symbols(text: str) -> str:
    """Return ``text`` with mathematical characters as LaTeX commands: √2 becomes ``\\sqrt{2}``."""
    text = ROOT.sub(lambda found: "\\sqrt{" + found[1].strip("()") + "}", text)
    return "".join(SYMBOLS.get(character, character) for character in text)


def last_box(text: str) -> str | None:
    """Return the content of the last of the :func:`boxes`; None if there is none, or it has none."""
    found = boxes(text)
    return found[-1][1] if found else None


def boxes(text: str) -> list[tuple[int, str | None]]:
    """Return the place of each ``\\boxed{…}`` and ``\\fbox{…}``, and its content; None if it is not closed or longer
    than LONGEST_ANSWER. \\boxed7 holds 7."""
    closed = _closing_braces(text)

    def content(start: int) -> str | None:
        if not text.startswith("{", start):
            token = TOKEN.match(text, start)
            return token[0] if token else None
        end = closed.get(start)
        return text[start + 1 : end] if end is not None and end - start - 1 <= LONGEST_ANSWER else None

    return [(match.start(), content(match.end())) for match in BOX.finditer(text)]


def _closing_braces(text: str) -> dict[int, int]:
    """Return the place of the closing brace for the place of each opening one that has one."""
    closed, opened = {}, []
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed[opened.pop()] = brace.start()
    return closed


def last_tag(text: str) -> str | None:
    """Return the text between the last ``<answer>`` and its ``</answer>``; None if there is none."""
    found = TAG.findall(text)
    return found[-1] if found else None


def json_document(text: str) -> Any:
    """Return the document of a JSON text.

    Raises:
        ValueError: the text is no JSON. NaN, infinities and numbers out of range, which Python accepts, are none.
        RecursionError: it is nested too deeply.
    """

    def number(digits: str) -> float:
        found = float(digits)
        if not math.isfinite(found):
            raise ValueError(f"{digits} is not a number of JSON")
        return found

    return json.loads(text, parse_constant=number, parse_float=number)


def _improper(found: re.Match[str]) -> str:
    """Return a vulgar fraction, with the number before it, as a fraction of ASCII digits."""
    numerator, denominator = map(int, unicodedata.normalize("NFKC", found[2]).split("\u2044"))
    return f"{int(found[1] or 0) * denominator + numerator}/{denominator}"
