"""The learning algorithm of a manifest. :mod:`rljob.api.algorithm_presets` fills the fields that are not set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from rljob.api import algorithm_functions as functions
from rljob.api.base import Model, Name
from rljob.api.builtin import summaries
from rljob.api.extensions import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, OBJECTIVES, Extension

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "cispo",
    "sapo",
    "topr",
    "raft_pp",
    "lite_ppo",
    "remax",
    "kimi",
    "ppo",
    "vapo",
    "decoupled_ppo",
    "gigpo",
    "distillation",
]


def _off(value: Any) -> Any:
    return 0.0 if value is None else value


def _named(text: str, registry: functions.Functions) -> str:
    """Return the description of a field that names a function."""
    return " ".join(part for part in (text, summaries(registry), "Or `module:function` of your own package.") if part)


class Teacher(Model):
    """A model that the policy learns from: weight·(log-probability of the teacher − that of the policy before the
    batch) is added to the advantage of each token."""

    model: Name | None = None
    """Entry of `models` with the tokens of the policy. It is kept in the trainer and never changes."""
    pool: Name | None = None
    """Entry of `rollouts` with a model of its own, instead of `model`: its engines compute the log-probabilities of
    each sample when it is scored."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Weight of this teacher beside the rewards and the other teachers."""
    tasks: Annotated[list[Name], Field(min_length=1, max_length=64)] | None = None
    """Names of the tasks that it teaches. Default: all."""

    def teaches(self, task: str) -> bool:
        """Return whether it teaches a task."""
        return self.tasks is None or task in self.tasks


class Algorithm(Model):
    """The learning algorithm. A preset fills the fields that are not set and that its functions read; `rljob explain`
    shows the result. [algorithms.md](algorithms.md) has the formulas and their sources."""

    preset: Preset = "grpo"
    """The published algorithm that the other fields follow unless they are set."""
    advantage: Annotated[
        Annotated[str, Extension(ADVANTAGES)] | None,
        Field(description=_named("Advantage of a token, from rewards.", functions.ADVANTAGES)),
    ] = None
    objective: Annotated[
        Annotated[str, Extension(OBJECTIVES)] | None,
        Field(
            description=_named(
                "Value of a token that training maximises, from log-probabilities and advantages.", functions.OBJECTIVES
            )
        ),
    ] = None
    aggregation: Annotated[
        Annotated[str, Extension(AGGREGATIONS)] | None,
        Field(description=_named("Weights of the tokens of a minibatch in its loss.", functions.AGGREGATIONS)),
    ] = None
    ratio: Literal["behavior", "proximal"] | None = None
    """Denominator of the probability ratio: `behavior` is the engine's log-probability when the token was sampled;
    `proximal` the trainer's at the start of the batch."""
    minibatches: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Optimizer updates per batch; each uses its share of the batch's samples once. With 1 and `ratio: proximal` the
    ratio is 1, so that clips have no effect."""
    group_filter: Literal["none", "nonconstant"] | None = None
    """`nonconstant` rejects and replaces a group whose rewards are all equal (dynamic sampling, arXiv 2503.14476).
    `tasks[].groupFilter` sets it for a task, and bounds of the mean reward."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """ε_low: the ratio is clipped below at 1 − ε_low."""
    clip_high: Annotated[float, Field(gt=0, le=10)] | None = None
    """ε_high: the ratio is clipped above at 1 + ε_high."""
    dual_clip: Annotated[Annotated[float, Field(ge=0, le=100)] | None, BeforeValidator(_off)] = None
    """c > 1: for negative advantages the objective is at least c·A. 0 or null in the manifest: no bound; not set: the
    preset's."""
    gate_positive: Annotated[float, Field(gt=0, le=100)] | None = None
    """τ of `sapo` for positive advantages."""
    gate_negative: Annotated[float, Field(gt=0, le=100)] | None = None
    """τ of `sapo` for other advantages."""
    kernel_power_positive: Annotated[float, Field(ge=0, le=10)] | None = None
    """k of `vespo` for positive advantages: samples whose ratio is below k/λ get less weight."""
    kernel_decay_positive: Annotated[float, Field(ge=0.1, le=10)] | None = None
    """λ of `vespo` for positive advantages: samples whose ratio is above k/λ get less weight."""
    kernel_power_negative: Annotated[float, Field(ge=0, le=10)] | None = None
    """k of `vespo` for other advantages."""
    kernel_decay_negative: Annotated[float, Field(ge=0.1, le=10)] | None = None
    """λ of `vespo` for other advantages."""
    covariance_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the tokens of a batch that `clip_cov` leaves out, or `kl_cov` penalises; at least one token."""
    covariance_low: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """`clip_cov` leaves out tokens whose covariance (A − mean A)·(l_old − mean l_old) is higher."""
    covariance_high: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """`clip_cov` leaves out tokens whose covariance is lower."""
    covariance_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """β of `kl_cov`: weight of the absolute log-ratio of the tokens with the highest covariances."""
    log_ratio_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    """τ of `kimi`: weight of the squared log-ratio."""
    positive_coefficient: Annotated[float, Field(gt=0, le=100)] | None = None
    """μ: weight of the negative log-likelihood of samples with a positive reward, a mean over their tokens, in the loss
    of each minibatch (arXiv 2504.05118). All samples are then computed. Default: none."""
    entropy_coefficient: Annotated[float, Field(ge=-10, le=10)] | None = None
    """Weight of the entropy of the policy, in nats, that is added to the objective of each token. All samples are then
    computed. Default: no bonus."""
    kl_coefficient: Annotated[float, Field(gt=0, le=100)] | None = None
    """β: weight of the KL divergence of the policy from `referenceModel`. All samples are then computed. Default: no KL
    term."""
    kl_in: Literal["loss", "reward"] | None = None
    """`loss`: β·KL is subtracted from the objective of each token, before its correction. `reward`: β·KL under the
    weights before the batch is subtracted from the reward of each token, before advantages are computed. Default:
    loss."""
    kl_estimator: Annotated[
        Annotated[str, Extension(KL_ESTIMATORS)] | None,
        Field(
            description=_named(
                "Estimate of the KL divergence at a token, from its log-probabilities. Default: `k3` in the loss, `k1` "
                "in the reward.",
                functions.KL_ESTIMATORS,
            )
        ),
    ] = None
    kl_target: Annotated[float, Field(gt=0, le=1000)] | None = None
    """KL divergence of a token, in nats, that the coefficient is adapted to: after each step it is multiplied by 1 +
    clip(reference_kl_k3 / klTarget − 1, ±0.2) / klHorizon. `klCoefficient` is that of the first step. Default: the
    coefficient is fixed."""
    kl_horizon: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Steps over which the coefficient adapts; see `klTarget`. Default: 20."""
    reference_model: Name | None = None
    """Entry of `models` from which the KL divergence is measured. It is kept in the trainer and never changes.
    Default: policy, the weights that the run began with."""
    reference_pool: Name | None = None
    """Entry of `rollouts` with a model of its own, from which the KL divergence is measured instead of
    `referenceModel`: its engines compute the log-probabilities of each sample when it is scored. Default: none."""
    teachers: Annotated[list[Teacher], Field(max_length=8)] = []
    """Models from which the policy learns (on-policy distillation). All samples are then computed."""
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    """γ of `reinforce_pp` and `gae` (a token), `turn_return` and `gigpo` (a turn), and of the critic's targets (a
    token)."""
    step_coefficient: Annotated[float, Field(gt=0, le=100)] | None = None
    """ω of `gigpo`: weight of the advantage of a step among the steps of its group from the same state. Default: 1."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """λ of `gae`: 1 for returns minus values, 0 for errors of one token. Default: 1."""
    gae_length_factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """α: λ of `gae` is 1 − 1/(α·L) in a sample of L tokens of the model, not below 0, instead of `gaeLambda`
    (length-adaptive GAE, arXiv 2504.05118)."""
    critic_model: Name | None = None
    """Entry of `models` that the critic starts from; its output layer is replaced by one that gives the value of each
    token. The critic is trained beside the policy, in the trainer's processes. All samples are then computed. Default:
    policy, the weights that the run begins with, if `advantage` is `gae`. Name it for an advantage of your own package
    that needs values."""
    critic_warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """First steps in which only the critic is trained, and the weights of the policy stay. They count in the schedule
    of the policy's learning rate. Default: 0."""
    value_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """λ of the returns that the critic learns. Default: `gaeLambda`; 1 with `gaeLengthFactor` or another advantage
    than `gae`."""
    value_clip: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """c: the critic's loss at a token is the larger one of the squared errors of its value, and of its value clipped to
    ± c around that before the batch. 0: no clip. Default: 0.5."""
    correction: Annotated[
        Annotated[str, Extension(CORRECTIONS)] | None,
        Field(
            description=_named(
                "Weight of a token for the mismatch between engine and trainer, ρ = exp(log-probability of the trainer "
                "at the start of the batch − that of the engine), without gradient. Needs `ratio: proximal`: the ratio "
                "of `behavior` contains ρ.",
                functions.CORRECTIONS,
            )
        ),
    ] = None
    correction_level: Literal["token", "segment", "sequence", "geometric"] | None = None
    """ρ of a token, or of all tokens of its turn (`segment`) or sample (`sequence`): their product; `geometric`: the
    geometric mean over the sample."""
    correction_cap: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Upper bound C of ρ."""
    correction_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lower bound of ρ for `icepop`."""
    mask_geometric_below: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples whose geometric mean of ρ is lower get weight 0."""
    mask_geometric_above: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Samples whose geometric mean of ρ is higher get weight 0."""
    veto_below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Samples with any token whose ρ is lower get weight 0."""
    mask_probability_gap: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Tokens whose probability differs by more between engine and trainer get weight 0."""
    mask_negative_kl: Annotated[float, Field(gt=0, le=100)] | None = None
    """δ: samples get weight 0 where the advantage is negative if the mean over their tokens of the engine's minus the
    current log-probability exceeds δ (off-policy sequence mask, arXiv 2512.02556)."""
    reward_mean: Literal["group", "batch", "running"] | None = None
    """Mean that is subtracted from the rewards of samples before all other changes: over the group, the batch, or all
    batches so far with this one. Default: none."""
    reward_std: Literal["group", "batch", "running"] | None = None
    """Unbiased standard deviation by which rewards are divided after `rewardMean`, over the same rewards; one that is 0
    counts as 1. Default: none."""
    reward_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Rewards of samples are clipped to ± this value before advantages are computed."""
    overlong_buffer: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The last tokens below maxTokens in which the reward falls linearly by up to `overlongPenalty` (soft overlong
    punishment, arXiv 2503.14476). Tokens of all turns count."""
    overlong_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Fall of the reward of an answer of maxTokens tokens; needs `overlongBuffer`. Default: 1."""
    whiten_advantages: bool | None = None
    """Whether advantages get mean 0 and standard deviation 1 over all tokens of the batch."""
    advantage_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Advantages are clipped to ± this value, after whitening and with the term of a teacher."""
    difficulty_above: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Groups whose mean reward is not higher get advantage 0."""
    difficulty_below: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Groups whose mean reward is not lower get advantage 0."""

    truncated_weight: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Weight in the loss of samples whose last answer was cut at a limit of tokens; 0: they are not trained, and count
    in denominators. Default: 1."""
    length_exponent: Annotated[float, Field(ge=-2, le=2)] | None = None
    """α: samples of L tokens have the weight (L / mean L of the batch)^α in the loss. Default: 0."""
    difficulty_exponent: Annotated[float, Field(gt=0, le=10)] | None = None
    """β: samples have the weight (1 − mean reward of the group)^β in the loss, divided by its mean over the batch; mean
    rewards are bounded to 0 and 1. Default: 0."""
    loss_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Factor of the loss of the policy. AdamW is invariant to it except for `optimizer.epsilon` and
    `optimizer.maxGradNorm`. Default: 1."""

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out ``dualClip`` if it is not set: null turns it off."""
        data: dict[str, Any] = handler(self)
        return {name: value for name, value in data.items() if name not in _NULL_IS_OFF or value is not None}


_NULL_IS_OFF = ("dual_clip", "dualClip")
