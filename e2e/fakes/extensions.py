"""Implementations of extension points that a manifest of a test names as module:attribute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rljob.api.base import Model
from rljob.api.rewards import RewardKind, Row
from rljob.api.tasks import Task
from rljob.protocol.score_messages import Score
from rljob.runner.context import Context
from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs

OBSERVATION = "\nAgain:"
FIRST_TURN_REWARD = 0.25


def one(completion: str) -> float:
    """Return 1 for every completion."""
    return 1.0


class TargetOptions(Model):
    """Options of :data:`TARGET`."""

    column: str = "answer"
    """column with the wanted number of characters"""
    tolerance: int = 0
    """permitted difference"""


def check_target(row: Row, options: TargetOptions) -> None:
    """Raise ValueError if the row has no number."""
    if not str(row.get(options.column, "")).isdigit():
        raise ValueError(f"column {options.column!r} holds no number")


def make_target(options: TargetOptions, tasks: Sequence[Task]) -> Callable[..., float]:
    """Return a scorer that gives 1 to a completion of the wanted length."""

    def reward(completion: str, problem: dict[str, Any]) -> float:
        return float(abs(len(completion) - int(problem[options.column])) <= options.tolerance)

    return reward


TARGET = RewardKind(make=make_target, options=TargetOptions, row_check=check_target)


def reinforce(inputs: ObjectiveInputs) -> Objective:
    """Return logprob times advantage: REINFORCE."""
    none_BK = torch.zeros_like(inputs.mask_BK)
    return Objective(inputs.logprobs_BK * inputs.advantages_BK, torch.ones_like(inputs.logprobs_BK), none_BK)


async def two_drafts(context: Context) -> Score:
    """Generate an answer, then two drafts and a last answer at the same time; one draft has a second turn."""
    prompt = context.prompt.token_ids
    tokens = prompt + (await context.generate(prompt)).token_ids + context.encode(OBSERVATION)
    one, two = context.branch(), context.branch()

    async def revise() -> None:
        draft = tokens + (await one.generate(tokens)).token_ids
        one.reward(FIRST_TURN_REWARD)
        await one.branch().generate(draft + one.encode(OBSERVATION))

    last, *_ = await asyncio.gather(context.generate(tokens), revise(), two.generate(tokens))
    return await context.score(context.answer(last), last.finish)


async def two_turns(context: Context) -> Score:
    """Generate an answer, and another after an observation; the first turn has its own reward."""
    first = await context.generate(context.prompt.token_ids)
    context.reward(FIRST_TURN_REWARD)
    second = await context.generate(context.prompt.token_ids + first.token_ids + context.encode(OBSERVATION))
    return await context.score(context.answer(second), second.finish)


async def ask_teacher(context: Context) -> Score:
    """Generate an answer, ask the frozen pool ``teacher`` twice, and answer again after its answers."""
    first = await context.generate(context.prompt.token_ids)
    chat = [{"role": "user", "content": f"{context.sample}: {context.prompt.text}{context.answer(first)}"}]
    hints = await asyncio.gather(context.ask("teacher", chat), context.ask("teacher", chat))
    given = context.encode("".join(f"[{hint.text}]" for hint in hints))
    second = await context.generate(context.prompt.token_ids + first.token_ids + given)
    return await context.score(context.answer(second), second.finish)


SEVEN = "this form: <score>1</score>"
"""What the tiny teacher of e2e/test_frozen_pool_run.py knows; its answer is a seven in brackets."""


async def ask_for_a_seven(context: Context) -> Score:
    """Generate an answer, ask the frozen pool ``judge`` by messages and by a text, and answer again after both."""
    first = await context.generate(context.prompt.token_ids)
    chat = [{"role": "user", "content": f"{context.prompt.text} {context.answer(first)}, in {SEVEN}"}]
    hints = await asyncio.gather(
        context.ask("judge", chat, max_tokens=16, temperature=0.0),
        context.ask("judge", SEVEN, max_tokens=16, temperature=0.0, stop=["]]"]),
    )
    given = context.encode("".join(f"\n{hint.text}" for hint in hints))
    second = await context.generate(context.prompt.token_ids + first.token_ids + given)
    return await context.score(context.answer(first), second.finish)


def accept(rewards: list[float]) -> bool:
    """Accept every group."""
    return True
