"""Implementations of extension points that a manifest of a test names as module:attribute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rljob.protocol.rewards import Score
from rljob.runner.context import Context
from rljob.trainer.losses import Objective

OBSERVATION = "\nAgain:"
FIRST_TURN_REWARD = 0.25


def one(completion: str) -> float:
    """Return 1 for every completion."""
    return 1.0


def reinforce(logprobs_BK: Tensor, denominator_BK: Tensor, advantages_B: Tensor, *settings: Any) -> Objective:
    """Return logprob times advantage: REINFORCE."""
    values_BK = logprobs_BK * advantages_B.unsqueeze(-1)
    return Objective(values_BK, torch.ones_like(logprobs_BK), torch.zeros_like(logprobs_BK, dtype=torch.bool))


async def two_turns(context: Context) -> Score:
    """Generate an answer, and another after an observation; the first has a reward of its own."""
    first = await context.generate(context.prompt.token_ids)
    context.reward(FIRST_TURN_REWARD)
    second = await context.generate(context.prompt.token_ids + first.token_ids + context.encode(OBSERVATION))
    return await context.score(context.decode(second.token_ids), second.finish)
