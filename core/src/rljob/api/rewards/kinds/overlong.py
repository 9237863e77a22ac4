"""The built-in reward ``overlong``: options. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rljob.api.base import Model
from rljob.api.rewards.kind import RewardKind


class OverlongOptions(Model):
    """Options of `overlong`."""

    buffer: Annotated[int, Field(ge=1, le=1 << 30)]
    """tokens before the maximum over which the reward falls linearly from 0 to -1"""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    """tokens with reward -1; null: sampling.maxTokens of the task"""

    @model_validator(mode="after")
    def _fits(self) -> OverlongOptions:
        if self.max_tokens is not None and self.buffer > self.max_tokens:
            raise ValueError(f"buffer {self.buffer} is more than maxTokens {self.max_tokens}; lower it")
        return self


NAME = "overlong"
KIND = RewardKind(
    make="rljob.rewards.length_reward:OverlongReward",
    options=OverlongOptions,
    summary="DAPO's soft punishment of long answers: 0, falling to -1 over the last tokens before the maximum.",
)
