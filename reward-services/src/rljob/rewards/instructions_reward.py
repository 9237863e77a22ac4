"""Scorer of the reward ``instructions``: 1 if the completion follows all verifiable instructions of its row, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.instructions import InstructionsOptions, instructions_of
from rljob.api.tasks import Task
from rljob.rewards.instruction_checks import CHECKS


@deterministic
class InstructionsReward:
    """Checks each instruction. The metric ``followed`` is the share of followed instructions.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: InstructionsOptions, tasks: Sequence[Task]) -> None:
        self._options = options

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return reward and metric; an empty completion follows nothing.

        Raises:
            ValueError: the row has no instructions that can be checked.
        """
        instructions = instructions_of(problem, self._options)
        texts = [completion] if self._options.mode == "strict" else variants(completion)
        texts = [text for text in texts if text.strip()]
        followed = [any(CHECKS[name](text, **arguments) for text in texts) for name, arguments in instructions]
        share = sum(followed) / len(followed)
        return float(all(followed)) if self._options.credit == "all" else share, {"followed": share}


def variants(completion: str) -> list[str]:
    """Return the texts that the mode ``loose`` checks: without first line, last line or both, and without ``*``."""
    lines = completion.split("\n")
    parts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(part).strip() for part in parts]
    return [completion, *texts[1:], *(text.replace("*", "") for text in [completion, *texts[1:]])]
