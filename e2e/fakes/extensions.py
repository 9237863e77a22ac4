"""Implementations of extension points that a manifest of a test names as module:attribute."""

from __future__ import annotations

import torch

from rljob.protocol.rewards import Score
from rljob.runner.context import Context
from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs


def one(completion: str) -> float:
    """Return 1 for every completion."""
    return 1.0


def reinforce(inputs: ObjectiveInputs) -> Objective:
    """Return logprob times advantage: REINFORCE."""
    none_BK = torch.zeros_like(inputs.mask_BK)
    return Objective(inputs.logprobs_BK * inputs.advantages_BK, torch.ones_like(inputs.logprobs_BK), none_BK)


async def two_turns(context: Context) -> Score:
    """Generate twice, the second time after the first answer."""
    first = await context.generate(context.prompt.token_ids)
    second = await context.generate(context.prompt.token_ids + first.token_ids)
    return await context.score(context.decode(second.token_ids), second.finish)
