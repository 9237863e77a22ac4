"""Evaluates a reward on samples: each sample gets a reward or an error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from rljob.api.extensions import is_async
from rljob.api.rewards import NotScored, Parts, Scorer
from rljob.protocol.score_messages import MAX_ERROR, Score, ScoreItem

FIELDS = ("prompt", "completion", "finish", "problem", "task", "response_tokens")
"""Possible parameters of a reward: fields of a ScoreItem."""


class RewardEvaluator:
    """Scores samples by one reward; never raises.

    Args:
        scorer: called with the keyword arguments of :data:`FIELDS` that it names, or with all if it takes ``**_``.
            Returns a number, or a number and a mapping of names to further numbers.
        name: of the reward, for errors.
        field: field of the manifest that names the scorer, for errors; empty if a user's program passes the scorer.

    Raises:
        ValueError: the scorer cannot be called like this; the message names the cause.
    """

    def __init__(self, scorer: Scorer, name: str, field: str = "") -> None:
        self._scorer = scorer
        self._name = name
        try:
            self._fields = fields_of(scorer, name)
        except ValueError as error:
            raise ValueError(f"{field}: {error}" if field else str(error)) from None

    def __call__(self, item: ScoreItem) -> Score:
        """Return the score of ``item``."""
        try:
            result: Any = self._scorer(**{field: getattr(item, field) for field in self._fields})
            return self._score_of(item, result)
        except NotScored as reason:
            return self._not_scored(item, reason)
        except Exception as error:  # noqa: BLE001 user code may raise anything; the error is the result of the sample
            return error_score(item.sample, f"reward {self._name} raised {_described(error)}")

    def _score_of(self, item: ScoreItem, result: Any) -> Score:
        """Return the score for what the scorer returned. Objects of user code may raise here."""
        if isinstance(result, NotScored):
            return self._not_scored(item, result)
        if result is None:
            return error_score(item.sample, f"reward {self._name} returned None: it did not score the sample")
        if isinstance(result, Parts):
            result = _sum_of(result)
        reward, metrics = result if _is_pair(result) else (result, {})
        for key, value in {"reward": reward, **metrics}.items():
            if not _is_number(value):
                reason = f"reward {self._name} returned {value!r} as {key}; it must return a finite number"
                return error_score(item.sample, reason)
        return Score(item.sample, float(reward), {str(key): float(value) for key, value in metrics.items()}, "")

    def _not_scored(self, item: ScoreItem, reason: NotScored) -> Score:
        return error_score(item.sample, f"reward {self._name} did not score the sample: {_described(reason)}")


def error_score(sample: str, reason: str) -> Score:
    """Return the score of a sample that could not be scored. Lone surrogates in ``reason`` are escaped."""
    return Score(sample, 0.0, {}, reason[:MAX_ERROR].encode(errors="backslashreplace").decode())


def _described(error: Exception) -> str:
    try:
        return str(error) if isinstance(error, NotScored) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 an exception of user code may be unable to describe itself
        return type(error).__name__


def fields_of(scorer: Any, name: str) -> tuple[str, ...]:
    """Return the names of :data:`FIELDS` that a scorer takes.

    Raises:
        ValueError: it cannot be called with them; the message names the cause.
    """
    if not callable(scorer):
        raise ValueError(f"reward {name} is of type {type(scorer).__name__}, which is not callable; use a function")
    if is_async(scorer):
        raise ValueError(
            f"reward {name} is async; write a plain function, worker processes already call it concurrently"
        )
    parameters = inspect.signature(scorer).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return FIELDS
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for parameter in parameters:
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL
        if not optional and (parameter not in by_name or parameter.name not in FIELDS):
            raise ValueError(f"reward {name} asks for {parameter.name!r}; there are {', '.join(FIELDS)}, by name")
    return tuple(parameter.name for parameter in by_name if parameter.name in FIELDS)


def _sum_of(parts: Parts) -> tuple[Any, dict[str, Any]]:
    """Return the weighted sum of ``parts``, and their metrics; a part that is not a number in place of the sum."""
    for value in parts.values.values():
        if not _is_number(value):
            return value, {}
    total = math.fsum(parts.weights.get(name, 1.0) * float(value) for name, value in parts.values.items())
    return total, {**{f"reward/{name}": value for name, value in parts.values.items()}, **parts.metrics}


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number, of Python, NumPy or a similar library."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError, ValueError):
        return False
