"""The learning algorithm of a manifest, and the presets that fill it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rljob.api.base import Model
from rljob.api.extensions import ADVANTAGES, AGGREGATIONS, OBJECTIVES, Extension


class Algorithm(Model):
    """The learning algorithm. A preset fills every field that is not set; `rljob explain` shows the result."""

    preset: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo` (DeepSeekMath, arXiv 2402.03300) or `dr_grpo` (arXiv 2503.20783)."""
    advantage: Annotated[str, Extension(ADVANTAGES)] | None = None
    """`group_normalized`: (R − mean) / (std + 1e-6) over the group, unbiased std; for a group of one sample R
    (REINFORCE without a baseline). `group_centered`: R − mean; needs at least 2 samples per prompt. Or
    `module:function` of your own package."""
    objective: Annotated[str, Extension(OBJECTIVES)] | None = None
    """Objective of a token: `ppo_clip`, the clipped ratio times the advantage. Or `module:function` of your own
    package."""
    aggregation: Annotated[str, Extension(AGGREGATIONS)] | None = None
    """`token_mean`: sum over the tokens of the global batch divided by their number. `token_sum_constant`: divided
    by samples of the batch times the task's maxTokens instead, so that long answers are not down-weighted. Or
    `module:function` of your own package."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """ε_low: the ratio is clipped below at 1 − ε_low."""
    clip_high: Annotated[float, Field(gt=0, le=10)] | None = None
    """ε_high: the ratio is clipped above at 1 + ε_high."""
    dual_clip: Annotated[float, Field(gt=1, le=100)] | None = None
    """c: for negative advantages the objective is bounded below by c·A. Null: no bound."""
    ratio: Literal["behavior", "proximal"] | None = None
    """Denominator of the ratio: `behavior` is the engine's log-probability when the token was sampled; `proximal`
    the trainer's at the start of the batch."""
    minibatches: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Optimizer updates per batch; each uses its share of the batch's samples once."""
    group_filter: Literal["none", "nonconstant"] | None = None
    """`nonconstant` rejects and replaces a group whose rewards are all equal (dynamic sampling, arXiv 2503.14476)."""


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": "group_normalized",
        "objective": "ppo_clip",
        "aggregation": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "ratio": "behavior",
        "minibatches": 1,
        "group_filter": "none",
    },
    "dr_grpo": {
        "advantage": "group_centered",
        "objective": "ppo_clip",
        "aggregation": "token_sum_constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "ratio": "behavior",
        "minibatches": 1,
        "group_filter": "none",
    },
}
"""Preset → fields of `algorithm` it fills. A field that the user set wins. dualClip stays null (off)."""

ZERO_FOR_ONE_SAMPLE = ("group_centered",)
"""Built-in advantages that are 0 in a group of one sample."""


def advantage_of(algorithm: Algorithm) -> str:
    """Return the advantage of ``algorithm``: its own, or that of its preset."""
    return algorithm.advantage or str(PRESETS[algorithm.preset]["advantage"])
