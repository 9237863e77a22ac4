"""The built-in reward ``reward_model``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rljob.api.base import Model, Name, Text
from rljob.api.rewards.kind import RewardKind, Row
from rljob.api.templates import text_of


class RewardModelOptions(Model):
    """Options of `reward_model`."""

    model: Annotated[Text, Field(min_length=1)] | None = None
    """directory of a sequence classification model of transformers, with its tokenizer, in the service's container"""
    pool: Name | None = None
    """instead of `model`: entry of `rollouts` with another model than `policy`, a sequence classification model"""
    format: Literal["chat", "text"] = "chat"
    """`chat`: the tokenizer's chat template with a question of the user and the completion; `text`: both, one after the
    other"""
    column: Text | None = None
    """column with the question; null: the whole prompt, as the policy received it"""
    label: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """output of the model that is the reward"""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """applied to the outputs first: `softmax` over all labels"""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """a longer question and completion are not scored"""
    device: Literal["cpu", "cuda"] = "cpu"
    """for `model`; `cpu`: one copy for all workers; `cuda`: each worker loads it on the GPU before its first sample,
    whose time limit includes that"""

    @model_validator(mode="after")
    def _has_one_model(self) -> RewardModelOptions:
        if (self.model is None) == (self.pool is None):
            cause = "model and pool are given" if self.model is not None else "no model is given"
            raise ValueError(f"{cause}; give exactly one of model, pool")
        if self.pool is not None and self.device != "cpu":
            raise ValueError("device has no meaning with pool, which has accelerators of its own; remove it")
        return self


def check_row(row: Row, options: RewardModelOptions) -> None:
    """Check that the row has the question.

    Raises:
        ValueError: the row lacks the column, or the column contains neither text nor a number.
    """
    if options.column is not None:
        text_of(row, options.column)


NAME = "reward_model"
KIND = RewardKind(
    make="rljob.rewards.pool_reward_model:make",
    options=RewardModelOptions,
    row_check=check_row,
    summary="an output of a sequence classification model, computed with transformers or by a pool of the job.",
    limits_memory=False,
    is_part=False,
)
