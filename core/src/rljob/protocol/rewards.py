"""What a runner asks of a reward service: POST /v1/score with a ScoreRequest, answered by a ScoreReply, JSON."""

from __future__ import annotations

from typing import Any

import msgspec


class ScoreItem(msgspec.Struct):
    """One sample to score."""

    sample: str
    task: str
    prompt: str  # as given to the model
    completion: str  # as the model wrote it, special tokens left out
    finish: str  # stop | length
    problem: dict[str, Any]  # the row of the task's data; for reasoning-gym: question, answer, metadata


class ScoreRequest(msgspec.Struct):
    """Samples to score together."""

    items: list[ScoreItem]


class Score(msgspec.Struct):
    """Verdict on one sample. ``error`` not empty: it could not be scored, ``reward`` means nothing."""

    sample: str
    reward: float
    metrics: dict[str, float] = {}
    error: str = ""


class ScoreReply(msgspec.Struct):
    """Scores in the order of the request."""

    scores: list[Score]
