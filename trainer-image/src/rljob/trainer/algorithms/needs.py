"""Inputs that an algorithm needs besides the batch: declared at each function, computed once per batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic.alias_generators import to_camel

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import needs_old, other_kinds, uses_critic
from rljob.api.extensions import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, OBJECTIVES, Registry, load
from rljob.trainer.errors import UnrecoverableError

log = logging.getLogger(__name__)

FUNCTIONS: dict[str, Registry] = {
    "advantage": ADVANTAGES,
    "objective": OBJECTIVES,
    "aggregation": AGGREGATIONS,
    "correction": CORRECTIONS,
    "kl_estimator": KL_ESTIMATORS,
}
"""Field of ``spec.algorithm`` that names a function → its built-in functions."""
FROZEN = {"reference": "referenceModel", "teacher": "teachers"}
"""Kinds of models that are not trained, each a need of the same name, with the field of ``spec.algorithm``."""


@dataclass(frozen=True)
class Needs:
    """Needs of a function of an algorithm; see :func:`requires`."""

    old: bool = False
    """Log-probabilities under the weights before the batch, in an advantage, or in an objective that reads ``old_BK``.
    With ``ratio: proximal``, a correction or a mask of the mismatch every objective has them."""
    reference: bool = False
    """Log-probabilities under ``referenceModel``: ``inputs.reference_BK`` of an objective, and
    ``inputs.scores.reference_by_row()`` of an advantage."""
    teacher: bool = False
    """Log-probabilities under the teachers, in an advantage: ``inputs.scores.teacher_by_row()``."""
    values: bool = False
    """Values of a critic before the batch, in an advantage: ``inputs.scores.values_by_row()``."""
    entropy: bool = False
    """Entropy of the policy at each token, in an objective that reads ``entropy_BK``."""

    def __or__(self, other: Needs) -> Needs:
        """Return the union."""
        return Needs(**{field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(Needs)})

    @property
    def all_samples(self) -> bool:
        """Whether samples without an advantage change the gradient too: through a KL term, a bonus or a critic."""
        return self.reference or self.teacher or self.values or self.entropy


Function = TypeVar("Function", bound=Callable[..., Any])


def requires(**needs: bool) -> Callable[[Function], Function]:
    """Declare the needs of a function: ``@requires(old=True)``, as the outermost decorator.

    Raises:
        TypeError: there is no such need.
    """
    declared = Needs(**needs)

    def declare(function: Function) -> Function:
        function.needs = declared  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(function: Any) -> Needs:
    """Return the needs that :func:`requires` declared; by default none. Another attribute ``needs`` is ignored."""
    declared = getattr(function, "needs", None)
    return declared if isinstance(declared, Needs) else Needs()


def load_function(algorithm: Algorithm, field: str) -> Any:
    """Return the function that a field of ``spec.algorithm`` names.

    Args:
        algorithm: resolved.
        field: a key of ``FUNCTIONS``.

    Raises:
        ValueError: the function cannot be imported.
    """
    return load(FUNCTIONS[field], getattr(algorithm, field), f"spec.algorithm.{to_camel(field)}")


def failure(algorithm: Algorithm, field: str, error: Exception) -> UnrecoverableError:
    """Log the traceback of a function that raised ``error``; return the error that ends the run.

    The function of a user may raise anything. It would fail again, so a restart does not help.

    Args:
        algorithm: resolved.
        field: a key of ``FUNCTIONS``.
        error: the exception that is being handled.
    """
    log.exception("spec.algorithm.%s failed", to_camel(field))
    return refused(algorithm, field, f"failed: {type(error).__name__}: {error}")


def refused(algorithm: Algorithm, field: str, problem: str) -> UnrecoverableError:
    """Return the error that ends the run because of a function.

    Args:
        algorithm: resolved.
        field: a key of ``FUNCTIONS``.
        problem: rest of the sentence that begins with the field and the name of the function.
    """
    return UnrecoverableError(f"spec.algorithm.{to_camel(field)}: {getattr(algorithm, field)} {problem}")


def needs(algorithm: Algorithm) -> Needs:
    """Return the union of the needs of an algorithm's fields and functions.

    Raises:
        ValueError: one of them cannot be imported.
    """
    roles = dict.fromkeys(other_kinds(algorithm), True)
    entropy = bool(algorithm.entropy_coefficient)
    union = Needs(old=needs_old(algorithm), entropy=entropy, values=uses_critic(algorithm), **roles)
    for field in FUNCTIONS:
        if getattr(algorithm, field) is not None:
            union |= needs_of(load_function(algorithm, field))
    return union
