"""What a reward is, and how any reward becomes a verdict.

A reward is a plain function of one finished sample. It is called with keyword arguments, so it names those it wants
and takes the rest as ``**_``; it answers a number, or a mapping with the number under ``reward`` and other numbers
beside it, which become metrics. Whatever else it does (raise, answer nan) is recorded as the sample's error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from rljob.protocol.rewards import Score, ScoreItem


class Reward(Protocol):
    """A reward: a function, or an object that is called like one."""

    def __call__(
        self, *, prompt: str, completion: str, problem: dict[str, Any], task: str, finish: str
    ) -> float | Mapping[str, float]:
        """Return the reward of ``completion``; the arguments are the fields of a ScoreItem."""


def judge(reward: Reward, name: str, item: ScoreItem) -> Score:
    """Return the verdict of the reward called ``name`` on ``item``; never raises."""
    try:
        answer = reward(
            prompt=item.prompt, completion=item.completion, problem=item.problem, task=item.task, finish=item.finish
        )
    except Exception as error:  # noqa: BLE001 user code raises anything; a sample that cannot be scored is data
        return failed(item, f"reward {name} raised {type(error).__name__}: {error}")
    numbers = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    for key, value in {"reward": None, **numbers}.items():
        if not _is_number(value):
            return failed(item, f"reward {name} answered {value!r} as {key}; it must answer a finite number")
    metrics = {str(key): float(value) for key, value in numbers.items()}
    return Score(item.sample, metrics.pop("reward"), metrics, "")


def failed(item: ScoreItem, reason: str) -> Score:
    """Return the verdict on a sample that could not be scored."""
    return Score(item.sample, 0.0, {}, reason[:1000])


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number; numpy's and the like count."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, OverflowError, ValueError):
        return False
