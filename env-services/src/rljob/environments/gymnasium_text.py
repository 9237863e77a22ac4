"""Environments of Gymnasium with a discrete action space, as text.

``function: rljob.environments.gymnasium_text:KIND``. It is no builtin, because the images of rljob have no Gymnasium:
install ``rljob-environments[gymnasium]``.
Gymnasium has one random state for the problem and for chance during the episode. Here the row's seed makes the problem,
which is the same for the samples of a group, and the episode's seed the chance after the reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from pydantic import Field, StringConstraints

from rljob.api.base import Model, Text
from rljob.api.environments import EnvironmentKind
from rljob.api.environments.kinds.grid_options import Points
from rljob.environments.action_text import answer_text, seed_of
from rljob.environments.sdk_types import Info, StepResult

TEXT = "ansi"
"""Render mode of an environment that renders text."""


class GymnasiumOptions(Model):
    """Options of an environment of Gymnasium."""

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]+$", max_length=253)]
    """id of a registered environment, for example FrozenLake-v1; MODULE:ID imports MODULE first"""
    arguments: Annotated[dict[Text, Any], Field(max_length=64)] = {}
    """arguments of gymnasium.make"""
    actions: Annotated[list[Text], Field(max_length=1024)] = []
    """name of each action, in the order of their numbers; by default actions are numbers"""
    observation: Literal["render", "value"] = "render"
    """what the model sees: the text of render_mode ansi, or the observation itself as text"""
    invalid_reward: Points = 0.0
    """reward of a text that names no action; the environment makes no step"""
    max_steps: Annotated[int, Field(ge=1, le=100_000)] = 100
    """answers after which an episode is truncated; invalid ones count"""


class GymnasiumText:
    """One episode. An action is the name of an action, or its number if actions have no names.

    Args:
        options: id of the environment, names of its actions, what the model sees.

    Raises:
        ValueError: the environment cannot be made, or it does not fit the options.
    """

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        renders = {"render_mode": TEXT} if options.observation == "render" else {}
        try:
            self._environment: Any = gymnasium.make(options.id, **{**renders, **options.arguments})
        except Exception as error:  # a registered environment may raise anything for its arguments
            raise ValueError(f"id: gymnasium cannot make {options.id}: {error}; correct id or arguments") from error
        modes = self._environment.metadata.get("render_modes", ())
        if renders and not (self._environment.render_mode == TEXT and TEXT in modes):
            raise ValueError(f"observation: {options.id} renders no text; set observation: value")
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"id: {options.id} has the action space {space}; name an environment with a Discrete one")
        numbers = range(int(space.start), int(space.start) + int(space.n))
        if options.actions and len(options.actions) != len(numbers):
            raise ValueError(f"actions: {len(options.actions)} names are given and {options.id} has {len(numbers)}")
        self.actions = options.actions or [str(number) for number in numbers]
        self._numbers = {name.strip().casefold(): number for name, number in zip(self.actions, numbers, strict=True)}
        if len(self._numbers) != len(numbers):
            raise ValueError("actions: two names differ in case only; give every action its own name")
        self._text = ""
        self._steps = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Info]:
        """Make the problem of the row's seed; chance during the episode follows ``seed``."""
        value, _ = self._environment.reset(seed=seed_of(row))
        self._environment.unwrapped.np_random = np.random.default_rng(seed)
        self._steps = 0
        self._text = self._observation(value)
        return self._text, {}

    def step(self, action: str) -> StepResult:
        """Make the step that a text names. A text that names no action makes none and is counted as invalid."""
        number = self._numbers.get(answer_text(action).casefold())
        self._steps += 1
        reward, terminated, truncated = self._options.invalid_reward, False, False
        if number is not None:
            value, reward, terminated, truncated, _ = self._environment.step(number)
            self._text = self._observation(value)
        truncated = not terminated and (truncated or self._steps >= self._options.max_steps)
        info = {"metrics": {"action_is_valid": number is not None}, "metrics_agg_mode": {"action_is_valid": "mean"}}
        return self._text, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Release the environment."""
        self._environment.close()

    def _observation(self, value: Any) -> str:
        """Return what the model sees."""
        if self._options.observation == "value":
            return str(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
        text: str = self._environment.render()
        return text.rstrip("\n")


KIND = EnvironmentKind(
    make=GymnasiumText,
    options=GymnasiumOptions,
    summary="act in an environment of Gymnasium with a discrete action space.",
    needs_package=True,
)
