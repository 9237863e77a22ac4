"""Problems of the fields of `algorithm` that change rewards: without an effect, or with another one than they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic.alias_generators import to_camel

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import (
    FOLLOWS_REWARDS,
    chosen,
    is_set,
    own_functions,
    penalizes_rewards,
    uses_critic,
)

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec

REWARD_FIELDS = ("reward_mean", "reward_std", "reward_clip", "overlong_buffer")
"""Fields that change rewards."""
DIFFICULTIES = ("difficulty_above", "difficulty_below", "difficulty_exponent")
"""Fields that read the mean reward of a group."""
SUBTRACT_GROUP = ("group_normalized", "group_centered", "rloo", "opo", "remax", "reinforce_pp_baseline")
"""Advantages to which a number that is added to all rewards of a group makes no difference."""


def reward_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one sentence for each problem, with its field.

    Args:
        spec: not resolved.
    """
    algorithm = spec.algorithm
    reading = [field for field in DIFFICULTIES if is_set(algorithm, field)]
    for field in ("reward_mean", "reward_std"):
        if reading and is_set(algorithm, field):
            yield (
                f"algorithm.{to_camel(reading[0])}: it reads the mean reward of a group, which {to_camel(field)} "
                "changes; remove one of them"
            )
    if spec.training.samples_per_prompt == 1 and algorithm.reward_mean == "group":
        yield (
            "training.samplesPerPrompt: 1 makes every reward 0 with algorithm.rewardMean group, so nothing is learned; "
            "set at least 2, or rewardMean: batch"
        )
    reads_rewards = algorithm.positive_coefficient is not None or uses_critic(algorithm) or own_functions(algorithm)
    if reads_rewards or chosen(algorithm, "objective") in FOLLOWS_REWARDS:
        return
    if chosen(algorithm, "advantage") == "zero":
        yield from _unused(algorithm)
    elif spec.training.samples_per_prompt > 1 and not is_set(algorithm, "reward_clip"):
        yield from _cancelled(algorithm, chosen(algorithm, "advantage"))


def _unused(algorithm: Algorithm) -> Iterator[str]:
    """Yield the problems of an algorithm whose advantage is zero, and which reads rewards nowhere else."""
    weighted = ("reward_clip", "overlong_buffer") if is_set(algorithm, "difficulty_exponent") else ()
    for field in (*REWARD_FIELDS, "whiten_advantages", "difficulty_above", "difficulty_below"):
        if is_set(algorithm, field) and field not in weighted:
            yield f"algorithm.{to_camel(field)}: with advantage zero rewards are not used; remove {to_camel(field)}"


def _cancelled(algorithm: Algorithm, advantage: str) -> Iterator[str]:
    """Yield the problems of a normalisation that the advantage undoes."""
    if algorithm.reward_mean is not None and advantage in SUBTRACT_GROUP:
        yield (
            f"algorithm.rewardMean: {advantage} subtracts a baseline of the group from rewards, so it has no effect; "
            "remove it, or set rewardClip or another advantage"
        )
    other_changes = is_set(algorithm, "overlong_buffer") or penalizes_rewards(algorithm)
    if algorithm.reward_std is not None and advantage == "group_normalized" and not other_changes:
        yield (
            "algorithm.rewardStd: group_normalized divides by the deviation of the group, so it has no effect; remove "
            "it, or set rewardClip or another advantage"
        )
