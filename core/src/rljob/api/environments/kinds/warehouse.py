"""The built-in environment ``sokoban``: options. Its code is in :mod:`rljob.environments`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob.api.environments.environment_kind import EnvironmentKind
from rljob.api.environments.kinds.grid_options import GridOptions, Points


class SokobanOptions(GridOptions):
    """Options of `sokoban`."""

    size: Annotated[int, Field(ge=4, le=16)] = 6
    """rows and columns, with the walls around the room"""
    boxes: Annotated[int, Field(ge=1, le=4)] = 1
    """boxes to push onto targets"""
    pulls: Annotated[int, Field(ge=1, le=64)] = 6
    """pulls that generate a room, backwards from its solution: more pulls make it harder"""
    goal_reward: Points = 10.0
    """reward of the step that solves the game"""
    step_reward: Points = -0.1
    """reward of every step"""
    box_reward: Points = 1.0
    """reward of a box that is pushed onto a target; it is subtracted when the box is pushed off"""


NAME = "sokoban"
KIND = EnvironmentKind(
    make="rljob.environments.sokoban:Sokoban",
    options=SokobanOptions,
    summary="push boxes onto targets in a room; rooms are random and can be solved.",
)
