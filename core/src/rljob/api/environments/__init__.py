"""Environments that ship with rljob: one module and one line of :data:`ENVIRONMENTS` each.

The manifest, the CRD, the documentation and the environment service read this registry. An environment of a user's own
package is a class or an :class:`EnvironmentKind` that ``spec.environments[].function`` names.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob.api.configurable import describe_options
from rljob.api.environments import gym_problems, ice, warehouse
from rljob.api.environments.environment_kind import EnvironmentKind

__all__ = ["ENVIRONMENTS", "EnvironmentKind", "environment_docs", "environment_option_docs"]

ENVIRONMENTS: Mapping[str, EnvironmentKind] = {
    "frozen_lake": ice.KIND,
    "sokoban": warehouse.KIND,
    "reasoning_gym": gym_problems.KIND,
}
"""Value of ``spec.environments[].builtin`` → the environment."""


def environment_docs() -> str:
    """Return the description of ``spec.environments[].builtin``."""
    kinds = (f"`{name}`: {kind.summary}" for name, kind in ENVIRONMENTS.items())
    return " ".join(["Environment that ships with rljob.", *kinds])


def environment_option_docs() -> str:
    """Return the description of ``spec.environments[].config``."""
    parts = ["Options of a `builtin`, or of a `function` that names an `EnvironmentKind`."]
    parts += [f"`{name}`: {describe_options(kind.options)}." for name, kind in ENVIRONMENTS.items()]
    return " ".join(parts)
