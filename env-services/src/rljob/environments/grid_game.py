"""What grid games share: actions from the text of a model, rewards, metrics, the text of an observation."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rljob.api.environments.kinds.grid_options import GridOptions
from rljob.environments.action_text import answer_text, seed_of
from rljob.environments.sdk_types import Info, StepResult

Cell = tuple[int, int]
MOVES: Mapping[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Action → change of row and column. The order is that of Gymnasium's FrozenLake."""


def parse_action(text: str) -> str | None:
    """Return the action that a text names: left, down, right, up, or their first letters, in any case; else None.

    Only what is between <answer> and </answer> counts, if the text has it, else the whole text.
    """
    word = answer_text(text).casefold()
    if word in MOVES:
        return word
    return next((move for move in MOVES if move[0] == word), None)


class GridGame(ABC):
    """A game on a grid; a subclass defines ``start``, ``move``, ``solved``, ``failed`` and the texts."""

    in_event_loop = True
    actions: ClassVar[list[str]] = [move[0].upper() for move in MOVES]

    def __init__(self, options: GridOptions) -> None:
        self._options = options
        self._steps = 0
        self._chance = random.Random(0)

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Info]:
        """Generate the problem of the row's seed; chance during the episode follows ``seed``."""
        self.start(random.Random(seed_of(row)))
        self._chance = random.Random(seed)
        self._steps = 0
        return self.text(), {}

    def step(self, action: str) -> StepResult:
        """Move. A text that names no action moves nothing and is counted as invalid."""
        options, name = self._options, parse_action(action)
        self._steps += 1
        reward, effective = options.step_reward, False
        if name is None:
            reward += options.invalid_reward
        else:
            gained, effective = self.move(MOVES[name], self._chance)
            reward += gained
        solved = self.solved()
        if solved:
            reward += options.goal_reward
        terminated = solved or self.failed()
        metrics = {"success": solved, "action_is_valid": name is not None, "action_is_effective": effective}
        modes = {"action_is_valid": "mean", "action_is_effective": "mean"}
        truncated = not terminated and self._steps >= options.max_steps
        return self.text(), reward, terminated, truncated, {"metrics": metrics, "metrics_agg_mode": modes}

    def text(self) -> str:
        """Return the observation: the grid, and a line with coordinates (row, column from 0)."""
        separator = self._options.separator
        lines = [separator.join(line) for line in self.symbols()]
        if self._options.coordinates:
            lines.append(separator.join(f"{name}{separator}{r}{separator}{c}" for name, (r, c) in self.places()))
        return "\n".join(lines)

    @abstractmethod
    def start(self, chance: random.Random) -> None:
        """Generate a problem."""

    @abstractmethod
    def move(self, change: Cell, chance: random.Random) -> tuple[float, bool]:
        """Move the player; return the reward besides that of the step and the goal, and whether something moved."""

    @abstractmethod
    def solved(self) -> bool:
        """Return whether the game is solved."""

    def failed(self) -> bool:
        """Return whether the game is lost."""
        return False

    @abstractmethod
    def symbols(self) -> Iterable[Sequence[str]]:
        """Return the grid, row by row."""

    @abstractmethod
    def places(self) -> Iterable[tuple[str, Cell]]:
        """Return the symbols whose coordinates are part of the text."""
