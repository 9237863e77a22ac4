"""Presets of the learning algorithm, and what follows from the functions that an algorithm names.

A preset only sets values of explicit fields of ``spec.algorithm``; a field that the user sets wins. A field that none
of the chosen built-in functions reads is not filled, and is refused if the user sets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob.api.algorithm import Algorithm, Teacher
from rljob.api.algorithm_functions import ADVANTAGES, FUNCTIONS, OBJECTIVES, names_with, readers
from rljob.api.extensions import load

GRPO: dict[str, Any] = {
    "advantage": "group_normalized",
    "objective": "ppo_clip",
    "aggregation": "token_mean",
    "correction": "tis",
    "ratio": "proximal",
}
"""Ratio and correction as in verl and TRL: clips bound the updates within a batch, ρ corrects for stale samples."""
BEHAVIOR: dict[str, Any] = {"ratio": "behavior", "correction": "none"}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "dr_grpo": GRPO | {"advantage": "group_centered", "aggregation": "seq_mean_token_sum_norm"},
    "dapo": GRPO | {"clip_high": 0.28, "group_filter": "nonconstant"},
    "gspo": GRPO
    | {
        "objective": "gspo",
        "aggregation": "seq_mean_token_mean",
        "correction_level": "geometric",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": 0.0,
    },
    "rloo": GRPO | {"advantage": "rloo", "aggregation": "seq_mean_token_sum"},
    "reinforce_pp": GRPO | {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": GRPO | {"advantage": "reinforce_pp_baseline"},
    "opo": GRPO | {"advantage": "opo"},
    "cispo": GRPO | BEHAVIOR | {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": GRPO | {"objective": "sapo", "aggregation": "seq_mean_token_mean"},
    "topr": GRPO | BEHAVIOR | {"advantage": "group_centered", "objective": "topr"},
    "raft_pp": GRPO | {"advantage": "reward", "objective": "raft_pp"},
    "lite_ppo": GRPO | {"advantage": "lite_ppo"},
    "remax": GRPO | {"advantage": "remax", "aggregation": "seq_mean_token_sum"},
    "kimi": GRPO | {"advantage": "group_centered", "objective": "kimi"},
    "ppo": GRPO | {"advantage": "gae", "whiten_advantages": True},
    "vapo": GRPO
    | {
        "advantage": "gae",
        "whiten_advantages": True,
        "clip_high": 0.28,
        "gae_length_factor": 0.05,
        "critic_warmup_steps": 50,
        "positive_coefficient": 0.1,
    },
    "decoupled_ppo": GRPO | {"correction": "icepop", "correction_cap": 5.0, "correction_floor": 0.0},
    "gigpo": GRPO | {"advantage": "gigpo", "discount": 0.95},
    "distillation": GRPO | {"advantage": "zero"},
}
"""Preset → fields of `algorithm` that differ from ``DEFAULTS``, and the functions."""
RATIO_OF_BEHAVIOR = tuple(name for name, fields in PRESETS.items() if fields["ratio"] == "behavior")
"""Presets that have no correction because their ratio contains ρ."""

DEFAULTS: dict[str, Any] = {
    "minibatches": 1,
    "group_filter": "none",
    "whiten_advantages": False,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "gate_positive": 1.0,
    "gate_negative": 1.05,
    "kernel_power_positive": 2.0,
    "kernel_decay_positive": 3.0,
    "kernel_power_negative": 3.0,
    "kernel_decay_negative": 2.0,
    "covariance_share": 2e-4,
    "covariance_low": 1.0,
    "covariance_high": 5.0,
    "covariance_penalty": 1.0,
    "log_ratio_penalty": 0.1,
    "discount": 1.0,
    "step_coefficient": 1.0,
    "gae_lambda": 1.0,
    "critic_warmup_steps": 0,
    "value_clip": 0.5,
    "correction_level": "token",
    "correction_cap": 2.0,
    "correction_floor": 0.5,
    "overlong_penalty": 1.0,
    "kl_in": "loss",
    "kl_horizon": 20.0,
}
"""Value of a field that the functions read and the preset does not set."""

READERS: dict[str, tuple[str, tuple[str, ...]]] = {field: (function, names) for field, function, names in readers()}
"""Field → the field that names its reader, and the built-in readers. A user's own function may read every field."""

CONDITIONS = {
    "overlong_penalty": "overlong_buffer",
    "kl_in": "kl_coefficient",
    "kl_target": "kl_coefficient",
    "kl_horizon": "kl_target",
    "kl_estimator": "kl_coefficient",
    "reference_model": "kl_coefficient",
    "reference_pool": "kl_coefficient",
    "critic_warmup_steps": "critic_model",
    "value_lambda": "critic_model",
    "value_clip": "critic_model",
}
"""Field → the field without which it has no effect."""
KL_DEFAULTS = {"loss": "k3", "reward": "k1"}
"""Place of the KL term → its estimator."""

ZERO_FOR_ONE_SAMPLE = names_with(ADVANTAGES, lambda function: function.zero_for_one_sample)
KNOWN_FROM_SCALARS = names_with(ADVANTAGES, lambda function: function.from_scalars)
NEEDS_ALL_SAMPLES = names_with(OBJECTIVES, lambda function: function.needs_all_samples)
SELECTS_TOKENS = names_with(OBJECTIVES, lambda function: function.selects_tokens)
NEEDS_GREEDY = names_with(ADVANTAGES, lambda function: function.greedy_baseline)
NEEDS_STATES = names_with(ADVANTAGES, lambda function: function.turn_states)
NEEDS_VALUES = names_with(ADVANTAGES, lambda function: function.needs_values)
FOLLOWS_REWARDS = names_with(OBJECTIVES, lambda function: function.follows_rewards)
POLICY = "policy"
"""Name in `models` of the model that is trained."""
MASKS = ("mask_geometric_below", "mask_geometric_above", "veto_below", "mask_probability_gap", "mask_negative_kl")
"""Fields that mask tokens by the mismatch between engine and trainer."""
STABILIZERS = (
    "reward_mean",
    "reward_std",
    "reward_clip",
    "overlong_buffer",
    "whiten_advantages",
    "advantage_clip",
    "difficulty_above",
    "difficulty_below",
)
"""Fields that change rewards before, or advantages after, the function of ``advantage``."""


def chosen(algorithm: Algorithm, field: str) -> Any:
    """Return the value of a field: the user's own, that of the preset, or the default; None if there is none."""
    value = getattr(algorithm, field)
    if value is not None:
        return value
    if field == "kl_estimator":
        return KL_DEFAULTS[chosen(algorithm, "kl_in")]
    if field == "reference_model":
        return None if algorithm.kl_coefficient is None or algorithm.reference_pool is not None else POLICY
    if field == "critic_model":
        return POLICY if chosen(algorithm, "advantage") in NEEDS_VALUES else None
    if field == "value_lambda":
        return chosen(algorithm, "gae_lambda") if _has_fixed_lambda(algorithm) else 1.0
    if field == "gae_length_factor" and algorithm.gae_lambda is not None:
        return None  # the user's own λ wins
    if field == "gae_lambda" and not _has_fixed_lambda(algorithm):
        return None
    return PRESETS[algorithm.preset].get(field, DEFAULTS.get(field))


def _has_fixed_lambda(algorithm: Algorithm) -> bool:
    """Return whether the advantage is `gae` with one λ for all samples."""
    return chosen(algorithm, "advantage") == "gae" and chosen(algorithm, "gae_length_factor") is None


def is_set(algorithm: Algorithm, field: str) -> bool:
    """Return whether a field without a default has a value: 0 is one, False is none."""
    value = getattr(algorithm, field)
    return value is not None and value is not False


def is_read(algorithm: Algorithm, field: str) -> bool:
    """Return whether a chosen function reads ``field``."""
    if field in ("reference_model", "reference_pool") and own_functions(algorithm):
        return True
    if field in CONDITIONS:
        return chosen(algorithm, CONDITIONS[field]) is not None
    if field not in READERS:
        return True
    function, readers = READERS[field]
    name = chosen(algorithm, function)
    return name in readers or ":" in name


def own_functions(algorithm: Algorithm) -> list[str]:
    """Return the functions of a user's package."""
    names = (getattr(algorithm, field) for field in FUNCTIONS)
    return [name for name in names if name is not None and ":" in name]


def fill(algorithm: Algorithm) -> None:
    """Set every field that is not set and has a value in the preset or a default, if a function reads it."""
    derived = ("kl_estimator", "reference_model", "critic_model", "value_lambda")
    for field in dict.fromkeys([*GRPO, *PRESETS[algorithm.preset], *DEFAULTS, *derived]):
        if getattr(algorithm, field) is None and is_read(algorithm, field):
            setattr(algorithm, field, chosen(algorithm, field))


def corrects(algorithm: Algorithm) -> bool:
    """Return whether tokens have weights for the mismatch between engine and trainer."""
    return chosen(algorithm, "correction") != "none" or any(getattr(algorithm, field) is not None for field in MASKS)


def needs_old(algorithm: Algorithm) -> bool:
    """Return whether a denominator, a correction, a mask or the advantage needs the log-probabilities before the
    batch."""
    return chosen(algorithm, "ratio") == "proximal" or corrects(algorithm) or needs_old_first(algorithm)


def needs_old_first(algorithm: Algorithm) -> bool:
    """Return whether the log-probabilities before the batch are needed before its first update: by a KL term in the
    reward, a teacher, or an objective that compares the tokens of the batch."""
    return penalizes_rewards(algorithm) or bool(algorithm.teachers) or selects_tokens(algorithm)


def selects_tokens(algorithm: Algorithm) -> bool:
    """Return whether the objective compares the tokens of the batch before the first update."""
    return chosen(algorithm, "objective") in SELECTS_TOKENS


def penalizes_rewards(algorithm: Algorithm) -> bool:
    """Return whether a KL term is subtracted from rewards."""
    return algorithm.kl_coefficient is not None and chosen(algorithm, "kl_in") == "reward"


def teacher_roles(algorithm: Algorithm) -> dict[str, Teacher]:
    """Return the roles of the teachers: ``teachers[0]``, ``teachers[1]``, ..."""
    return {f"teachers[{i}]": teacher for i, teacher in enumerate(algorithm.teachers)}


def role_kind(role: str) -> str:
    """Return the kind of a role of a model that is not trained: ``reference`` | ``teacher``."""
    return "reference" if role == "reference" else "teacher"


def frozen_models(algorithm: Algorithm) -> dict[str, str]:
    """Return the roles of models that are not trained and run in the trainer, each with the name of its entry in
    `models`: ``reference``, and those of :func:`teacher_roles`."""
    roles = {"reference": chosen(algorithm, "reference_model")}
    roles |= {role: teacher.model for role, teacher in teacher_roles(algorithm).items()}
    return {role: name for role, name in roles.items() if name is not None}


def model_pools(algorithm: Algorithm, task: str | None = None) -> dict[str, str]:
    """Return the roles of models that run in frozen pools, each with the name of its entry in `rollouts`:
    ``reference``, and those of :func:`teacher_roles`. ``task``: only those that samples of this task need."""
    roles = {"reference": algorithm.reference_pool}
    for role, teacher in teacher_roles(algorithm).items():
        if task is None or teacher.teaches(task):
            roles[role] = teacher.pool
    return {role: name for role, name in roles.items() if name is not None}


def other_kinds(algorithm: Algorithm) -> set[str]:
    """Return the kinds of models that are not trained, in the trainer and in pools: ``reference`` | ``teacher``."""
    return {role_kind(role) for role in (*frozen_models(algorithm), *model_pools(algorithm))}


def uses_critic(algorithm: Algorithm) -> bool:
    """Return whether a critic is trained beside the policy."""
    return chosen(algorithm, "critic_model") is not None


def needs_greedy(algorithm: Algorithm) -> bool:
    """Return whether each group has one more sample, a greedy answer, whose reward is the baseline of the others."""
    return chosen(algorithm, "advantage") in NEEDS_GREEDY


def needs_states(algorithm: Algorithm) -> bool:
    """Return whether the advantage may read the state of the environment before each turn: a user's own always may."""
    name = chosen(algorithm, "advantage")
    return name in NEEDS_STATES or ":" in name


def stabilizers(algorithm: Algorithm) -> list[str]:
    """Return the fields that change rewards or advantages beside the function of ``advantage``: of
    :data:`STABILIZERS`, those of a KL term in the reward and of teachers, and those that leave samples out of the loss,
    which then have advantage 0."""
    found = [field for field in STABILIZERS if is_set(algorithm, field)]
    found += ["kl_coefficient"] if penalizes_rewards(algorithm) else []
    found += ["teachers"] if algorithm.teachers else []
    found += ["truncated_weight"] if algorithm.truncated_weight == 0 else []
    return found + (["difficulty_exponent"] if algorithm.difficulty_exponent is not None else [])


DECLARED = {
    "old": "the log-probabilities before the batch",
    "reference": "those of a reference model",
    "teacher": "those of the teachers",
    "values": "the values of a critic",
    "entropy": "the entropy at each token",
}
"""Need that a user's function declares by @requires of rljob.trainer → what it is."""


def _declared_needs(algorithm: Algorithm) -> Iterator[str]:
    """Yield one sentence for each function of a user's package; its module is imported, if this process can."""
    for name in own_functions(algorithm):
        try:
            declared = getattr(load({}, name, "spec.algorithm"), "needs", None)  # of @requires in the trainer's package
        except ValueError:
            yield f"the needs of {name}, which cannot be imported here, are those that the code declares"
            continue
        needs = [what for need, what in DECLARED.items() if getattr(declared, need, False) is True]
        yield f"{name} needs {' and '.join(needs)}" if needs else f"{name} declares no needs"


def describe_needs(algorithm: Algorithm) -> Iterator[str]:
    """Yield one sentence for each need of a resolved algorithm: the union over its fields and functions."""
    if needs_old(algorithm):
        passes = "which its first forward pass gives"
        if needs_old_first(algorithm):
            passes = "one forward pass before the advantages"
        elif (algorithm.minibatches or 1) > 1:
            passes = "one forward pass for each minibatch after the first"
        yield f"the algorithm needs the log-probabilities before the batch, {passes}"
    for role, name in frozen_models(algorithm).items():
        yield f"the algorithm needs the log-probabilities of the {role_kind(role)} model ({name}), one forward pass"
    for role, name in model_pools(algorithm).items():
        model = f"{role_kind(role)} model of pool {name}"
        yield f"the algorithm needs the log-probabilities of the {model}, which runners ask for"
    if uses_critic(algorithm):
        yield (
            f"the algorithm needs the values of a critic, which starts from the model {algorithm.critic_model} and is "
            "trained: one forward pass before the advantages, and one update for each minibatch"
        )
    if needs_greedy(algorithm):
        yield "the algorithm needs one more sample of each prompt, a greedy answer, which is not trained"
    if chosen(algorithm, "advantage") in NEEDS_STATES:
        yield "the algorithm needs the state of the environment before each turn"
    yield from _declared_needs(algorithm)
    own = own_functions(algorithm)
    if algorithm.entropy_coefficient:
        yield "the algorithm needs the entropy at each token"
    if not own and (
        algorithm.advantage in KNOWN_FROM_SCALARS
        and algorithm.objective not in NEEDS_ALL_SAMPLES
        and not algorithm.whiten_advantages
        and not algorithm.entropy_coefficient
        and not algorithm.positive_coefficient
        and not frozen_models(algorithm)
        and not model_pools(algorithm)
    ):
        yield "samples whose advantage is 0 are not computed"
    elif not own:
        yield "samples whose advantage is 0 are computed"
