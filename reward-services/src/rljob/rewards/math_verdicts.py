"""Verdicts of math-verify, without those of its known wrong verdicts that can be recognised.

math-verify accepts some wrong answers: :func:`refuted` lists those that are refused here, docs/rewards.md the others.
Its time limits are signals of the main thread, in whole seconds: they are off, and the limit of the worker holds.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Any

# gmpy2 computes 99999999! for more than a minute in one call; Python's integers can be interrupted and need no package.
os.environ["SYMPY_GROUND_TYPES"] = "python"
os.environ["MPMATH_NOGMPY"] = "1"

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, FiniteSet, Float, Interval, S, Tuple, simplify, solveset
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

log = logging.getLogger(__name__)
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
LATEX_AND_NUMBERS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
FLOAT_DIGITS = 6
RELATIVE = 1e-4  # of two numbers, one of them a float, that are equal in FLOAT_DIGITS decimals
EQUALS = re.compile(r"(?<![\\<>!:=])=(?!=)")
UNEVALUATED = re.compile(
    r"!(?!=)|\\(?:int|iint|oint|sum|prod|lim|binom|dbinom|tbinom|choose|pmod|bmod|mod)(?![A-Za-z])"
)
"""Operations that state a problem; the answer to it does not contain them, unless the gold answer does."""
LATEX_SUBSCRIPT = re.compile(r"_\{[^{}]*\}")
SPACING = re.compile(r"(?<!\\)\\(?:[,;!: ]|left(?![A-Za-z])|right(?![A-Za-z]))")
OPERATOR = re.compile(r"[-+*/^!=<>(]|\\[A-Za-z]+")
NEGATIONS = re.compile(
    r"\\(?:not|notin|ne|lnot|neg|lor|vee)(?![A-Za-z])|\\\\(?=\s*[^\s%])|[\u2209\u2228\u00ac]"
    r"|\b(?:not|never|wrong|false|incorrect|except|unless|or (?:more|less|fewer)|at (?:least|most)"
    r"|(?:more|less|greater|fewer) than)\b"
)
"""The answer is not, or not only, the value beside it, unless the gold answer says the same. \\\\ begins a new line."""
RELATION = r"(?:[<>]=?|\\(?:[gl](?:e|t|eqslant)|ll|gg|in|ni|propto|ne|gtrsim|lesssim|prec|succ)(?![A-Za-z]))"
HALF = re.compile(rf"(?:^|\s){RELATION}\s*$|^\s*({RELATION})")
"""A relation that lacks a side: > 5."""
MOST_PARTS = 50
"""Of a chain. A longer one is wrong, because reading it takes seconds."""
STEPS = re.compile(
    r"\\(?:to|(?:long)?rightarrow|(?:Long)?[Rr]ightarrow|implies|iff|Leftrightarrow|mapsto|leadsto|therefore)(?![A-Za-z])"
    r"|[\u2190-\u21ff\u2234]"
)
JOINED = re.compile(
    r"\\(?:equiv|cup|cap|mid|parallel|setminus|wedge|land|(?:sub|sup)set(?:eq)?|oplus|otimes|odot|prec|succ|doteq"
    r"|leftrightarrow|&|\|)(?![A-Za-z])|(?<!\^)(?<!\^\{)\\circ(?![A-Za-z])|==|(?<=\d)\s*\|\s*(?=\d)"
)
"""Between two formulas of which math-verify reads the last one. In an equation it is an operation: 2 \\oplus 3 = 5."""
NEARLY = re.compile(r"\\(?:approx|sim|simeq|cong)(?![A-Za-z])|\u2248")
"""math-verify reads what is before it, but the last number of \\approx 6 \\approx 5."""
WORD = re.compile(r"(?=.*[A-Z]|.{3})[A-Za-z]{2,}")
"""Letters that are a text and not a product: three and more, or with a capital."""


@dataclass(frozen=True)
class Parsed:
    """A text and the expressions that math-verify reads in it; empty: none."""

    text: str
    """as math-verify reads it, without units and other words"""
    found: list[Any]
    source: str = ""
    """a formula as it is written; empty: prose"""

    @property
    def expression(self) -> Any:
        """The expression; None if the text could not be read as mathematics."""
        return next((each for each in self.found if not isinstance(each, str)), None)


def read(text: str, targets: tuple[Any, ...] = LATEX_AND_NUMBERS) -> Parsed:
    """Return what math-verify reads in ``text``. LaTeX is read inside $ $, \\( \\), \\[ \\] and \\boxed{} only."""
    found = parse(text, list(targets), parsing_timeout=None)
    return Parsed(next((each for each in reversed(found) if isinstance(each, str)), text), found)


def accepted(gold: Parsed, answer: Parsed, prompt: str = "", digits: int = FLOAT_DIGITS, **settings: bool) -> bool:
    """Return whether ``answer`` is right.

    Args:
        gold: the right answer.
        answer: the answer to compare.
        prompt: the problem; an answer that is copied from it does not count.
        digits: decimals in which floats must be equal.
        settings: of math-verify.
    """
    if not verify(gold.found, answer.found, float_rounding=digits, timeout_seconds=None, **settings):
        return False
    try:
        return not refuted(gold, answer, prompt)
    except Exception:  # sympy may raise anything on the text of a model; math-verify counts its errors as wrong, too
        log.debug("%r cannot be compared with %r", answer.text, gold.text, exc_info=True)
        return False


def refuted(gold: Parsed, answer: Parsed, prompt: str = "") -> bool:
    """Return whether a positive verdict of math-verify is one of its wrong verdicts:

    - a number that equals the gold number only because both are rounded to decimals: 0.0 for 6.63e-34;
    - a chain with a wrong number: 8=7 for 7;
    - an equation without the gold's solutions: 0=1 for x^2+y^2=-1;
    - an ordered pair or an interval for a set of numbers, or the reverse;
    - letters of a word in another order: BA for AB;
    - an answer that says something else of the number: > 5, \\neq 5 or 5 \\text{ is wrong} for 5;
    - several numbers: 6 \\to 5 for 5;
    - a statement of the problem in place of its answer: 5! for 120, or text copied from the prompt.
    """
    right, given = gold.expression, answer.expression
    if right is None or given is None or _written(gold) == _written(answer):
        return False
    return (
        _restates(gold.text, answer.text, prompt)
        or _wrong_chain(gold, answer)
        or _wrong_number(right, _side(given))
        or _other_solutions(right, given)
        or _other_order(gold, answer)
        or _other_statement(gold, answer)
    )


def _other_order(gold: Parsed, answer: Parsed) -> bool:
    """Return whether one answer has an order and the other one has none, or letters have another order."""
    right, given = gold.expression, answer.expression
    if isinstance(right, FiniteSet) and isinstance(given, Tuple | Interval) and len(right.args) > 1:
        return True
    word, letters = _squeezed(gold.text), _squeezed(answer.text)
    if isinstance(right, Tuple | Interval) and isinstance(given, FiniteSet) and letters.startswith(r"\{"):
        return True
    return bool(WORD.fullmatch(word)) and letters.isalpha() and word.lower() != letters.lower()


def _other_statement(gold: Parsed, answer: Parsed) -> bool:
    """Return whether the answer says something else of a value than that it is the answer."""
    right, given = _marks(gold), _marks(answer)
    if any(mark not in right for mark in NEGATIONS.findall(given) if r"\begin" not in given or mark[0] != "\\"):
        return True
    half, same = HALF.search(given), HALF.search(right)
    return half is not None and (same is None or same[0] != half[0])


def _marks(formula: Parsed) -> str:
    """Return the formula as it is written, with one command for each relation."""
    text = SPACING.sub("", formula.source or formula.text).replace("!=", r"\ne ")
    return re.sub(r"\\([gln]e)(?:q|qslant)(?![A-Za-z])", r"\\\1", text).strip(" $.")


def _restates(gold: str, answer: str, prompt: str) -> bool:
    if any(mark not in gold for mark in UNEVALUATED.findall(_last_side(answer))):
        return True
    copied = _squeezed(answer)
    return bool(OPERATOR.search(copied)) and copied != _squeezed(gold) and _is_part(copied, prompt)


def _last_side(text: str) -> str:
    """Return what is behind the last = that is not in a subscript, for example of a sum."""
    side = EQUALS.split(LATEX_SUBSCRIPT.sub("", text))[-1]
    return side if side.count("{") == side.count("}") else text


def _is_part(text: str, prompt: str) -> bool:
    """Return whether ``text`` is in ``prompt`` and not a part of a longer number or word there."""
    if len(text) <= 2:
        return False
    characters = r"[\s$]*".join(map(re.escape, text))
    return re.search(rf"(?<![\w.^]){characters}(?![\w^]|\.\d)", SPACING.sub("", prompt)) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"\s|\$|[.?]$", "", SPACING.sub("", text))


def _written(formula: Parsed) -> str:
    return _squeezed(formula.source or formula.text)


def _side(given: Any) -> Any:
    """Return the right side of an equation, any other expression as it is."""
    return given.rhs if isinstance(given, Eq) else given


def _is_number(expression: Any) -> bool:
    return isinstance(expression, Basic) and not expression.free_symbols and bool(getattr(expression, "is_number", 0))


def _wrong_number(right: Any, given: Any) -> bool:
    """Return whether two numbers differ although math-verify rounds them to the same decimals.

    A per cent sign may be left out, as in math-verify: 28 % is accepted for 28 and for 0.28.
    """
    if not (_is_number(right) and _is_number(given)):
        return False
    right, given = right.doit(), given.doit()  # 28 % is 28/100, not evaluated
    return not any(_equal(right * factor, given) for factor in (1, 100, S.One / 100))


def _equal(right: Any, given: Any) -> bool:
    difference = right - given
    if right.has(Float) or given.has(Float):
        return bool(abs(difference.evalf()) <= RELATIVE * abs(right.evalf()))
    return difference.equals(0) is not False


def _wrong_chain(gold: Parsed, answer: Parsed) -> bool:
    """Return whether a part of a chain a = b = c is a number other than its last part, or a step before the last one is
    a number other than the last: 6 \\to 5.
    """
    text = answer.text.strip()
    if EQUALS.search(gold.text):
        return False
    if NEARLY.match(text) and len(NEARLY.findall(text)) > 1:
        return True
    if not EQUALS.search(text):
        text = JOINED.sub(r"\\to ", text)
    parts = len(EQUALS.findall(text)) + len(STEPS.findall(text))
    if not parts:
        return False
    if parts > MOST_PARTS:
        return True
    steps = [_numbers(step) for step in STEPS.split(text)]
    alone = [step[0] for step in steps[:-1] if len(step) == 1]
    return any(_differ(chain[-1], each) for chain in [*steps, [*alone, steps[-1][-1]]] for each in chain[:-1])


def _numbers(chain: str) -> list[Any]:
    return [read(f"${part}$", LATEX).expression for part in EQUALS.split(chain)]


def _differ(last: Any, number: Any) -> bool:
    return _is_number(last) and _is_number(number) and _wrong_number(last, number)


def _other_solutions(right: Any, given: Any) -> bool:
    """Return whether an equation was accepted for an equation without solutions, and is not a multiple of it."""
    if not isinstance(right, Eq) or isinstance(right.lhs, BooleanAtom) or not right.free_symbols:
        return False
    if right.lhs.is_Symbol:  # x = 5
        return False
    if isinstance(given, Eq):
        ratio = simplify((right.lhs - right.rhs) / (given.lhs - given.rhs)) if given.lhs != given.rhs else S.Zero
        if ratio != 0 and ratio.is_number and ratio.is_finite:
            return False
    elif not isinstance(given, BooleanAtom | Relational):
        return False
    if len(right.free_symbols) > 1:
        return True
    return solveset(right, next(iter(right.free_symbols)), S.Reals) == S.EmptySet
