"""Rewards that ship with rljob: one module and one line of :data:`REWARDS` each.

The manifest, the CRD, the documentation, the runner and the reward service read this registry; no other module names a
built-in reward. A reward of a user's own package is a function or a :class:`RewardKind` that
``spec.rewards[].function`` names.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob.api.configurable import NoOptions, describe_options
from rljob.api.rewards import (
    answer_format,
    code,
    exact_match,
    instructions,
    json_schema,
    judge,
    length,
    mathematics,
    multiple_choice,
    overlong,
    reasoning_gym,
    regex_match,
    repetition,
    reward_model,
)
from rljob.api.rewards.combined import combined_kind
from rljob.api.rewards.kind import Regex, RewardKind, Row, Scorer
from rljob.api.rewards.outcome import NotScored, Parts, Unavailable, batch, deterministic, is_batch, is_deterministic

__all__ = [
    "REWARDS",
    "NoOptions",
    "NotScored",
    "Parts",
    "Regex",
    "RewardKind",
    "Row",
    "Scorer",
    "Unavailable",
    "batch",
    "builtin_docs",
    "deterministic",
    "is_batch",
    "is_deterministic",
    "option_docs",
]

_PARTS: dict[str, RewardKind] = {  # of `combined`; the others wait for a service, or score batches
    "code": code.KIND,
    "exact_match": exact_match.KIND,
    "format": answer_format.KIND,
    "instructions": instructions.KIND,
    "json_schema": json_schema.KIND,
    "length": length.KIND,
    "math": mathematics.KIND,
    "multiple_choice": multiple_choice.KIND,
    "overlong": overlong.KIND,
    "reasoning_gym": reasoning_gym.KIND,
    "regex": regex_match.KIND,
    "repetition": repetition.KIND,
}
_ALONE: dict[str, RewardKind] = {"judge": judge.KIND, "reward_model": reward_model.KIND}
REWARDS: Mapping[str, RewardKind] = _PARTS | _ALONE | {"combined": combined_kind(_PARTS)}
"""Value of ``spec.rewards[].builtin`` → the reward."""


def builtin_docs() -> str:
    """Return the description of ``spec.rewards[].builtin``."""
    return " ".join(["Scorer that ships with rljob.", *(f"`{name}`: {_about(kind)}" for name, kind in REWARDS.items())])


def option_docs() -> str:
    """Return the description of ``spec.rewards[].config``."""
    parts = ["Options of a `builtin`, or of a `function` that names a `RewardKind`."]
    parts += [f"`{name}`: {describe_options(kind.options)}." for name, kind in REWARDS.items()]
    return " ".join(parts)


def _about(kind: RewardKind) -> str:
    return kind.summary if kind.data is None else f"{kind.summary} For {kind.accepted} data only."
