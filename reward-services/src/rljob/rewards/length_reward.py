"""Scorers of the rewards ``length`` and ``overlong``, which depend on the length of the completion alone."""

from __future__ import annotations

from collections.abc import Sequence

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.length import LengthOptions
from rljob.api.rewards.kinds.overlong import OverlongOptions
from rljob.api.tasks import Task


@deterministic
class LengthReward:
    """1 inside the bounds, linear outside. The metric ``length`` is the length.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: LengthOptions, tasks: Sequence[Task]) -> None:
        self._options = options

    def __call__(self, *, completion: str, response_tokens: int | None) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the unit is tokens, and the sample has no number of tokens.
        """
        options = self._options
        match options.unit:
            case "tokens":
                length = known(response_tokens)
            case "words":
                length = len(completion.split())
            case "characters":
                length = len(completion)
        outside = max(options.min - length, 0)
        if options.max is not None:
            outside = max(outside, length - options.max)
        reward = 1.0 if not outside else max(0.0, 1.0 - outside / options.falloff) if options.falloff else 0.0
        return reward, {"length": float(length)}


@deterministic
class OverlongReward:
    """Soft punishment of overlong answers: DAPO (arXiv 2503.14476), equation 13.

    0 up to ``max - buffer`` tokens, then linear to -1 at ``max`` tokens.

    Args:
        options: the reward's ``config``.
        tasks: the tasks that use the reward; ``sampling.maxTokens`` is the maximum if the options have none.

    Raises:
        ValueError: the buffer is longer than an answer of a task may be.
    """

    def __init__(self, options: OverlongOptions, tasks: Sequence[Task]) -> None:
        self._buffer = options.buffer
        self._most = {task.name: options.max_tokens or task.sampling.max_tokens for task in tasks}
        for task in tasks:
            if self._most[task.name] < options.buffer:
                raise ValueError(
                    f"buffer {options.buffer} is more than the {self._most[task.name]} tokens of an answer of task "
                    f"{task.name}; lower it"
                )

    def __call__(self, *, task: str, response_tokens: int | None) -> float:
        """Return the reward, between -1 and 0.

        Raises:
            ValueError: the sample has no number of tokens.
        """
        excess = known(response_tokens) - (self._most[task] - self._buffer)
        return -min(1.0, max(0.0, excess / self._buffer))


def known(response_tokens: int | None) -> int:
    """Return the number of tokens of a sample.

    Raises:
        ValueError: the sample has none.
    """
    if response_tokens is None:
        raise ValueError("the sample has no response_tokens; the runner of rljob sends them")
    return response_tokens
