"""Protocol of reward services: POST /v1/score with a ScoreRequest, answered with a ScoreReply, both JSON."""

from __future__ import annotations

from typing import Any

import msgspec


class ScoreItem(msgspec.Struct):
    """One sample to score."""

    sample: str
    task: str
    prompt: str  # as given to the model
    completion: str  # as generated, without special tokens
    finish: str  # stop | length
    problem: dict[str, Any]  # the row of the task's data; for reasoning-gym: question, answer, metadata


class ScoreRequest(msgspec.Struct):
    """Samples to score together."""

    items: list[ScoreItem]


class Score(msgspec.Struct):
    """Score of one sample. If ``error`` is not empty, the sample could not be scored and ``reward`` has no meaning."""

    sample: str
    reward: float
    metrics: dict[str, float] = {}
    error: str = ""


class ScoreReply(msgspec.Struct):
    """Scores in the order of the request."""

    scores: list[Score]
