"""Built-in functions that `spec.algorithm` names: one line each, with the facts that validation and presets read.

A new function is a module in ``trainer-image/src/rljob/trainer/algorithms`` and its line here. What a function of a
user's own package needs is declared in its code (``rljob.trainer.algorithms.needs``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rljob.api.builtin import Builtin


@dataclass(frozen=True)
class AlgorithmFunction(Builtin):
    """A built-in function of the learning algorithm.

    Args:
        reads: fields of `algorithm` that only functions which list them read.
        zero_for_one_sample: of an advantage: it is 0 in a group of one sample.
        from_scalars: of an advantage: it follows from rewards and lengths, before any token is fetched.
        needs_values: of an advantage: it needs the values of a critic.
        greedy_baseline: of an advantage: it needs the reward of a greedy answer to each prompt.
        turn_states: of an advantage: it needs the state of the environment before each turn.
        needs_all_samples: of an objective: it needs the tokens of samples whose advantage is 0.
        selects_tokens: of an objective: it compares the tokens of the batch before the first update.
        follows_rewards: of an objective: it depends on the reward of a sample beside its advantage.
    """

    reads: tuple[str, ...] = ()
    zero_for_one_sample: bool = False
    from_scalars: bool = False
    needs_values: bool = False
    greedy_baseline: bool = False
    turn_states: bool = False
    needs_all_samples: bool = False
    selects_tokens: bool = False
    follows_rewards: bool = False


Functions: TypeAlias = Mapping[str, AlgorithmFunction]

_ADVANTAGES, _OBJECTIVES = "rljob.trainer.algorithms.advantages", "rljob.trainer.algorithms.objectives"
_CORRECTIONS, _AGGREGATION = "rljob.trainer.algorithms.corrections", "rljob.trainer.algorithms.aggregation"
_KL = "rljob.trainer.algorithms.kl_estimators"
_CLIPS = ("clip_low", "clip_high", "dual_clip")
_KERNEL = ("kernel_power_positive", "kernel_decay_positive", "kernel_power_negative", "kernel_decay_negative")

ADVANTAGES: Functions = {
    "group_normalized": AlgorithmFunction(f"{_ADVANTAGES}.group:group_normalized", from_scalars=True),
    "group_centered": AlgorithmFunction(
        f"{_ADVANTAGES}.group:group_centered", zero_for_one_sample=True, from_scalars=True
    ),
    "reward": AlgorithmFunction(f"{_ADVANTAGES}.group:reward", from_scalars=True),
    "rloo": AlgorithmFunction(f"{_ADVANTAGES}.group:rloo", zero_for_one_sample=True, from_scalars=True),
    "opo": AlgorithmFunction(f"{_ADVANTAGES}.opo:opo", zero_for_one_sample=True, from_scalars=True),
    "lite_ppo": AlgorithmFunction(f"{_ADVANTAGES}.lite_ppo:lite_ppo", zero_for_one_sample=True, from_scalars=True),
    "remax": AlgorithmFunction(
        f"{_ADVANTAGES}.remax:remax", "R − reward of a greedy answer", from_scalars=True, greedy_baseline=True
    ),
    "reinforce_pp": AlgorithmFunction(f"{_ADVANTAGES}.reinforce_pp:reinforce_pp", reads=("discount",)),
    "reinforce_pp_baseline": AlgorithmFunction(
        f"{_ADVANTAGES}.reinforce_pp:reinforce_pp_baseline", zero_for_one_sample=True
    ),
    "turn_return": AlgorithmFunction(f"{_ADVANTAGES}.turn_return:turn_return", reads=("discount",)),
    "gigpo": AlgorithmFunction(
        f"{_ADVANTAGES}.gigpo:gigpo",
        "group_normalized, and the same for steps from one state",
        reads=("discount", "step_coefficient"),
        turn_states=True,
    ),
    "gae": AlgorithmFunction(
        f"{_ADVANTAGES}.gae:gae",
        reads=("discount", "gae_lambda", "gae_length_factor", "critic_model"),
        needs_values=True,
    ),
    "zero": AlgorithmFunction(f"{_ADVANTAGES}.group:zero", "rewards are not used", from_scalars=True),
}
OBJECTIVES: Functions = {
    "ppo_clip": AlgorithmFunction(f"{_OBJECTIVES}.ppo_clip:ppo_clip", reads=_CLIPS),
    "gspo": AlgorithmFunction(f"{_OBJECTIVES}.gspo:gspo", reads=_CLIPS),
    "segment_clip": AlgorithmFunction(f"{_OBJECTIVES}.gspo:segment_clip", reads=_CLIPS),
    "cispo": AlgorithmFunction(f"{_OBJECTIVES}.truncated:cispo", reads=("clip_low", "clip_high")),
    "tis": AlgorithmFunction(f"{_OBJECTIVES}.truncated:tis"),
    "gpg": AlgorithmFunction(f"{_OBJECTIVES}.gpg:gpg"),
    "geo_mean": AlgorithmFunction(f"{_OBJECTIVES}.geo_mean:geo_mean", reads=("clip_low", "clip_high")),
    "topr": AlgorithmFunction(f"{_OBJECTIVES}.truncated:topr", follows_rewards=True),
    "raft_pp": AlgorithmFunction(f"{_OBJECTIVES}.ppo_clip:raft_pp", reads=_CLIPS, follows_rewards=True),
    "sapo": AlgorithmFunction(f"{_OBJECTIVES}.sapo:sapo", reads=("gate_positive", "gate_negative")),
    "vespo": AlgorithmFunction(f"{_OBJECTIVES}.vespo:vespo", reads=_KERNEL),
    "clip_cov": AlgorithmFunction(
        f"{_OBJECTIVES}.clip_cov:clip_cov",
        reads=("clip_low", "clip_high", "covariance_share", "covariance_low", "covariance_high"),
        needs_all_samples=True,
        selects_tokens=True,
    ),
    "kl_cov": AlgorithmFunction(
        f"{_OBJECTIVES}.kl_cov:kl_cov",
        reads=("covariance_share", "covariance_penalty"),
        needs_all_samples=True,
        selects_tokens=True,
    ),
    "kimi": AlgorithmFunction(f"{_OBJECTIVES}.kimi:kimi", reads=("log_ratio_penalty",), needs_all_samples=True),
}
CORRECTIONS: Functions = {
    "none": AlgorithmFunction(f"{_CORRECTIONS}.importance_weights:no_correction", "1"),
    "tis": AlgorithmFunction(
        f"{_CORRECTIONS}.importance_weights:tis",
        "min(ρ, correctionCap)",
        reads=("correction_level", "correction_cap"),
    ),
    "icepop": AlgorithmFunction(
        f"{_CORRECTIONS}.importance_weights:icepop",
        "ρ within [correctionFloor, correctionCap], else 0",
        reads=("correction_level", "correction_cap", "correction_floor"),
    ),
}
AGGREGATIONS: Functions = {
    "token_mean": AlgorithmFunction(f"{_AGGREGATION}:token_mean", "one over all tokens"),
    "seq_mean_token_sum": AlgorithmFunction(f"{_AGGREGATION}:seq_mean_token_sum", "one over samples"),
    "seq_mean_token_mean": AlgorithmFunction(
        f"{_AGGREGATION}:seq_mean_token_mean", "one over samples and the sample's tokens"
    ),
    "seq_mean_token_sum_norm": AlgorithmFunction(
        f"{_AGGREGATION}:seq_mean_token_sum_norm", "one over samples and the task's maxTokens"
    ),
}
KL_ESTIMATORS: Functions = {
    "k1": AlgorithmFunction(f"{_KL}:k1", "l − l_ref"),
    "k2": AlgorithmFunction(f"{_KL}:k2", "its square / 2"),
    "k3": AlgorithmFunction(f"{_KL}:k3", "exp(l_ref − l) − (l_ref − l) − 1"),
    "k3_unbiased": AlgorithmFunction(f"{_KL}:k3_unbiased", "exp(l − l without gradient)·k3"),
}

FUNCTIONS: Mapping[str, Functions] = {
    "advantage": ADVANTAGES,
    "objective": OBJECTIVES,
    "aggregation": AGGREGATIONS,
    "correction": CORRECTIONS,
    "kl_estimator": KL_ESTIMATORS,
}
"""Field of `algorithm` that names a function → the built-in functions."""


def names_with(functions: Functions, has: Callable[[AlgorithmFunction], bool]) -> tuple[str, ...]:
    """Return the names of the functions that have a property."""
    return tuple(name for name, function in functions.items() if has(function))


def readers() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each field that only some functions read, the field that names its reader, and the built-in readers."""
    for field, functions in FUNCTIONS.items():
        for read in dict.fromkeys(read for function in functions.values() for read in function.reads):
            yield read, field, tuple(name for name, function in functions.items() if read in function.reads)
