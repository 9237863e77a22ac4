"""The built-in reward ``reasoning_gym``. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from rljob.api.rewards.kind import RewardKind

NAME = "reasoning_gym"
KIND = RewardKind(
    make="rljob.rewards.reasoning_gym_reward:ReasoningGymReward",
    data=["reasoningGym"],
    summary="the dataset's own score of the answer between <answer> and </answer>, 0 or 1.",
)
