"""Scorer of the reward ``judge``: asks a language model for a score, or for the better of two responses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import NotScored
from rljob.api.rewards.kinds.judge import JudgeOptions
from rljob.api.tasks import Task
from rljob.api.templates import text_of
from rljob.protocol.environment import pool_model, pool_token
from rljob.rewards.chat_api import ChatApi
from rljob.rewards.judge_prompt import pairwise_prompt, pointwise_prompt
from rljob.rewards.judge_verdict import read_choice, read_score
from rljob.rewards.model_api import urls_of_pool

SHOWN = 200  # characters at the end of a reply without a verdict


class JudgeReward:
    """Scores a sample by one request, or by two in both orders. A reply without a verdict is not scored, never 0.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.

    Raises:
        ValueError: the token's variable is not set, or the job has no such pool.
    """

    def __init__(self, options: JudgeOptions, tasks: Sequence[Task]) -> None:
        self._options = options
        self.deterministic = options.temperature == 0
        self.api = _api(options)

    async def __call__(
        self, *, prompt: str, completion: str, problem: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Return reward and metrics.

        Raises:
            NotScored: the judge gives no verdict.
            ValueError: the row lacks a column.
        """
        if self._options.mode == "pairwise":
            return await self._compare(prompt, completion, problem)
        options = self._options
        reply = await self.api.ask(pointwise_prompt(options, prompt, completion, problem))
        score = read_score(reply, options.lowest, options.highest)
        if score is None:
            raise NotScored(f"the judge gave no score from {options.lowest} to {options.highest}: {_end_of(reply)}")
        return (score - options.lowest) / (options.highest - options.lowest), {"score": score}

    async def _compare(self, prompt: str, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the mean of both orders: 1 better than the reference, 0.5 as good, 0 worse."""
        options = self._options
        assert options.reference is not None, "the options require it"
        reference = text_of(problem, options.reference)
        try:
            async with asyncio.TaskGroup() as both:
                first = both.create_task(self._prefers_first(prompt, completion, reference, problem))
                second = both.create_task(self._prefers_first(prompt, reference, completion, problem))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        found = first.result(), 1.0 - second.result()
        return sum(found) / 2, {"consistent": float(found[0] == found[1])}

    async def _prefers_first(self, prompt: str, first: str, second: str, problem: dict[str, Any]) -> float:
        reply = await self.api.ask(pairwise_prompt(self._options, prompt, first, second, problem))
        choice = read_choice(reply)
        if choice is None:
            raise NotScored(f"the judge named no better response: {_end_of(reply)}")
        return choice


def _api(options: JudgeOptions) -> ChatApi:
    """Return the client of the API that the options name.

    Raises:
        ValueError: see :class:`JudgeReward`.
    """
    settings = options.max_tokens, options.temperature
    if options.pool is not None:
        urls = [f"{url}/v1" for url in urls_of_pool(options.pool)]
        return ChatApi(urls, pool_model(options.pool), *settings, pool_token(), returns=True)
    assert options.url is not None and options.model is not None, "the options require them"
    token = os.environ.get(options.token_variable, "") if options.token_variable is not None else ""
    if options.token_variable is not None and not token:
        raise ValueError(f"tokenVariable {options.token_variable} is not set in the reward service; set it")
    return ChatApi([options.url], options.model, *settings, token)


def _end_of(reply: str) -> str:
    return repr(reply[-SHOWN:])
