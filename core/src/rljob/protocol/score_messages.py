"""Protocol of reward services: POST /v1/score with a ScoreRequest, answered with a ScoreReply, both JSON.

The runner sends no request beyond the bounds below and accepts no reply beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

TOLERANCE = 1e-9  # relative, of the sum of turn rewards
MAX_ITEMS = 64
"""Samples of a request."""
MAX_NAME = 256
"""Characters of the name of a sample or task, and of its finish."""
MAX_TEXT = 16 << 20
"""Characters of a prompt, a completion, or a turn."""
MAX_REQUEST_BYTES = 64 << 20
"""Length of a ScoreRequest."""
MAX_SCORE_BYTES = 256 << 10
"""Length of a Score. A ScoreReply has at most this length for each sample of its request."""
MAX_ERROR = 1000
"""Characters of the error of a Score; longer ones are cut."""
SAMPLE_TRIES = 2
"""Workers of rljob's service that may end on a sample, each within the time limit of a sample."""
MAX_MAGNITUDE = 1e30
"""Of rewards and metrics: their sums and squares stay finite in float64."""


class ScoreTurn(msgspec.Struct):
    """Text that followed the prompt: an answer of the model, or an observation between two answers."""

    kind: Literal["model", "observation"]
    text: str  # without special tokens


class ScoreItem(msgspec.Struct):
    """One sample to score."""

    sample: str
    task: str
    prompt: str  # as given to the model
    completion: str  # the last answer as generated, without special tokens
    finish: str  # stop | length
    problem: dict[str, Any]  # the row of the task's data; for reasoning-gym: question, answer, metadata
    turns: list[ScoreTurn] = []  # of a sample with several turns: all text after the prompt, in order
    response_tokens: int | None = None  # tokens of the last answer; null: unknown
    metadata: dict[str, Any] = {}  # of the sample: split (train | heldOut), row, attempt, maxTokens
    response_token_ids: list[int] | None = None  # of the last answer; null: the reward has no tokenIds, or unknown


class ScoreRequest(msgspec.Struct):
    """Samples to score together."""

    items: list[ScoreItem]


def excess(items: Sequence[ScoreItem]) -> str:
    """Return a sentence on the first bound that a request's items exceed; empty if there is none."""
    if len(items) > MAX_ITEMS:
        return f"the request has {len(items):,} items; send at most {MAX_ITEMS}"
    for i, item in enumerate(items):
        for name in ("sample", "task", "finish"):
            if (length := len(getattr(item, name))) > MAX_NAME:
                return f"items[{i}].{name} has {length:,} characters; send at most {MAX_NAME}"
        texts = {"prompt": item.prompt, "completion": item.completion}
        texts |= {f"turns[{turn}].text": each.text for turn, each in enumerate(item.turns)}
        for name, text in texts.items():
            if len(text) > MAX_TEXT:
                return f"items[{i}].{name} has {len(text):,} characters; send at most {MAX_TEXT:,}"
    return ""


class Score(msgspec.Struct):
    """Score of one sample. If ``error`` is not empty, the sample could not be scored and ``reward`` has no meaning.

    ``later``: it cannot be scored now, for the reason in ``error``; the runner asks again.
    ``turn_rewards`` credit parts of ``reward`` to the first, second, … turn. The last turn gets the rest.
    """

    sample: str
    reward: float
    metrics: dict[str, float] = {}
    error: str = ""
    turn_rewards: list[float] = []
    later: bool = False


class ScoreReply(msgspec.Struct, omit_defaults=True):
    """Scores in the order of the request.

    ``deterministic``: samples that are equal except for their ``sample`` always have the same score; the runner then
    asks for one of them.
    """

    scores: list[Score]
    deterministic: bool = False


class RecordedSample(msgspec.Struct):
    """runner → `rljob reward check`: a sample of a run, and what each reward gave it, by name (missing: unknown)."""

    item: ScoreItem
    rewards: dict[str, float]


class CheckedSample(msgspec.Struct):
    """reward service → `rljob reward check`: a recorded sample, its recorded reward (None: none), and its new score.

    ``seconds``: time of the score. If ``error`` is not empty, ``reward`` has no meaning.
    """

    sample: str
    task: str
    recorded: float | None
    reward: float
    metrics: dict[str, float]
    error: str
    seconds: float


def usable(value: float) -> bool:
    """Return whether a reward or a metric is a number, finite, and not beyond MAX_MAGNITUDE."""
    return abs(value) <= MAX_MAGNITUDE  # NaN is not


def credit_turns(turns: int, reward: float, turn_rewards: Sequence[float] = ()) -> list[float]:
    """Return the reward of every turn of a sample. The sum is the sample's reward (see :func:`add_up`).

    Args:
        turns: number of turns.
        reward: reward of the sample.
        turn_rewards: rewards of the first turns; the last turn gets the rest of ``reward``.

    Raises:
        ValueError: there is no turn, there are more rewards than turns, or a reward is not usable.
    """
    if turns < 1:
        raise ValueError("it has a reward, but no turn was generated")
    if len(turn_rewards) > turns:
        raise ValueError(f"it has rewards of {len(turn_rewards)} turns, but {turns} turns; give at most one a turn")
    if not usable(reward):
        raise ValueError(f"its reward is {reward}")
    for turn, value in enumerate(turn_rewards):
        if not usable(value):
            raise ValueError(f"the reward of turn {turn} is {value}")
    if turns == 1 and not turn_rewards:
        return [float(reward)]
    credited = [*map(float, turn_rewards), *[0.0] * (turns - len(turn_rewards))]
    credited[-1] += reward - math.fsum(credited)
    if not add_up(credited, reward):
        raise ValueError(f"the reward of its last turn is {credited[-1]}, the rest of {reward}")
    return credited


def add_up(turn_rewards: Sequence[float], reward: float) -> bool:
    """Return whether the rewards of a sample's turns are usable and add up to its reward, except for rounding.

    ``reward`` is the reward that the sample received. The sum of the turns' rewards may differ in the last digits.
    """
    if not all(map(usable, (*turn_rewards, reward))):
        return False
    largest = max(map(abs, turn_rewards), default=0.0)
    return math.isclose(math.fsum(turn_rewards), reward, rel_tol=TOLERANCE, abs_tol=TOLERANCE * max(1.0, largest))
