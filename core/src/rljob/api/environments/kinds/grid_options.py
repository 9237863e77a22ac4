"""Options that all grid games have: text of the observations and rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob.api.base import Model

Points = Annotated[float, Field(ge=-1e6, le=1e6)]


class GridOptions(Model):
    """Options of a grid game."""

    separator: Annotated[str, Field(max_length=4)] = " "
    """text between the symbols of a row"""
    coordinates: bool = True
    """whether a line with rows and columns of the symbols that matter follows the grid"""
    goal_reward: Points = 1.0
    """reward of the step that solves the game"""
    step_reward: Points = 0.0
    """reward of every step"""
    invalid_reward: Points = 0.0
    """added if the text of the model names no action; nothing moves"""
    max_steps: Annotated[int, Field(ge=1, le=100_000)] = 100
    """steps after which an episode is truncated"""
