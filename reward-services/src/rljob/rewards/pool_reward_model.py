"""Scorer of the reward ``reward_model`` with a frozen pool of the job, whose engines classify."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rljob.api.extensions import load
from rljob.api.rewards import NotScored, Scorer
from rljob.api.rewards.kinds.reward_model import RewardModelOptions
from rljob.api.tasks import Task
from rljob.api.templates import text_of
from rljob.protocol.environment import pool_model, pool_token
from rljob.rewards.model_api import ModelApi, urls_of_pool

IN_THE_SERVICE = "rljob.rewards.reward_model_reward:RewardModelReward"


def make(options: RewardModelOptions, tasks: Sequence[Task]) -> Scorer:
    """Return the scorer for ``options``; only one without a pool imports torch.

    Raises:
        ValueError: the model, or the pool, cannot be used.
    """
    scorers: Any = load({}, IN_THE_SERVICE, "") if options.pool is None else PoolRewardModel
    scorer: Scorer = scorers(options, tasks)
    return scorer


class PoolRewardModel:
    """Asks an engine of the pool for the outputs of each sample (``/classify`` of vLLM).

    Args:
        options: the reward's ``config``, with ``pool``.
        tasks: unused; every factory of a reward receives them.

    Raises:
        ValueError: the job has no such pool.
    """

    def __init__(self, options: RewardModelOptions, tasks: Sequence[Task]) -> None:
        assert options.pool is not None
        self._options = options
        self._model = pool_model(options.pool)
        urls = [f"{url}/classify" for url in urls_of_pool(options.pool)]
        self.api = ModelApi(urls, "reward model", pool_token(), returns=True)

    async def __call__(
        self, *, prompt: str, completion: str, problem: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Return reward and the metric ``tokens``.

        Raises:
            NotScored: the sample is too long, or the engine has no outputs for it.
            ValueError: the row lacks the column.
        """
        options = self._options
        question = prompt if options.column is None else text_of(problem, options.column)
        fields: dict[str, Any] = {"model": self._model, "use_activation": False}
        if options.format == "text":
            fields["input"] = question + completion
        else:
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
            fields |= {"messages": chat, "add_generation_prompt": False}
        outputs, tokens = _outputs_of(await self.api.post(fields))
        if tokens > options.max_tokens:
            raise NotScored(f"the sample has {tokens:,} tokens, and maxTokens is {options.max_tokens:,}")
        if options.label >= len(outputs):
            raise NotScored(f"label {options.label}: the model has {len(outputs)} labels; lower it")
        return _activated(outputs, options.label, options.activation), {"tokens": float(tokens)}


def _outputs_of(reply: bytes) -> tuple[list[float], int]:
    """Return the outputs of the model and the number of tokens.

    Raises:
        NotScored: the reply has none.
    """
    try:
        found = json.loads(reply)
        (sample,) = found["data"]
        outputs = [float(value) for value in sample["probs"]]
        tokens = int(found["usage"]["prompt_tokens"])
    except (ValueError, RecursionError, LookupError, TypeError, OverflowError) as error:
        raise NotScored(f"the reward model answered something else than outputs ({error!r})") from None
    if not all(map(math.isfinite, outputs)):
        raise NotScored("an output of the reward model is not finite")
    return outputs, tokens


def _activated(outputs: Sequence[float], label: int, activation: str) -> float:
    """Return output ``label`` after the activation."""
    if activation == "sigmoid":
        return 0.5 * (1.0 + math.tanh(0.5 * outputs[label]))  # never overflows
    if activation == "softmax":
        greatest = max(outputs)
        powers = [math.exp(output - greatest) for output in outputs]
        return powers[label] / math.fsum(powers)
    return outputs[label]
