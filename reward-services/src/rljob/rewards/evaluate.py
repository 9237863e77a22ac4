"""How what a reward says becomes a verdict on a sample: whatever it does, the sample gets a score or an error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rljob.protocol.rewards import Score, ScoreItem

FIELDS = ("prompt", "completion", "finish", "problem", "task")
"""What a reward may ask for: fields of a ScoreItem."""


class RewardEvaluator:
    """Scores samples by one reward; never raises.

    Args:
        reward: called with keyword arguments, those of :data:`FIELDS` that it names (all when it takes ``**_``).
            Returns a number, or a number and a mapping of more numbers by name.
        name: the reward's name, for errors.

    Raises:
        ValueError: it cannot be called so; the sentence says why.
    """

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        self._reward = reward
        self._name = name
        self._fields = _fields_of(reward, name)

    def __call__(self, item: ScoreItem) -> Score:
        """Return the verdict on ``item``."""
        try:
            answer = self._reward(**{field: getattr(item, field) for field in self._fields})
        except Exception as error:  # noqa: BLE001 user code raises anything; a sample that cannot be scored is data
            return failed(item, f"reward {self._name} raised {type(error).__name__}: {error}")
        reward, metrics = answer if _is_pair(answer) else (answer, {})
        for key, value in {"reward": reward, **metrics}.items():
            if not _is_number(value):
                return failed(item, f"reward {self._name} answered {value!r} as {key}; it must answer a finite number")
        return Score(item.sample, float(reward), {str(key): float(value) for key, value in metrics.items()}, "")


def failed(item: ScoreItem, reason: str) -> Score:
    """Return the verdict on a sample that could not be scored."""
    return Score(item.sample, 0.0, {}, reason[:1000])


def _fields_of(reward: Callable[..., Any], name: str) -> tuple[str, ...]:
    if inspect.iscoroutinefunction(reward):
        raise ValueError(f"reward {name} is async; write a plain function, worker processes call it side by side")
    asked = inspect.signature(reward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in asked):
        return FIELDS
    by_name = [
        parameter for parameter in asked if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for parameter in asked:
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL
        if not optional and (parameter not in by_name or parameter.name not in FIELDS):
            raise ValueError(f"reward {name} asks for {parameter.name!r}; there are {', '.join(FIELDS)}, by name")
    return tuple(parameter.name for parameter in by_name if parameter.name in FIELDS)


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number; numpy's and the like count."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError, ValueError):
        return False
