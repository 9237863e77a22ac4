"""Verdicts in replies of judges."""

from __future__ import annotations

import pytest

from rljob.rewards.judge_verdict import read_choice, read_score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<score>7</score>", 7.0),
        ("Good.\n<Score> 7.5 </Score>\n", 7.5),
        ("<score>**7**</score>", 7.0),
        ("<score>7/10</score>", 7.0),
        ("<score>3</score> No: <score>8</score>", 8.0),
        ("<think><score>2</score></think>Fine. <score>9</score>", 9.0),
        ("reasoning without an opening tag <score>2</score></think> <score>9</score>", 9.0),
        ("Rating: [[6]]", 6.0),
        ('```json\n{"score": 4, "why": "short"}\n```', 4.0),
        ('{"score": "4"}', 4.0),
        ("**Score:** 5/10", 5.0),
        ("Score: 8 out of 10", 8.0),
        ("<score>8 Out of 10</score>", 8.0),
        ("Score: **5**", 5.0),
        ("The score is 5.", 5.0),
        ("Score: 1. Score: 10", 10.0),
        # the form that was asked for counts, whatever else the reply holds
        ("<score>2</score> [[9]] Score: 8", 2.0),
        # no verdict
        ("", None),
        ("Very good", None),
        ("7", None),
        ("<score>N</score>", None),
        ("<score></score>", None),
        ("<score>7", None),
        ("<score>7 or 8</score>", None),
        ("<score>0</score>", None),
        ("<score>11</score>", None),
        ("<score>7/5</score>", None),
        ("Score: 8 out of 100", None),
        ("Score: 8/100", None),
        ("<score>8 out of 100</score>", None),
        ("<score>nan</score>", None),
        ("<score>1e1</score>", None),
        ("<score>٧</score>", None),
        ("<score>8</score> then <score>none</score>", None),
        ("<think>Perhaps <score>9</score>", None),
        ("<think>Perhaps <score>9</score></think>", None),
        ("Score: 9999999999", None),
        ("Score: 7-8", None),
        ("Score: 7/10.", 7.0),
        ("Score: 7/10, as all steps are right", 7.0),
        ("[[7]] (score: 7/10.)", 7.0),
        ("Score: 7\n\n- 2 steps are missing", 7.0),
        ("Score: 7\u20138", None),
        ("Score: 7<br>", 7.0),
        ("Score: 7\u2014all steps are right", 7.0),
        ("Score: 7: all steps are right", 7.0),
        ("Score: 7 - 8", None),
        ("Score: 5, or rather score: 7 or 8", None),
        ("Score: 7 to 8", None),
        ("Score: 1e1", None),
        ("Score: 7%", None),
        ("Score: 7,5", None),
        ("Score: 7, as all steps are right", 7.0),
        ("[[9]], so Score: 9/10", 9.0),
        ("Score: 7; all steps are right", 7.0),
        ("(score: 7)", 7.0),
        ("The lowest score is 1", None),
        ("The highest possible score is 10. Score: 3", 3.0),
        ("[[1]] is the index, so Score: 9", None),
        ("[[9]], so Score: 9", 9.0),
    ],
)
def test_the_last_score_after_the_reasoning_counts(reply: str, score: float | None) -> None:
    assert read_score(reply, 1, 10) == score


def test_a_scale_may_have_negative_scores() -> None:
    assert read_score("<score>-2</score>", -2, 2) == -2.0


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("<better>A</better>", 1.0),
        ("<better> b </better>", 0.0),
        ("<better>tie</better>", 0.5),
        ("<better>A</better> wait <better>B</better>", 0.0),
        ("[[A]]", 1.0),
        ("[[C]]", 0.5),
        ('{"winner": "B"}', 0.0),
        ("Better: response A", 1.0),
        ("**Winner:** B", 0.0),
        ("A", None),
        ("<better>Response A.</better>", 1.0),
        ("<better>both</better>", None),
        ("better: a response with an example", None),
        ("Better: A or B", None),
        ("Winner: A, B", None),
        ("Winner: A and B", None),
        ("The winner is A and B is wrong", 1.0),
        ("Winner: A, B has errors", 1.0),
        ("winner: response b, because it explains", 0.0),
        ("winner: response a or b", None),
        ("The winner is a tie", None),
        ("winner: tie", 0.5),
        ("winner: b", 0.0),
        ("winner: **b**.\nIt explains more.", 0.0),
        ("[[A]] but winner: B", None),
        ("<better>AB</better>", None),
        ("A is good, B is not", None),
        ("<think><better>A</better>", None),
    ],
)
def test_the_last_choice_after_the_reasoning_counts(reply: str, choice: float | None) -> None:
    assert read_choice(reply) == choice
