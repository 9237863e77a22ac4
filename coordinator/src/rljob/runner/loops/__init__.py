"""The loops that drive trajectories, by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from rljob.protocol.rewards import Score
from rljob.runner.context import Context
from rljob.runner.loops.single_turn import single_turn

Loop: TypeAlias = Callable[[Context], Awaitable[Score]]

LOOPS: dict[str, Loop] = {"single_turn": single_turn}
