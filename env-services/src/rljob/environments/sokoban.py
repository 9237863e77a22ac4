"""Sokoban: push every box onto a target. Rooms are generated backwards from their solution, so each can be solved.

Symbols as in ROLL's experiments: # wall, _ empty, O target, √ box on a target, X box, P player, S player on a target.
A room is an open rectangle with a few inner walls. Its boxes start on the targets, and random pulls move them away: a
pull is a push in reverse, so the pushes in reverse order solve the room.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from rljob.api.environments.kinds.warehouse import SokobanOptions
from rljob.environments.grid_game import MOVES, Cell, GridGame

ATTEMPTS = 1000
INNER_WALLS = 0.1
"""Probability that a cell of the room is a wall."""
MAX_STATES = 200_000
"""Positions that the expert searches."""


class Sokoban(GridGame):
    """One episode."""

    def __init__(self, options: SokobanOptions) -> None:
        super().__init__(options)
        self._room = options
        self._walls: frozenset[Cell] = frozenset()
        self._targets: frozenset[Cell] = frozenset()
        self._boxes: frozenset[Cell] = frozenset()
        self._player: Cell = (0, 0)

    def start(self, chance: random.Random) -> None:
        """Draw rooms until the pulls have moved every box off the targets.

        Raises:
            ValueError: ATTEMPTS rooms are too narrow.
        """
        size = self._room.size
        inside = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
        edge = {(row, column) for row in range(size) for column in range(size)} - set(inside)
        for _ in range(ATTEMPTS):
            walls = {cell for cell in inside if chance.random() < INNER_WALLS}
            free = [cell for cell in inside if cell not in walls]
            if len(free) <= self._room.boxes + 1:
                continue
            self._walls = frozenset(edge | walls)
            places = chance.sample(free, self._room.boxes + 1)
            self._player, self._targets = places[0], frozenset(places[1:])
            self._boxes = self._targets
            for _ in range(self._room.pulls):
                self._pull(chance)
            if not self._boxes & self._targets:
                return
        raise ValueError(f"{ATTEMPTS:,} rooms of size {size} have no room for {self._room.boxes} boxes; raise size")

    def move(self, change: Cell, chance: random.Random) -> tuple[float, bool]:
        """Move the player, and push a box before it; return the reward of boxes on targets."""
        before = len(self._boxes & self._targets)
        after = self._moved(self._player, self._boxes, change)
        if after is None:
            return 0.0, False
        self._player, self._boxes = after
        return self._room.box_reward * (len(self._boxes & self._targets) - before), True

    def solved(self) -> bool:
        """Return whether every box is on a target."""
        return self._boxes == self._targets

    def expert(self) -> str | None:
        """Return the first step of a shortest solution; None if there is none, or the search takes too long."""
        start = (self._player, self._boxes)
        first: dict[tuple[Cell, frozenset[Cell]], str] = {start: ""}
        pending = deque([start])
        while pending and len(first) < MAX_STATES:
            state = pending.popleft()
            for name, change in MOVES.items():
                after = self._moved(*state, change)
                if after is None or after in first:
                    continue
                first[after] = first[state] or name
                if after[1] == self._targets:
                    return first[after][0].upper()
                pending.append(after)
        return None

    def symbols(self) -> Iterable[Sequence[str]]:
        """Return the room."""
        size = range(self._room.size)
        return ([self._symbol((row, column)) for column in size] for row in size)

    def places(self) -> Iterable[tuple[str, Cell]]:
        """Return player, boxes and targets."""
        yield "P", self._player
        yield from (("X", box) for box in sorted(self._boxes))
        yield from (("O", target) for target in sorted(self._targets))

    def _symbol(self, cell: Cell) -> str:
        target = cell in self._targets
        if cell in self._walls:
            return "#"
        if cell in self._boxes:
            return "√" if target else "X"
        if cell == self._player:
            return "S" if target else "P"
        return "O" if target else "_"

    def _moved(self, player: Cell, boxes: frozenset[Cell], change: Cell) -> tuple[Cell, frozenset[Cell]] | None:
        """Return player and boxes after a move; None if a wall or a box blocks it."""
        place = (player[0] + change[0], player[1] + change[1])
        if place in self._walls:
            return None
        if place not in boxes:
            return place, boxes
        behind = (place[0] + change[0], place[1] + change[1])
        if behind in self._walls or behind in boxes:
            return None
        return place, boxes - {place} | {behind}

    def _pull(self, chance: random.Random) -> None:
        """Walk to a random side of a random box, and pull the box one cell, if that is possible."""
        reachable = self._reachable()
        pulls = []
        for box in sorted(self._boxes):
            for change in MOVES.values():
                player = (box[0] + change[0], box[1] + change[1])
                back = (player[0] + change[0], player[1] + change[1])
                if player in reachable and back not in self._walls and back not in self._boxes:
                    pulls.append((box, player, back))
        if pulls:
            box, player, back = pulls[int(chance.random() * len(pulls))]
            self._boxes, self._player = self._boxes - {box} | {player}, back

    def _reachable(self) -> set[Cell]:
        """Return the cells that the player can walk to without a push."""
        found, pending = {self._player}, [self._player]
        while pending:
            row, column = pending.pop()
            for down, right in MOVES.values():
                cell = (row + down, column + right)
                if cell not in found and cell not in self._walls and cell not in self._boxes:
                    found.add(cell)
                    pending.append(cell)
        return found
