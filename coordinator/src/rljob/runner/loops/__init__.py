"""The loops that drive trajectories, one per module. `tasks[].loop` names one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from rljob.protocol.rewards import Score
from rljob.runner.context import Context

Loop: TypeAlias = Callable[[Context], Awaitable[Score]]
"""Drives one trajectory to its score."""
