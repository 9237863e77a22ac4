"""Routes the samples of a task to their rewards: by the row, and to several with weights.

Each reward has a client of its own, so a slow reward delays only the samples that it scores.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from typing import Protocol

from rljob.api.tasks import Task
from rljob.protocol.score_messages import MAX_ERROR, Score, ScoreItem


class SampleScorer(Protocol):
    """Scores samples: a client of one reward (:class:`rljob.runner.scoring.RewardClient`), or a router to several."""

    @property
    def token_ids(self) -> bool:
        """Whether items need the token ids of the answer."""

    async def score(self, item: ScoreItem) -> Score:
        """Return the score of ``item``; its ``error`` is set if it could not be scored."""


def scorer_of(task: Task, clients: Mapping[str, SampleScorer]) -> SampleScorer | None:
    """Return the scorer of a task's samples; None: no reward scores them.

    Args:
        task: the task.
        clients: name of a reward → its client.
    """
    if not task.scored:
        return None
    simple = task.reward_column is None and not task.more_rewards
    return clients[task.reward] if simple and task.reward is not None else RewardRouter(task, clients)


class RewardRouter:
    """Requests the scores of a sample's rewards at the same time and adds them with their weights.

    Args:
        task: the task.
        clients: name of a reward → its client.
    """

    def __init__(self, task: Task, clients: Mapping[str, SampleScorer]) -> None:
        self._task = task
        self._clients = clients
        self.token_ids = any(client.token_ids for client in clients.values())
        """Whether a reward needs the token ids of answers."""

    async def score(self, item: ScoreItem) -> Score:
        """Return the score of ``item``; a sample that one of its rewards cannot score has an error."""
        try:
            main = self._task.reward_of(item.problem, self._clients)
        except ValueError as error:
            return Score(item.sample, 0.0, {}, str(error)[:MAX_ERROR])
        if main is None and not self._task.more_rewards:
            return Score(item.sample, 0.0)
        if main is not None and not self._task.more_rewards:
            return await self._clients[main].score(item)
        weights = {main: 1.0} if main is not None else {}
        for more in self._task.more_rewards:
            weights[more.name] = weights.get(more.name, 0.0) + more.weight
        scores = await asyncio.gather(*(self._clients[name].score(item) for name in weights))
        return _sum(item.sample, weights, dict(zip(weights, scores, strict=True)))


def weighted_metric(name: str) -> str:
    """Return the metric of a sample that is what one of its rewards gave it."""
    return f"reward/{name}"


def _sum(sample: str, weights: Mapping[str, float], scores: Mapping[str, Score]) -> Score:
    """Return the weighted sum of scores. Each reward is the metric reward/NAME, its metrics are NAME/METRIC."""
    failed = next((score for score in scores.values() if score.error), None)
    if failed is not None:
        return Score(sample, 0.0, {}, failed.error)
    metrics = {weighted_metric(name): score.reward for name, score in scores.items()}
    for name, score in scores.items():
        metrics |= {f"{name}/{key}": value for key, value in score.metrics.items()}
    turns = itertools.zip_longest(
        *([weights[name] * value for value in score.turn_rewards] for name, score in scores.items()), fillvalue=0.0
    )
    reward = math.fsum(weights[name] * score.reward for name, score in scores.items())
    return Score(sample, reward, metrics, "", [math.fsum(values) for values in turns])
