"""The built-in reward ``judge``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic.alias_generators import to_camel

from rljob.api.base import Model, Name, Text, Url
from rljob.api.rewards.kind import RewardKind, Row
from rljob.api.templates import columns_of, text_of

DEFAULT_TOKENS = 1024
"""Most tokens of a verdict."""
POINTWISE_NAMES = ("criteria", "prompt", "response", "reference")
PAIRWISE_NAMES = ("criteria", "prompt", "first", "second")
LongText = Annotated[str, StringConstraints(max_length=65_536)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=255)]
ScaleEnd = Annotated[int, Field(ge=-1000, le=1000)]


class JudgeOptions(Model):
    """Options of `judge`."""

    url: Url | None = None
    """base address of an API compatible with OpenAI's, with its version: http://judge:8000/v1"""
    pool: Name | None = None
    """instead of `url`: entry of `rollouts` with another model than `policy`, whose engines judge"""
    model: Annotated[Text, Field(min_length=1)] | None = None
    """name of the model in the API at `url`"""
    mode: Literal["pointwise", "pairwise"] = "pointwise"
    """`pointwise`: a score of the completion; `pairwise`: whether it is better than the reference, asked in both
    orders"""
    criteria: LongText = "Is the response correct, complete, and to the point?"
    """what the judge has to look at"""
    template: LongText | None = None
    """the judge's prompt up to the sentence on the form of the verdict, which is added; {criteria}, {prompt},
    {response} and {reference}, or for pairs {first} and {second}, are replaced, and other names by columns; null: a
    prompt of rljob"""
    reference: Text | None = None
    """column with a reference answer; required for pairs"""
    lowest: ScaleEnd = 1
    """score with reward 0"""
    highest: ScaleEnd = 10
    """score with reward 1; between them the reward is linear"""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = DEFAULT_TOKENS
    """limit of the judge's reply, its reasoning included; a reply that reaches it is not scored"""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """of the judge; with 0, equal completions of a prompt are scored once"""
    token_variable: Variable | None = None
    """environment variable of the reward service with the API's token; in a cluster set it from a Secret in template"""

    @field_validator("template")
    @classmethod
    def _is_template(cls, template: str | None) -> str | None:
        if template is not None:
            columns_of(template)
        return template

    @model_validator(mode="after")
    def _has_one_judge(self) -> JudgeOptions:
        if (self.url is None) == (self.pool is None):
            cause = "url and pool are given" if self.url is not None else "no judge is given"
            raise ValueError(f"{cause}; give exactly one of url, pool")
        if self.url is not None and self.model is None:
            raise ValueError("model is required with url; name the model in its API")
        for name in ("model", "token_variable"):
            if self.pool is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"{to_camel(name)} has no meaning with pool, which has one model and a token; remove it"
                )
        return self

    @model_validator(mode="after")
    def _fits_its_mode(self) -> JudgeOptions:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest} is not less than highest {self.highest}; lower it")
        if self.mode == "pairwise" and self.reference is None:
            raise ValueError("mode pairwise compares with a reference; name its column in reference")
        if self.template is not None:
            for name in ("first", "second") if self.mode == "pairwise" else ("response",):
                if name not in columns_of(self.template):
                    raise ValueError(f"template lacks {{{name}}}, without which the judge does not see it; add it")
            if "reference" in columns_of(self.template) and self.reference is None:
                raise ValueError("template names {reference}; name its column in reference")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a template that are no columns."""
        return PAIRWISE_NAMES if self.mode == "pairwise" else POINTWISE_NAMES


def check_row(row: Row, options: JudgeOptions) -> None:
    """Check that the row has the reference and the columns of the template.

    Raises:
        ValueError: it lacks one, or one contains neither text nor a number.
    """
    columns = columns_of(options.template or "") - set(options.names)
    for column in sorted(columns) + ([options.reference] if options.reference is not None else []):
        text_of(row, column)


NAME = "judge"
KIND = RewardKind(
    make="rljob.rewards.judge_reward:JudgeReward",
    options=JudgeOptions,
    row_check=check_row,
    summary="the verdict of a language model, from 0 to 1: of a pool of the job, or through an API compatible with "
    "OpenAI's.",
    is_part=False,
)
