"""The built-in environment ``frozen_lake``: options. Its code is in :mod:`rljob.environments`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob.api.environments.environment_kind import EnvironmentKind
from rljob.api.environments.kinds.grid_options import GridOptions


class FrozenLakeOptions(GridOptions):
    """Options of `frozen_lake`."""

    size: Annotated[int, Field(ge=2, le=16)] = 4
    """rows and columns"""
    frozen: Annotated[float, Field(gt=0, le=1)] = 0.8
    """probability that a cell is ice and not a hole"""
    slippery: bool = True
    """whether a step goes in the intended direction with probability 1/3 only, and else to one of its sides"""


NAME = "frozen_lake"
KIND = EnvironmentKind(
    make="rljob.environments.frozen_lake:FrozenLake",
    options=FrozenLakeOptions,
    summary="walk over ice to a goal without falling into a hole; start, goal and holes are random.",
)
