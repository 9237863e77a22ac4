"""Rewards that ship with rljob: one module each, with its NAME in the manifest and its KIND.

The manifest, the CRD, the documentation, the runner and the reward service read :data:`REWARDS`; no other module names
a built-in reward. A reward of a user's own package is a function or a :class:`RewardKind` that
``spec.rewards[].function`` names.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob.api.builtin_kinds import builtin_kinds
from rljob.api.configurable import NoOptions, describe_options
from rljob.api.rewards import kinds
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

_KINDS: Mapping[str, RewardKind] = builtin_kinds(kinds)
REWARDS: Mapping[str, RewardKind] = {
    **_KINDS,
    "combined": combined_kind({name: kind for name, kind in _KINDS.items() if kind.is_part}),
}
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
