"""The built-in reward ``combined``: a weighted sum of other built-in rewards. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from rljob.api.base import Model, Name, Text
from rljob.api.rewards.kind import RewardKind, Row


class RewardPart(Model):
    """A part of a combined reward."""

    name: Name
    """name of the part; its reward is the metric reward/NAME"""
    builtin: Text
    """reward that ships with rljob"""
    config: Annotated[dict[Text, Any], Field(max_length=64)] = {}
    """options of the reward"""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """factor of the part's reward in the sum"""


class CombinedOptions(Model):
    """Options of `combined`."""

    parts: Annotated[list[RewardPart], Field(min_length=1, max_length=16)]
    """list of {name, builtin, config, weight}: rewards whose weighted sum is the reward; weight is 1 by default"""


def combined_kind(builtins: Mapping[str, RewardKind]) -> RewardKind:
    """Return the declaration of the reward whose parts are ``builtins``."""

    class CheckedOptions(CombinedOptions):
        """Options whose parts are checked."""

        @field_validator("parts")
        @classmethod
        def _check_parts(cls, parts: list[RewardPart]) -> list[RewardPart]:
            names = [part.name for part in parts]
            for i, part in enumerate(parts):
                if part.name in names[:i]:
                    raise ValueError(f"[{i}].name: {part.name!r} is used twice; give every part its own name")
                if part.builtin not in builtins:
                    raise ValueError(f"[{i}].builtin: {part.builtin!r} is not one of {', '.join(builtins)}")
                for problem in builtins[part.builtin].option_problems(part.config):
                    raise ValueError(f"[{i}].{problem}")
            return parts

    def check_row(row: Row, options: CombinedOptions) -> None:
        for part in options.parts:
            kind = builtins[part.builtin]
            if kind.row_check is not None:
                assert callable(kind.row_check), "the check of a built-in reward needs no library"
                kind.row_check(row, kind.parse(part.config))

    return RewardKind(
        make="rljob.rewards.combined_reward:CombinedReward",
        options=CheckedOptions,
        row_check=check_row,
        summary="weighted sum of other built-in rewards.",
    )
