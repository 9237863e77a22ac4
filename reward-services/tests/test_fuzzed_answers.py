"""Fuzzed answers never crash a reward, never compute for long, and never score by accident.

With RLJOB_FUZZ=1 (`make fuzz`) there are 100,000 texts, otherwise a sample.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from rljob.api.extensions import load
from rljob.api.rewards import REWARDS
from rljob.protocol.score_messages import ScoreItem
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.instruction_checks import CHECKS
from rljob.rewards.judge_verdict import read_choice, read_score

TEXTS = 100_000 if os.environ.get("RLJOB_FUZZ") else 1_000
LONGEST_SECONDS = 5.0
COMMANDS = (
    r"\boxed{ \boxed \fbox{ \frac{ \frac \sqrt[ \sqrt{ \left( \right) \begin{pmatrix} \end{pmatrix} \\ \text{ \{ \} \("
    r" \) \[ \] \mathbb{R} \int_0 \sum_{i=1} \infty \cdot \times \pm \cup \pi \sin \log_ \lim_{x\to \binom{ \overline{"
    r" \emptyset ^{ _{ <answer> </answer> <think> </think> ``` **Answer:** $$ e^ 10^{ mod 1/0"
)
PIECES = [
    *"0123456789abxyzABCD{}[]()$^_\\&%~.,;:!?+-*/=<>|'\"` \n\t",
    *"−–—×·÷√π∞≤≥≠∪∩∈±°∅²³⁻½¾₂１٣ॐ好é\u200b\u202e\ufeff\u0301🙂",
    *COMMANDS.split(" "),
    "the answer is ",
    "answer: ",
]
GOLDS = ["-7919", "\\frac{104729}{3571}", "\\sqrt{7907}+q", "\\{7919, 7907\\}", "[7901, 7919)", "w = 7907", "7919\\%"]
"""Not in the alphabet: an accident would need four right digits in a row."""
CASES: dict[str, tuple[list[dict], list[dict]]] = {
    "math": ([{"answer": place} for place in ("boxed", "tag", "text")], [{"answer": gold} for gold in GOLDS]),
    "multiple_choice": ([{"choices": 26}], [{"answer": "Q"}]),
    "json_schema": ([{"schema": {"type": "object", "required": ["city"]}}], [{}]),
    "regex": ([{"pattern": "Q+"}], [{}]),
    "format": ([{"tags": ["q", "r"]}], [{}]),
    "exact_match": ([{"extract": "####(.*)"}], [{"answer": "7919"}]),
}


def text(source: random.Random) -> str:
    debris = "".join(source.choices(PIECES, k=source.randrange(1, 40)))
    match source.randrange(4):
        case 0:
            return debris
        case 1:
            return f"\\boxed{{{debris}}}"
        case 2:
            return f"<answer>{debris}</answer>"
        case _:
            return f"${debris}$"


@pytest.mark.timeout(3600 if os.environ.get("RLJOB_FUZZ") else 300)
@pytest.mark.parametrize("name", CASES)
def test_fuzzed_answers_score_nothing_and_raise_nothing(name: str) -> None:
    kind, source = REWARDS[name], random.Random(7)
    assert isinstance(kind.make, str)
    make = load({}, kind.make, name)
    configs, rows = CASES[name]
    evaluators = [RewardEvaluator(make(kind.parse(config), []), name) for config in configs]
    for i in range(TEXTS):
        completion, row = text(source), rows[i % len(rows)]
        began = time.process_time()
        score = evaluators[i % len(evaluators)](ScoreItem("s", "t", "", completion, "stop", row))
        assert (score.error, score.reward) == ("", 0.0), repr(completion)
        assert time.process_time() - began < LONGEST_SECONDS, repr(completion)


LONG = ["1" * 50_000, "\n" * 50_000, "answer" + " " * 50_000, "- " * 25_000, "(" * 50_000, "score: " * 7_000]
LONG += ["\\boxed{" * 7_000, "\\boxed{" * 5_500 + "}" * 5_500]
LONG += [text + " " * 50_000 + "x" for text in ("The answer is Z", "score:", "winner is")]
"""Texts for which an expression that goes back needs the square of their length."""


@pytest.mark.parametrize("text", LONG, ids=lambda text: ascii(text[:8]))
def test_no_expression_goes_back_over_a_long_text(text: str) -> None:
    began = time.process_time()
    for name, (configs, rows) in CASES.items():
        if name != "math":  # it has parsers, which the worker ends
            kind = REWARDS[name]
            assert isinstance(kind.make, str)
            scorer = load({}, kind.make, name)(kind.parse(configs[0]), [])
            assert RewardEvaluator(scorer, name)(ScoreItem("s", "t", "", text, "stop", rows[0])).error == ""
    assert [read_score(text, 1, 10), read_choice(text)] == [None, None]
    assert not CHECKS["detectable_format:number_bullet_lists"](text, num_bullets=3)
    assert not CHECKS["detectable_content:postscript"](text, postscript_marker="P.S.")
    assert time.process_time() - began < LONGEST_SECONDS
