"""Measured speeds of engines and trainer, from which ``rljob simulate`` predicts a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rljob.api.base import Model
from rljob.api.errors import ManifestError, sentences

Rate = Annotated[float, Field(gt=0, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class EngineSpeed(Model):
    """Speed of one engine."""

    tokens_per_second_per_sequence: Rate
    """Tokens per second of a sequence that runs alone."""
    tokens_per_second: Rate
    """Tokens per second of all sequences together, at most."""
    weight_update_seconds: Seconds = 0.0
    """Duration of a weight update; the engine generates nothing meanwhile."""


class TrainerSpeed(Model):
    """Speed of the trainer."""

    tokens_per_second_per_gpu: Rate
    """Tokens per second of one GPU (on CPU: of one process) in a step, prompts included. All passes of the step count
    as one."""
    seconds_per_step: Seconds = 0.0
    """Time of a step that does not depend on the number of tokens."""


class AnswerLength(Model):
    """Length of the model's answers: log-normal, at most the task's `sampling.maxTokens`."""

    median_tokens: Annotated[float, Field(ge=1, le=1e9)]
    """Median of the tokens."""
    sigma: Annotated[float, Field(ge=0, le=5)]
    """Standard deviation of the logarithm."""


class Speeds(Model):
    """Measured speeds, and the work of a sample."""

    engine: EngineSpeed
    """Of one engine."""
    trainer: TrainerSpeed
    """Of the trainer."""
    answers: AnswerLength
    """Of all tasks."""
    prompt_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 1
    """Tokens of a prompt."""
    reward_seconds: Seconds = 0.0
    """Time to score a sample."""
    accepted_groups: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the groups that the `groupFilter` of their task accepts. Its conditions are not simulated."""


def read_speeds(data: Mapping[str, Any], source: str) -> Speeds:
    """Return the speeds in ``data``, whose keys are camelCase as in the file ``source``.

    Raises:
        ManifestError: the data is invalid; the error contains every problem.
    """
    try:
        return Speeds.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(sentences(error, Speeds), source) from None
