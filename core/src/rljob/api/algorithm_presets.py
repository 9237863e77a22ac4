"""Presets of the learning algorithm, and which of its functions read which fields.

A preset only sets values of explicit fields of ``spec.algorithm``; a field that the user sets wins. A field that none
of the chosen built-in functions reads is not filled, and is refused if the user sets it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from rljob.api.algorithm import Algorithm

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
    "kimi": GRPO | {"advantage": "group_centered", "objective": "kimi"},
    "decoupled_ppo": GRPO | {"correction": "icepop", "correction_cap": 5.0, "correction_floor": 0.0},
}
"""Preset → fields of `algorithm` that differ from ``DEFAULTS``, and the functions."""

DEFAULTS: dict[str, Any] = {
    "minibatches": 1,
    "group_filter": "none",
    "whiten_advantages": False,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "gate_positive": 1.0,
    "gate_negative": 1.05,
    "log_ratio_penalty": 0.1,
    "discount": 1.0,
    "correction_level": "token",
    "correction_cap": 2.0,
    "correction_floor": 0.5,
    "overlong_penalty": 1.0,
}
"""Value of a field that the functions read and the preset does not set."""

_CLIPPED = ("ppo_clip", "gspo", "segment_clip", "raft_pp")
READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "clip_low": ("objective", (*_CLIPPED, "cispo")),
    "clip_high": ("objective", (*_CLIPPED, "cispo")),
    "dual_clip": ("objective", _CLIPPED),
    "gate_positive": ("objective", ("sapo",)),
    "gate_negative": ("objective", ("sapo",)),
    "log_ratio_penalty": ("objective", ("kimi",)),
    "discount": ("advantage", ("reinforce_pp", "turn_return")),
    "correction_level": ("correction", ("tis", "icepop")),
    "correction_cap": ("correction", ("tis", "icepop")),
    "correction_floor": ("correction", ("icepop",)),
}
"""Field → the field that names its reader, and the built-in readers. A user's own function may read every field."""

FUNCTIONS = ("advantage", "objective", "aggregation", "correction")
"""Fields that name a function."""
ZERO_FOR_ONE_SAMPLE = ("group_centered", "rloo", "opo", "lite_ppo", "reinforce_pp_baseline")
"""Built-in advantages that are 0 in a group of one sample."""
KNOWN_FROM_SCALARS = ("group_normalized", "group_centered", "reward", "rloo", "opo", "lite_ppo")
"""Built-in advantages that follow from rewards and lengths, before any token is fetched."""
NEEDS_ALL_SAMPLES = ("kimi",)
"""Built-in objectives with a gradient where the advantage is 0."""
MASKS = ("mask_geometric_below", "mask_geometric_above", "veto_below", "mask_probability_gap", "mask_negative_kl")
"""Fields that mask tokens by the mismatch between engine and trainer."""
STABILIZERS = (
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
    return PRESETS[algorithm.preset].get(field, DEFAULTS.get(field)) if value is None else value


def is_read(algorithm: Algorithm, field: str) -> bool:
    """Return whether a chosen function reads ``field``."""
    if field == "overlong_penalty":
        return algorithm.overlong_buffer is not None
    if field not in READERS:
        return True
    function, readers = READERS[field]
    name = chosen(algorithm, function)
    return name in readers or ":" in name


def fill(algorithm: Algorithm) -> None:
    """Set every field that is not set and has a value in the preset or a default, if a function reads it."""
    for field in dict.fromkeys([*GRPO, *PRESETS[algorithm.preset], *DEFAULTS]):
        if getattr(algorithm, field) is None and is_read(algorithm, field):
            setattr(algorithm, field, chosen(algorithm, field))


def corrects(algorithm: Algorithm) -> bool:
    """Return whether tokens have weights for the mismatch between engine and trainer."""
    return chosen(algorithm, "correction") != "none" or any(getattr(algorithm, field) is not None for field in MASKS)


def needs_old(algorithm: Algorithm) -> bool:
    """Return whether a denominator, a correction or a mask needs the log-probabilities before the batch."""
    return chosen(algorithm, "ratio") == "proximal" or corrects(algorithm)


def stabilizers(algorithm: Algorithm) -> list[str]:
    """Return the fields of :data:`STABILIZERS` that have an effect."""
    return [field for field in STABILIZERS if getattr(algorithm, field) not in (None, False)]


def describe_needs(algorithm: Algorithm) -> Iterator[str]:
    """Yield one sentence for each need of a resolved algorithm: the union over its fields and functions."""
    if needs_old(algorithm):
        passes = "which its first forward pass gives"
        if (algorithm.minibatches or 1) > 1:
            passes = "one forward pass for each minibatch after the first"
        yield f"the algorithm needs the log-probabilities before the batch, {passes}"
    own = [name for name in map(str, map(functools.partial(chosen, algorithm), FUNCTIONS)) if ":" in name]
    if own:
        yield f"the needs of {' and '.join(own)} are those that the code declares"
    if algorithm.entropy_coefficient:
        yield "the algorithm needs the entropy at each token"
    if not own and (
        algorithm.advantage in KNOWN_FROM_SCALARS
        and algorithm.objective not in NEEDS_ALL_SAMPLES
        and not algorithm.whiten_advantages
        and not algorithm.entropy_coefficient
    ):
        yield "samples whose advantage is 0 are not computed"
    elif not own:
        yield "samples whose advantage is 0 are computed"
