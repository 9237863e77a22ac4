"""The built-in reward ``format``: options. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from rljob.api.base import Model
from rljob.api.rewards.kind import RewardKind

TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=63)]


class FormatOptions(Model):
    """Options of `format`."""

    tags: Annotated[list[TagName], Field(min_length=1, max_length=16)] = ["think", "answer"]
    """tags that the completion has, each once, in this order, closed and not empty, and nothing outside of them"""
    opened: bool = False
    """whether the prompt ends with the first tag, so that the completion begins inside of it"""
    finished: bool = True
    """whether the model must end the completion itself, before maxTokens"""

    @field_validator("tags")
    @classmethod
    def _different(cls, tags: list[str]) -> list[str]:
        for i, tag in enumerate(tags):
            if tag in tags[:i]:
                raise ValueError(f"{tag!r} is named twice; name it once")
        return tags


NAME = "format"
KIND = RewardKind(
    make="rljob.rewards.format_reward:FormatReward",
    options=FormatOptions,
    summary="1 when the completion consists of given tags, such as <think> and <answer>, else 0.",
)
