"""FrozenLake as in ROLL's experiments: a random lake with random start and goal, as text.

Symbols: P player, _ ice, O hole, G goal, X player in a hole, √ player at the goal. On slippery ice a step goes in the
intended direction or to one of its two sides, each with probability 1/3, as in Gymnasium's FrozenLake-v1.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from rljob.api.environments.kinds.ice import FrozenLakeOptions
from rljob.environments.grid_game import MOVES, Cell, GridGame

ATTEMPTS = 10_000


class FrozenLake(GridGame):
    """One episode."""

    def __init__(self, options: FrozenLakeOptions) -> None:
        super().__init__(options)
        self._lake = options
        self._holes: frozenset[Cell] = frozenset()
        self._goal: Cell = (0, 0)
        self._player: Cell = (0, 0)

    def start(self, chance: random.Random) -> None:
        """Draw lakes until the goal can be reached from the start.

        Raises:
            ValueError: ATTEMPTS lakes have no way; ``frozen`` is too small.
        """
        size = self._lake.size
        cells = [(row, column) for row in range(size) for column in range(size)]
        for _ in range(ATTEMPTS):
            first, last = int(chance.random() * len(cells)), int(chance.random() * (len(cells) - 1))
            self._player, self._goal = cells[first], cells[last if last < first else last + 1]
            holes = {cell for cell in cells if chance.random() >= self._lake.frozen}
            self._holes = frozenset(holes - {self._player, self._goal})
            if self._distances()[0].get(self._player) is not None:
                return
        raise ValueError(f"{ATTEMPTS:,} lakes have no way to the goal; raise frozen")

    def move(self, change: Cell, chance: random.Random) -> tuple[float, bool]:
        """Move the player, or slip to a side; at the edge it stays."""
        if self._lake.slippery:
            side = (change[1], change[0])
            change = (change, side, (-side[0], -side[1]))[int(chance.random() * 3)]
        before, self._player = self._player, self._neighbour(self._player, change)
        return 0.0, self._player != before

    def solved(self) -> bool:
        """Return whether the player is at the goal."""
        return self._player == self._goal

    def failed(self) -> bool:
        """Return whether the player is in a hole."""
        return self._player in self._holes

    def expert(self) -> str:
        """Return a first step of a shortest way to the goal, as if the ice were not slippery."""
        return self._distances()[1][self._player][0].upper()

    def symbols(self) -> Iterable[Sequence[str]]:
        """Return the lake."""
        size = range(self._lake.size)
        return ([self._symbol((row, column)) for column in size] for row in size)

    def places(self) -> Iterable[tuple[str, Cell]]:
        """Return player and goal."""
        return (("P", self._player), ("G", self._goal))

    def _symbol(self, cell: Cell) -> str:
        if cell == self._player:
            return "√" if self.solved() else "X" if self.failed() else "P"
        return "G" if cell == self._goal else "O" if cell in self._holes else "_"

    def _neighbour(self, cell: Cell, change: Cell) -> Cell:
        last = self._lake.size - 1
        return min(max(cell[0] + change[0], 0), last), min(max(cell[1] + change[1], 0), last)

    def _distances(self) -> tuple[dict[Cell, int], dict[Cell, str]]:
        """Return for every cell from which the goal can be reached the number of steps, and the first of them."""
        distances, first = {self._goal: 0}, {self._goal: "left"}
        pending = deque([self._goal])
        while pending:
            cell = pending.popleft()
            for name, (down, right) in MOVES.items():
                before = self._neighbour(cell, (-down, -right))
                if before not in distances and before not in self._holes:
                    distances[before], first[before] = distances[cell] + 1, name
                    pending.append(before)
        return distances, first
