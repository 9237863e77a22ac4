"""Verdicts of the reward ``math``; docs/rewards.md has further ones."""

from __future__ import annotations

import pytest

from rljob.api.rewards.kinds.mathematics import MathOptions
from rljob.rewards.answer_text import LONGEST_ANSWER
from rljob.rewards.math_reward import MathReward


def score(gold: str, answer: str) -> float:
    completion = f"\\boxed{{{answer}}}"
    return MathReward(MathOptions(), [])(completion=completion, problem={"answer": gold}, prompt="")[0]


WRONG = [
    ("5", r"\neq 5"),
    ("5", "≠5"),
    ("5", "> 5"),
    ("5", r"\ge 5"),
    ("5", r"\geqslant 5"),
    ("5", "≤ 5"),
    ("5", r"\notin 5"),
    ("5", r"\not= 5"),
    ("5", r"\not=5"),
    ("5", r"5 \text{ is wrong}"),
    ("5", r"5\text{ or more}"),
    ("5", r"\text{at least }5"),
    ("5", r"6 \to 5"),
    ("5", r"6 \Rightarrow 5"),
    ("5", r"6 \implies 5"),
    ("5", r"6 \lor 5"),
    ("5", r"6 \\ 5"),
    ("5", r"\approx 6 \approx 5"),
    ("5", r"6 \approx 5"),
    ("5", "6 → 5"),
    ("5", "6 ⇒ 5"),
    ("5", "6 ≈ 5"),
    ("5", "6 ∨ 5"),
    ("5", "∉ 5"),
    ("5", r"\in 5"),
    ("5", r"8=7 \implies 5"),
    ("5", r"x=6 \lor x=5"),
    ("5", r"6 \\ x=5"),
    ("5", r"x=6\\x=5"),
    ("5", "5 >"),
    ("5", r"5 \le"),
    ("5", r"\lnot 5"),
    ("5", r"6 \iff 5"),
    ("5", "not 5"),
    ("5", "5 is wrong"),
    ("5", "5=6"),
    ("5", "e=5"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", r"\left\{1,2\right\}"),
    ("[1,2]", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    (r"\{1,2\}", "[1,2]"),
    ("AB", "BA"),
    ("abc", "cba"),
    ("Tom", "mTo"),
    ("11/2", "1 1/2"),
    ("3", "1 1/2"),
    (r"x<1 \text{ or } x>2", "x<1"),
    (r"x<1 \text{ or } x>2", r"(-\infty,1]\cup(2,\infty)"),
    (r"x<1 \text{ or } x>2", r"x<1 \text{ and } x>2"),
    (r"x>1 \text{ and } x<2", r"(-\infty,2)\cup(1,\infty)"),
    (r"\ge 5", r"\le 5"),
    ("5", r"5 \text{ x}\text{ or more}"),
    ("5", r"6 \equiv 5"),
    ("5", r"6 \cup 5"),
    ("5", r"6 \cap 5"),
    ("5", r"6 \mid 5"),
    ("5", r"6 \parallel 5"),
    ("5", r"6 \setminus 5"),
    ("5", r"6 \wedge 5"),
    ("5", r"6 \land 5"),
    ("5", r"6 \subset 5"),
    ("5", r"6 \supseteq 5"),
    ("5", r"6 \oplus 5"),
    ("5", r"6 \otimes 5"),
    ("5", r"6 \odot 5"),
    ("5", r"6 \prec 5"),
    ("5", r"6 \succ 5"),
    ("5", r"6 \doteq 5"),
    ("5", r"6 \leftrightarrow 5"),
    ("5", r"6 \& 5"),
    ("5", r"6 \| 5"),
    ("5", r"6 | 5"),
    ("5", r"6 == 5"),
    ("5", r"6 \circ 5"),
    ("5", r"\gtrsim 5"),
    ("5", r"\lesssim 5"),
    ("5", r"\succ 5"),
    ("120", "120 = 5!"),
    ("6", r"\sum_{i=1}^{3} i"),
    ("6", r"\sum_{\substack{i=1 \\ i \ne 5}}^{3} i"),
    ("10", r"\binom{5}{2}"),
]

RIGHT = [
    ("5", "x=5"),
    ("5", "5=x"),
    ("5", "5 dollars"),
    ("5", r"\frac{10}{2} \implies 5"),
    ("5", r"2x=10 \implies x=5"),
    ("5", r"\approx 5"),
    ("3/2", "1 1/2"),
    ("-3/2", "-1 1/2"),
    ("1 1/2", "3/2"),
    ("1 1/2", r"1\frac12"),
    (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"),
    (r"x<1 \text{ or } x>2", r"x>2 \text{ or } x<1"),
    (r"x<1 \text{ or } x>2", r"2<x \lor x<1"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "1,2"),
    ("(1,2)", "1,2"),
    ("ab", "ba"),
    ("xy", "yx"),
    ("Tom", "tom"),
    ("Tom", r"\text{Tom}"),
    ("5", r"5 \text{ apples}"),
    (r"\ge 5", r"\geq 5"),
    (r"x \ge 5", r"5 \le x"),
    ("x>2", "2<x"),
    (r"x \ne 5", r"x \neq 5"),
    ("5", r"x \in \{5\}"),
    ("No solution", r"\text{No solution}"),
    (r"5 \text{ or more}", r"5 \text{ or more}"),
    (r"5\%", r"5\\%"),
    ("(1,2),(3,4)", r"\{(1,2),(3,4)\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"x=1 \text{ or } x=2", r"\{1,2\}"),
    ("0.3", r"P(X<2)=0.3"),
    ("0.3", r"P(A \cap B)=0.3"),
    ("0.3", r"P(A \mid B)=0.3"),
    ("0.3", r"P(A | B)=0.3"),
    ("5", r"\min_{x>0} f(x)=5"),
    ("5", r"\lim_{x \to 0} f(x)=5"),
    ("6", r"\sum_{i=1}^{3} i = 6"),
    ("10", r"\binom{5}{2}=10"),
    ("3", r"\int_0^1 3dx = 3"),
    ("5", r"2 \oplus 3 = 5"),
    ("5", r"(f \circ g)(2) = 5"),
    ("5", "5 == 5"),
    ("5", "|3-8|"),
    ("6", "2|3|"),
    ("30", r"30^\circ"),
    ("30", r"30^{\circ}"),
    (r"\{1,2\}", r"\{1\} \cup \{2\}"),
    (r"[0,1] \cup \{5\}", r"\{5\} \cup [0,1]"),
]


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_a_wrong_answer_that_holds_the_right_value_scores_0(gold: str, answer: str) -> None:
    assert score(gold, answer) == 0.0


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_a_right_answer_in_another_form_scores_1(gold: str, answer: str) -> None:
    assert score(gold, answer) == 1.0


@pytest.mark.parametrize(("characters", "reward"), [(LONGEST_ANSWER, 1.0), (LONGEST_ANSWER + 1, 0.0)])
def test_the_longest_answer_that_is_read(characters: int, reward: float) -> None:
    assert score("7", "7".rjust(characters)) == reward
