"""Environments that ship with rljob: one module each, with its NAME in the manifest and its KIND.

The manifest, the CRD, the documentation and the environment service read :data:`ENVIRONMENTS`. An environment of a
user's own package is a class or an :class:`EnvironmentKind` that ``spec.environments[].function`` names.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob.api.builtin_kinds import builtin_kinds
from rljob.api.configurable import describe_options
from rljob.api.environments import kinds
from rljob.api.environments.environment_kind import EnvironmentKind

__all__ = ["ENVIRONMENTS", "EnvironmentKind", "environment_docs", "environment_option_docs"]

ENVIRONMENTS: Mapping[str, EnvironmentKind] = builtin_kinds(kinds)
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
