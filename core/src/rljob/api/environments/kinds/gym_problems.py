"""The built-in environment ``reasoning_gym``: options. Its code is in :mod:`rljob.environments`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from rljob.api.base import Model, Text
from rljob.api.environments.environment_kind import EnvironmentKind


def _without_seed(parameters: dict[str, Any]) -> dict[str, Any]:
    for name in ("seed", "size"):
        if name in parameters:
            raise ValueError(f"{name} is governed by the rows; remove it")
    return parameters


class ReasoningGymOptions(Model):
    """Options of `reasoning_gym`."""

    dataset: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=63)]
    """dataset of reasoning-gym, which must be that of the rows with `data: {reasoningGym: …}`"""
    parameters: Annotated[dict[Text, Any], Field(max_length=64), AfterValidator(_without_seed)] = {}
    """parameters of the dataset, as in `data.reasoningGym.config`"""
    attempts: Annotated[int, Field(ge=1, le=1000)] = 1
    """answers after which an episode is truncated"""
    wrong: Annotated[Text, Field(min_length=1, max_length=4096)] = "That is not right. Try again."
    """observation after an answer that is not right"""


NAME = "reasoning_gym"
KIND = EnvironmentKind(
    make="rljob.environments.reasoning_gym_problems:ReasoningGymProblems",
    options=ReasoningGymOptions,
    summary="answer a problem of reasoning-gym, in one or several attempts, between <answer> and </answer>.",
    needs_package=True,
)
