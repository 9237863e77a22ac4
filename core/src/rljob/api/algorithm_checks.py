"""Refuses algorithms that learn nothing, correct twice, or have fields that no chosen function reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic.alias_generators import to_camel

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import (
    CONDITIONS,
    FOLLOWS_REWARDS,
    NEEDS_STATES,
    NEEDS_VALUES,
    POLICY,
    RATIO_OF_BEHAVIOR,
    READERS,
    ZERO_FOR_ONE_SAMPLE,
    chosen,
    is_read,
    model_pools,
    penalizes_rewards,
    uses_critic,
)
from rljob.api.reward_checks import reward_problems

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec

BOUNDS = (
    ("correction_floor", "correction_cap"),
    ("mask_geometric_below", "mask_geometric_above"),
    ("difficulty_above", "difficulty_below"),
    ("covariance_low", "covariance_high"),
)
"""Fields of a lower and an upper bound."""
POOL_FIELDS = {"reference": ("referencePool", "referenceModel")}
"""Role → the fields of its pool and of its model, if they are not in a list."""


def algorithm_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each meaningless combination."""
    algorithm, samples = spec.algorithm, spec.training.samples_per_prompt
    minibatches = algorithm.minibatches or 1
    if minibatches > spec.training.prompts_per_step * samples:
        yield (
            f"algorithm.minibatches: {minibatches} is more than the {spec.training.prompts_per_step * samples} samples "
            "of a batch; lower it"
        )
    if samples == 1 and chosen(algorithm, "group_filter") == "nonconstant":
        yield (
            "algorithm.groupFilter: with training.samplesPerPrompt 1 every group is constant and would be rejected; "
            "use none, or more samples"
        )
    advantage = chosen(algorithm, "advantage")
    untaught = [task.name for task in spec.tasks if not any(each.teaches(task.name) for each in algorithm.teachers)]
    if samples == 1 and advantage in ZERO_FOR_ONE_SAMPLE and untaught and algorithm.positive_coefficient is None:
        where = f" from task {untaught[0]}, which no teacher teaches" if algorithm.teachers else ""
        yield (
            f"training.samplesPerPrompt: 1 makes every advantage of algorithm.advantage {advantage} 0, so nothing is "
            f"learned{where}; set at least 2, or another algorithm.advantage"
        )
    if advantage in NEEDS_STATES and not any(task.environment or ":" in task.loop for task in spec.tasks):
        yield (
            f"algorithm.advantage: {advantage} compares steps from the same state of an environment, and no task has "
            "states; set tasks[].environment, or a tasks[].loop of your own that calls context.state"
        )
    yield from _mismatch(spec)
    yield from _frozen(spec)
    yield from _pools(spec)
    yield from _critic(spec)
    yield from _teachers(spec)
    yield from _kl(algorithm)
    yield from _unread(algorithm)
    yield from reward_problems(spec)
    for low, high in BOUNDS:
        least, most = chosen(algorithm, low), chosen(algorithm, high)
        if is_read(algorithm, low) and least is not None and most is not None and least >= most:
            yield f"algorithm.{to_camel(low)}: {least:g} is not below {to_camel(high)}, {most:g}; lower it"
    for i, task in enumerate(spec.tasks):
        least, most = task.group_filter.min_mean, task.group_filter.max_mean
        if least is not None and most is not None and least > most:
            yield f"tasks[{i}].groupFilter.minMean: {least:g} is above maxMean, {most:g}; lower it or raise the other"
        if samples == 1 and task.group_filter.kind == "nonconstant":
            yield (
                f"tasks[{i}].groupFilter.kind: with training.samplesPerPrompt 1 every group is constant and would be "
                "rejected; use none, or more samples"
            )
        if algorithm.overlong_buffer is not None and algorithm.overlong_buffer >= task.sampling.max_tokens:
            yield (
                f"algorithm.overlongBuffer: {algorithm.overlong_buffer} is not below sampling.maxTokens of task "
                f"{task.name}, {task.sampling.max_tokens}; lower it"
            )


def _mismatch(spec: RLJobSpec) -> Iterator[str]:
    algorithm, staleness = spec.algorithm, spec.training.max_staleness
    correction = chosen(algorithm, "correction")
    changed = algorithm.ratio == "proximal" and algorithm.preset in RATIO_OF_BEHAVIOR
    if changed and algorithm.correction is None and staleness > 0:
        yield (
            f"algorithm.correction: preset {algorithm.preset} sets none for its ratio behavior, and with ratio "
            "proximal nothing corrects stale samples; set tis, or none if that is intended"
        )
    if correction != "none" and chosen(algorithm, "ratio") == "behavior":
        yield (
            f"algorithm.correction: {correction} with ratio behavior weights the mismatch between engine and trainer "
            "twice; set correction: none, or ratio: proximal"
        )
    ratio_is_one = chosen(algorithm, "ratio") == "proximal" and chosen(algorithm, "minibatches") == 1
    if ratio_is_one and chosen(algorithm, "objective") == "kl_cov":
        yield (
            "algorithm.minibatches: with one update per batch and ratio proximal the ratio is 1, so that the penalty "
            "of kl_cov has no effect; set at least 2, or ratio: behavior"
        )
    if algorithm.dual_clip is not None and 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dualClip: must be more than 1, or 0 for no bound, not {algorithm.dual_clip:g}"


def _frozen(spec: RLJobSpec) -> Iterator[str]:
    """Yield the problems of the models that are not trained."""
    algorithm, known = spec.algorithm, [model.name for model in spec.models]
    named = {
        "referenceModel": algorithm.reference_model,
        "criticModel": algorithm.critic_model,
    } | {f"teachers[{i}].model": teacher.model for i, teacher in enumerate(algorithm.teachers)}
    served = [pool.model for pool in spec.frozen_pools]
    for field, name in named.items():
        if name is not None and name not in known:
            yield (
                f"algorithm.{field}: {name!r} is not defined; there are {', '.join(known)}; name one of them, or add "
                "it to models"
            )
    for i, name in enumerate(known if POLICY in known else ()):
        if name not in (POLICY, *named.values(), *served):
            yield (
                f"models[{i}]: no field uses the model {name}; name it in algorithm.referenceModel, "
                "algorithm.teachers[].model, algorithm.criticModel or rollouts[].model, or remove it"
            )


def _pools(spec: RLJobSpec) -> Iterator[str]:
    """Yield the problems of the frozen pools that compute log-probabilities."""
    algorithm, pools = spec.algorithm, {pool.name: pool for pool in spec.frozen_pools}
    longest = max((pool.max_model_length for pool in spec.policy_pools), default=0)
    if algorithm.reference_pool is not None and algorithm.reference_model is not None:
        yield "algorithm.referencePool: referenceModel names another reference; remove one of them"
    for role, name in model_pools(algorithm).items():
        pool_field, model_field = POOL_FIELDS.get(role, (f"{role}.pool", f"{role}.model"))
        field = f"algorithm.{pool_field}"
        if name not in pools:
            known = f"there are {', '.join(pools)}" if pools else "there is none"
            yield (
                f"{field}: {name!r} is no pool with a model of its own; {known}; name an entry of rollouts whose model "
                "is not policy"
            )
            continue
        if pools[name].engine != "vllm":
            yield f"{field}: engines of pool {name} compute no log-probabilities of given tokens; set engine vllm"
        if pools[name].max_model_length <= longest:
            yield (
                f"{field}: maxModelLength of pool {name}, {pools[name].max_model_length}, is not above that of the "
                f"policy, {longest}: it reads whole samples and writes a token; raise it"
            )
        for i, task in enumerate(spec.tasks):
            if task.sampling.temperature != 1 and role in model_pools(algorithm, task.name):
                yield (
                    f"tasks[{i}].sampling.temperature: the engines of {pool_field} {name} compute log-probabilities at "
                    f"temperature 1, not {task.sampling.temperature:g}; set 1, or {model_field}"
                )


def _critic(spec: RLJobSpec) -> Iterator[str]:
    algorithm, steps = spec.algorithm, spec.training.steps
    if not uses_critic(algorithm):
        if spec.trainer.critic_optimizer is not None:
            yield (
                "trainer.criticOptimizer: the algorithm has no critic; remove it, or set algorithm.advantage to "
                f"{' or '.join(NEEDS_VALUES)}"
            )
        return
    warmup = chosen(algorithm, "critic_warmup_steps")
    if 0 < steps <= warmup:
        yield (
            f"algorithm.criticWarmupSteps: {warmup} is not below training.steps, {steps}, so the policy would not be "
            "trained; lower it, or raise training.steps"
        )
    if algorithm.gae_lambda is not None and algorithm.gae_length_factor is not None:
        yield "algorithm.gaeLambda: gaeLengthFactor replaces it; remove one of them"


def _teachers(spec: RLJobSpec) -> Iterator[str]:
    algorithm, tasks = spec.algorithm, [task.name for task in spec.tasks]
    for i, teacher in enumerate(algorithm.teachers):
        field = f"algorithm.teachers[{i}]"
        if (teacher.model is None) == (teacher.pool is None):
            yield f"{field}.model: set either model or pool of a teacher"
        if teacher.model == POLICY:
            yield (
                f"{field}.model: policy cannot teach itself; name another model, or set klCoefficient to stay near the "
                "first weights"
            )
        own = teacher.tasks or []
        for j, name in enumerate(own):
            if name not in tasks:
                yield f"{field}.tasks[{j}]: {name!r} is not defined; there are {', '.join(tasks)}; name one of tasks"
            elif name in own[:j]:
                yield f"{field}.tasks[{j}]: {name!r} is named twice; name it once"
        for j, other in enumerate(algorithm.teachers[:i]):
            same = (other.model, other.pool) == (teacher.model, teacher.pool)
            if same and any(teacher.teaches(task) and other.teaches(task) for task in tasks):
                yield f"{field}: teachers[{j}] is the same model and teaches the same task; remove one of them"
    yield from _taught(algorithm, tasks)


def _taught(algorithm: Algorithm, tasks: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the algorithm with its teachers, or without one."""
    objective = chosen(algorithm, "objective")
    if algorithm.teachers and objective in FOLLOWS_REWARDS:
        yield (
            f"algorithm.objective: {objective} distinguishes samples by rewards, which a teacher does not change; "
            "set ppo_clip or another one"
        )
    if chosen(algorithm, "advantage") == "zero":
        for task in tasks:
            if not any(teacher.teaches(task) for teacher in algorithm.teachers):
                yield (
                    f"algorithm.teachers: with advantage zero nothing is learned from task {task} without a teacher; "
                    "add one, or the task to tasks of a teacher, or set another advantage"
                )


def _kl(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.kl_coefficient is None:
        return
    estimator = chosen(algorithm, "kl_estimator")
    if penalizes_rewards(algorithm):
        if chosen(algorithm, "advantage") == "zero":
            yield "algorithm.klIn: with advantage zero rewards are not used; set loss, or another advantage"
        if estimator == "k3_unbiased":
            yield "algorithm.klEstimator: in the reward, without a gradient, k3_unbiased is k3; set k1, or klIn: loss"
    elif estimator == "k1":
        yield (
            "algorithm.klEstimator: the expected gradient of k1 in the loss is 0, so it has no effect; set k2, k3 or "
            "k3_unbiased, or klIn: reward"
        )


def _unread(algorithm: Algorithm) -> Iterator[str]:
    """Yield one sentence for each field that the user set and no chosen function reads."""
    for field, condition in CONDITIONS.items():
        if getattr(algorithm, field) is not None and not is_read(algorithm, field):
            name = to_camel(field)
            missing = f"without {to_camel(condition)}; set it"
            if condition == "critic_model":
                missing = f"without a critic; set advantage to {' or '.join(NEEDS_VALUES)}"
            yield f"algorithm.{name}: has no effect {missing}, or remove {name}"
    for field, (function, readers) in READERS.items():
        value = getattr(algorithm, field)
        if value is not None and not (field == "dual_clip" and value == 0) and not is_read(algorithm, field):
            yield (
                f"algorithm.{to_camel(field)}: the {function} {chosen(algorithm, function)} does not read it; remove "
                f"it, or set {function} to {' or '.join(readers)}"
            )
