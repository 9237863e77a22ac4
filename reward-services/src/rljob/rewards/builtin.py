"""The rewards that ship with rljob, by the name a manifest gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rljob.api.models import Task
from rljob.rewards.reasoning_gym_reward import ReasoningGymReward
from rljob.rewards.sdk import Reward

BUILTIN: dict[str, Callable[[Sequence[Task]], Reward]] = {"reasoning_gym": ReasoningGymReward}
"""Name → what makes the reward for the tasks that use it."""
