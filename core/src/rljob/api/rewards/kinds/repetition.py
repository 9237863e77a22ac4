"""The built-in reward ``repetition``: options. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import Model
from rljob.api.rewards.kind import RewardKind


class RepetitionOptions(Model):
    """Options of `repetition`."""

    ngram: Annotated[int, Field(ge=1, le=100)] = 4
    """length of the sequences that are counted"""
    unit: Literal["words", "characters"] = "words"
    """what a sequence consists of; characters for languages without spaces"""
    allowed: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of repeated sequences without punishment"""


NAME = "repetition"
KIND = RewardKind(
    make="rljob.rewards.repetition_reward:RepetitionReward",
    options=RepetitionOptions,
    summary="punishment of repeated n-grams: 0 without, -1 when all are repeated.",
)
