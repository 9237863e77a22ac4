"""Loads the code that ``builtin`` or ``function`` of an environment names, and checks the options against it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rljob.api.base import Model
from rljob.api.environments import ENVIRONMENTS, EnvironmentKind
from rljob.api.extensions import load

if TYPE_CHECKING:
    from rljob.api.roles import Environment

METHODS = ("reset", "step")


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment with its valid options.

    ``field``: manifest field with the reference. ``reference``: name of a built-in environment, or module:attribute.
    """

    field: str
    reference: str
    kind: EnvironmentKind
    options: Model

    def factory(self) -> Callable[[], Any]:
        """Return the function that makes the environment of an episode. It is called as the reference, for errors.

        Raises:
            ValueError: the code cannot be imported.
        """
        make: Any = load({}, self.kind.make, self.field) if isinstance(self.kind.make, str) else self.kind.make

        def factory() -> Any:
            return make(self.options)

        factory.__name__ = self.reference
        return factory


def load_environment(environment: Environment, where: str) -> LoadedEnvironment | None:
    """Return an environment of a job; None if a program or a service of the user serves it.

    Args:
        environment: the entry of the manifest.
        where: path of the entry, for errors: spec.environments[0].

    Raises:
        ValueError: the code cannot be imported, is no environment, or the options do not fit it. One line a problem.
    """
    if environment.builtin is not None:
        field, reference, kind = f"{where}.builtin", environment.builtin, ENVIRONMENTS[environment.builtin]
    elif environment.function is not None:
        field, reference = f"{where}.function", environment.function
        kind = as_kind(load({}, reference, field), reference, field)
    else:
        return None
    problems = [f"{where}.{problem}" for problem in kind.option_problems(environment.config)]
    if problems:
        raise ValueError("\n".join(problems))
    return LoadedEnvironment(field, reference, kind, kind.parse(environment.config))


def as_kind(found: Any, reference: str, field: str) -> EnvironmentKind:
    """Return what ``reference`` names as an EnvironmentKind. A plain class has no options.

    Raises:
        ValueError: it is neither an EnvironmentKind nor a class with reset and step.
    """
    if isinstance(found, EnvironmentKind):
        return found
    missing = [name for name in METHODS if not callable(getattr(found, name, None))]
    if not inspect.isclass(found) or missing:
        what = f"has no {' and no '.join(missing)}" if inspect.isclass(found) else f"is of type {type(found).__name__}"
        raise ValueError(
            f"{field}: {reference} {what}; name a class with reset(seed, row) and step(action), or an EnvironmentKind"
        )
    return EnvironmentKind(make=lambda options: found())
