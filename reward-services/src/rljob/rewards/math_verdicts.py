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
EQUALS = re.compile(r"(?<![\\<>!:])=(?!=)")
APPROXIMATE = 0.05
"""Relative difference of two numbers between which \\approx is right."""
_ABOUT = r"\\(?:approx|simeq|sim|cong|doteq)(?![A-Za-z])"
_ARROWS = r"\\(?:[Ll]ong)?(?:[Ll]eft)?[Rr]ightarrow(?![A-Za-z])|\\(?:to|implies|iff)(?![A-Za-z])"
CHAIN = re.compile(rf"{EQUALS.pattern}|{_ABOUT}|{_ARROWS}|\\(?:lor|vee|land|wedge)(?![A-Za-z])|\\\\")
"""What joins the parts of a chain; of an answer that is a number, math-verify reads the last part only."""
MOST_PARTS = 50
"""Of a chain that is an answer; reading more takes seconds."""
RELATION = re.compile(
    r"[<>\u2260\u2264\u2265\u2209]|\\(?:n?(?:le|ge|leq|geq|lt|gt|less|gtr)(?:q|slant|qslant)?|ll|gg|ne|neq|not|notin|neg|lnot)"
    r"(?![A-Za-z])|\b(?:wrong|incorrect|false|not)\b"
)
"""What makes another statement of a number: > 5, \\neq 5, 5 \\text{ is wrong}."""
BRACES = re.compile(r"\\l?brace(?![A-Za-z])|\\\{")
WORD = re.compile(r"[a-z]*[A-Z][A-Za-z]+|[a-z]+[A-Z]")
UNEVALUATED = re.compile(
    r"!(?!=)|\\(?:int|iint|oint|sum|prod|lim|binom|dbinom|tbinom|choose|pmod|bmod|mod)(?![A-Za-z])"
)
"""Operations that state a problem; the answer to it does not contain them, unless the gold answer does."""
SPACING = re.compile(r"\\(?:[,;!: ]|left(?![A-Za-z])|right(?![A-Za-z]))")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|operatorname)\{([^{}]*)\}")
OPERATOR = re.compile(r"[-+*/^!=<>(]|\\[A-Za-z]+")


@dataclass(frozen=True)
class Parsed:
    """A text and the expressions that math-verify reads in it; empty: none.

    ``whole``: the text with words that math-verify leaves out; empty: there are other sentences around it.
    """

    text: str
    found: list[Any]
    whole: str = ""

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
    - a chain with a wrong number: 8=7 or 8 \\to 7 for 7;
    - another statement of the number: \\neq 7, > 7;
    - an equation without the gold's solutions: 0=1 for x^2+y^2=-1;
    - an ordered pair or an interval for a set of numbers, and a set for them;
    - the letters of a word with capitals in another order, BA for AB;
    - a statement of the problem in place of its answer: 5! for 120, or text copied from the prompt.
    """
    right, given = gold.expression, answer.expression
    if right is None or given is None:
        return False
    if _other_relation(gold, answer):
        return True
    return _squeezed(gold.text) != _squeezed(answer.text) and (
        _restates(gold.text, answer.text, prompt)
        or _wrong_chain(gold, answer)
        or _wrong_number(right, _side(given))
        or _other_solutions(right, given)
        or _other_order(gold, answer)
    )


def _restates(gold: str, answer: str, prompt: str) -> bool:
    if any(mark not in gold for mark in UNEVALUATED.findall(answer)):
        return True
    copied = _squeezed(answer)
    return bool(OPERATOR.search(copied)) and copied != _squeezed(gold) and _is_part(copied, prompt)


def _is_part(text: str, prompt: str) -> bool:
    """Return whether ``text`` is in ``prompt`` and not a part of a longer number or word there."""
    if len(text) <= 2:
        return False
    characters = r"[\s$]*".join(map(re.escape, text))
    return re.search(rf"(?<![\w.^]){characters}(?![\w^]|\.\d)", SPACING.sub("", prompt)) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"\s|\$|[.?]$", "", SPACING.sub("", text))


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


def _other_relation(gold: Parsed, answer: Parsed) -> bool:
    """Return whether a number is the answer, and the text says something else about it than that."""
    return (
        _is_number(gold.expression)
        and _is_number(_side(answer.expression))
        and RELATION.search(answer.whole or answer.text) is not None
        and RELATION.search(gold.whole or gold.text) is None
    )


def _other_order(gold: Parsed, answer: Parsed) -> bool:
    """Return whether a set was accepted for a pair or an interval, or the reverse, or a word for another one."""
    right, given = gold.expression, answer.expression
    if isinstance(right, FiniteSet) and isinstance(given, Tuple | Interval) and len(right.args) > 1:
        return True
    if isinstance(right, Tuple | Interval) and isinstance(given, FiniteSet):
        return BRACES.search(answer.text) is not None and BRACES.search(gold.text) is None
    word, letters = (_squeezed(WRAPPED.sub(r"\1", each.text)) for each in (gold, answer))
    return WORD.fullmatch(word) is not None and letters.isalpha() and letters.lower() != word.lower()


def _wrong_chain(gold: Parsed, answer: Parsed) -> bool:
    """Return whether a part of a chain a = b = c is a number other than its last part."""
    parts = CHAIN.split(answer.text)
    if len(parts) < 2 or CHAIN.search(gold.text):
        return False
    if len(parts) > MOST_PARTS:
        return True
    numbers = [read(f"${part}$", LATEX).expression for part in parts]
    last, right, wrong = numbers[-1], gold.expression, _wrong_number
    if re.search(_ABOUT, answer.text):  # math-verify takes one of its parts
        wrong = _far_number
        if _is_number(last) and _is_number(right) and _wrong_number(right, last):
            return False
    return _is_number(last) and any(_is_number(each) and wrong(last, each) for each in numbers[:-1])


def _far_number(right: Any, given: Any) -> bool:
    """Return whether two numbers are not even about equal."""
    return bool(abs((right - given).evalf()) > APPROXIMATE * abs(right.evalf()))


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
