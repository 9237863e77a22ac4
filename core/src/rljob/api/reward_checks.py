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
PROPORTIONAL = ("group_centered", "reward", "rloo", "opo", "remax", "reinforce_pp_baseline")
"""Advantages that a factor of all rewards multiplies, before they are whitened."""
RETURNS = ("reinforce_pp", "turn_return")
"""Advantages that are sums of the rewards of later tokens, before they are whitened."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
"""Advantages that have mean 0 and deviation 1 over all tokens of the batch."""


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
    advantage = chosen(algorithm, "advantage")
    if algorithm.whiten_advantages and advantage in WHITENED:
        yield f"algorithm.whitenAdvantages: {advantage} is whitened already, so it has no effect; remove it"
    reads_rewards = algorithm.positive_coefficient is not None or uses_critic(algorithm) or own_functions(algorithm)
    if reads_rewards or chosen(algorithm, "objective") in FOLLOWS_REWARDS:
        return
    if advantage == "zero":
        yield from _unused(spec)
    elif not is_set(algorithm, "reward_clip"):
        causes = {"reward_mean": _removes_mean(spec, advantage), "reward_std": _removes_deviation(spec, advantage)}
        for field, cause in causes.items():
            if is_set(algorithm, field) and cause:
                yield (
                    f"algorithm.{to_camel(field)}: {cause}, so it has no effect; remove it, or set rewardClip or "
                    "another advantage"
                )


def _unused(spec: RLJobSpec) -> Iterator[str]:
    """Yield the problems of an algorithm whose advantage is zero, and which reads rewards nowhere else."""
    algorithm = spec.algorithm
    by_difficulty = is_set(algorithm, "difficulty_exponent")
    weighted = ("reward_clip", "overlong_buffer") if by_difficulty else ()
    for field in (*REWARD_FIELDS, "whiten_advantages", "difficulty_above", "difficulty_below"):
        if is_set(algorithm, field) and field not in weighted:
            yield f"algorithm.{to_camel(field)}: with advantage zero rewards are not used; remove {to_camel(field)}"
    filters = {"algorithm.groupFilter": chosen(algorithm, "group_filter")}
    filters |= {f"tasks[{i}].groupFilter.kind": task.group_filter.kind for i, task in enumerate(spec.tasks)}
    for field, kind in filters.items():
        if kind == "nonconstant" and not by_difficulty:
            yield f"{field}: with advantage zero rewards are not used, and groups would be replaced by them; set none"


def _whitens(algorithm: Algorithm, advantage: str) -> str:
    """Return what gives advantages mean 0 and deviation 1 over the batch; empty if nothing does."""
    if advantage in WHITENED:
        return advantage
    return "whitenAdvantages" if chosen(algorithm, "whiten_advantages") else ""


def _removes_mean(spec: RLJobSpec, advantage: str) -> str:
    """Return why `rewardMean` makes no difference to advantages; empty if it makes one.

    It adds −mean/deviation to a reward, where the deviation is that of `rewardStd` or 1. A later change of rewards by a
    punishment or KL is added too.
    """
    algorithm, whitening = spec.algorithm, _whitens(spec.algorithm, advantage)
    of_batch = "group" not in (algorithm.reward_mean, algorithm.reward_std)  # the same number for all samples
    if advantage in SUBTRACT_GROUP and (spec.training.samples_per_prompt > 1 or advantage != "group_normalized"):
        return f"{advantage} subtracts a baseline of the group from rewards"
    if advantage == "lite_ppo" and (of_batch or whitening):
        return f"{advantage} subtracts a baseline of the group from rewards, and divides by a deviation of the batch"
    of_tokens = advantage == "reward" or (advantage in RETURNS and chosen(algorithm, "discount") == 1)
    return f"{whitening} subtracts the mean of the batch" if whitening and of_batch and of_tokens else ""


def _removes_deviation(spec: RLJobSpec, advantage: str) -> str:
    """Return why `rewardStd` makes no difference to advantages; empty if it makes one.

    It is a factor of rewards, but not of a punishment or of KL. It is one of returns only if each reward arrives at the
    last token: those of earlier turns are not divided.
    """
    algorithm, whitening = spec.algorithm, _whitens(spec.algorithm, advantage)
    if is_set(algorithm, "overlong_buffer") or penalizes_rewards(algorithm):
        return ""
    if advantage == "group_normalized" and spec.training.samples_per_prompt > 1:
        return f"{advantage} divides by the deviation of the group"
    if algorithm.reward_std == "group":
        return ""
    if advantage == "lite_ppo":
        return f"{advantage} divides by the deviation of the batch"
    one_turn = all(task.loop == "single_turn" for task in spec.tasks)
    factor = advantage in PROPORTIONAL or (advantage in RETURNS and one_turn)
    return f"{whitening} divides by the deviation of the batch" if whitening and factor else ""
