"""The built-in reward ``length``: options. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rljob.api.base import Model
from rljob.api.rewards.kind import RewardKind

Count = Annotated[int, Field(ge=0, le=1 << 30)]


class LengthOptions(Model):
    """Options of `length`."""

    unit: Literal["tokens", "words", "characters"] = "words"
    """what is counted in the completion"""
    min: Count = 0
    """least length with reward 1"""
    max: Count | None = None
    """greatest length with reward 1; null: no limit"""
    falloff: Count = 0
    """length over which the reward falls linearly from 1 to 0 outside of min and max"""

    @model_validator(mode="after")
    def _bounded(self) -> LengthOptions:
        if self.max is None and self.min == 0:
            raise ValueError("bounds nothing; give min or max")
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is less than min {self.min}; raise it or lower the other")
        return self


NAME = "length"
KIND = RewardKind(
    make="rljob.rewards.length_reward:LengthReward",
    options=LengthOptions,
    summary="1 when the length of the completion is inside bounds, falling to 0 outside.",
)
