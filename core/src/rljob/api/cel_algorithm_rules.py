"""CEL rules of the learning algorithm. :mod:`rljob.api.algorithm_checks` has all rules, in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rljob.api.algorithm_presets import NEEDS_STATES, PRESETS, RATIO_OF_BEHAVIOR, ZERO_FOR_ONE_SAMPLE
from rljob.api.cel_rule import CelRule
from rljob.api.extensions import BUILTIN_LOOPS
from rljob.api.reward_checks import WHITENED


def algorithm_rules() -> Iterator[CelRule]:
    """Yield the rules that depend on one or two fields."""
    yield from _group_rules()
    yield from _advantage_rules()
    yield from _model_rules()
    yield from _mismatch_rules()


def _group_rules() -> Iterator[CelRule]:
    """Yield the rules of batches and group filters."""
    yield CelRule(
        "spec",
        "!has(self.algorithm.minibatches) || "
        "self.algorithm.minibatches <= self.training.promptsPerStep * self.training.samplesPerPrompt",
        "is more than the samples of a batch; lower it",
        ".algorithm.minibatches",
    )
    filtered = _chosen("groupFilter", {name: fields.get("group_filter", "none") for name, fields in PRESETS.items()})
    yield CelRule(
        "spec",
        f"self.training.samplesPerPrompt > 1 || !({filtered(['nonconstant'])})",
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
        ".algorithm.groupFilter",
    )
    yield CelRule(
        "spec",
        "self.training.samplesPerPrompt > 1 || self.tasks.all(task, !has(task.groupFilter.kind) || "
        "task.groupFilter.kind != 'nonconstant')",
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
        ".tasks",
    )
    yield CelRule(
        "spec.tasks[].groupFilter",
        "!has(self.minMean) || !has(self.maxMean) || self.minMean <= self.maxMean",
        "is above maxMean; lower it or raise the other",
        ".minMean",
    )


def _advantage_rules() -> Iterator[CelRule]:
    """Yield the rules of advantages, and of rewards that they read."""
    advantage = _chosen("advantage", {name: fields["advantage"] for name, fields in PRESETS.items()})
    yield CelRule(
        "spec",
        f"self.training.samplesPerPrompt > 1 || !({advantage([*ZERO_FOR_ONE_SAMPLE])}) || "
        "self.algorithm.teachers.size() > 0 || has(self.algorithm.positiveCoefficient)",
        "1 makes every advantage 0 with this algorithm, so nothing is learned; set at least 2, or another "
        "algorithm.advantage",
        ".training.samplesPerPrompt",
    )
    yield CelRule(
        "spec",
        f"!({advantage([*NEEDS_STATES])}) || "
        f"self.tasks.exists(task, has(task.environment) || (has(task.loop) && !(task.loop in {[*BUILTIN_LOOPS]})))",
        "it compares steps from the same state of an environment, and no task has states; set tasks[].environment, or "
        "a tasks[].loop of your own that calls context.state",
        ".algorithm.advantage",
    )
    yield CelRule(
        "spec",
        f"!has(self.algorithm.whitenAdvantages) || !self.algorithm.whitenAdvantages || !({advantage([*WHITENED])})",
        "the advantage is whitened already, so it has no effect; remove it",
        ".algorithm.whitenAdvantages",
    )
    for bound in ("difficultyAbove", "difficultyBelow", "difficultyExponent"):
        for field in ("rewardMean", "rewardStd"):
            yield CelRule(
                "spec.algorithm",
                f"!has(self.{field}) || !has(self.{bound})",
                f"it reads the mean reward of a group, which {field} changes; remove one of them",
                f".{bound}",
            )


def _model_rules() -> Iterator[CelRule]:
    """Yield the rules of a reference and teachers."""
    yield CelRule(
        "spec.algorithm",
        "!has(self.referencePool) || !has(self.referenceModel)",
        "referenceModel names another reference; remove one of them",
        ".referencePool",
    )
    yield CelRule(
        "spec.algorithm.teachers[]",
        "has(self.model) != has(self.pool)",
        "set either model or pool of a teacher",
        ".model",
    )
    pools = {
        "referencePool": "has(self.algorithm.referencePool)",
        "a teacher": "self.algorithm.teachers.exists(teacher, has(teacher.pool) && !has(teacher.tasks))",
    }
    for pool, is_set in pools.items():
        yield CelRule(
            "spec",
            f"!{is_set} || self.tasks.all(task, !has(task.sampling) || "
            "!has(task.sampling.temperature) || task.sampling.temperature == 1.0)",
            f"the engines of {pool} compute log-probabilities at temperature 1; set 1, or a model in the trainer",
            ".tasks",
        )


def _mismatch_rules() -> Iterator[CelRule]:
    """Yield the rules of corrections and clips."""
    uncorrected = _chosen("correction", {name: fields["correction"] for name, fields in PRESETS.items()})
    behavior = _chosen("ratio", {name: fields["ratio"] for name, fields in PRESETS.items()})
    yield CelRule(
        "spec",
        f"!({behavior(['behavior'])}) || ({uncorrected(['none'])})",
        "with ratio behavior the mismatch between engine and trainer is weighted twice; set correction: none, or "
        "ratio: proximal",
        ".algorithm.correction",
    )
    yield CelRule(
        "spec",
        "!has(self.algorithm.ratio) || self.algorithm.ratio != 'proximal' || has(self.algorithm.correction) || "
        f"!(self.algorithm.preset in {[*RATIO_OF_BEHAVIOR]}) || self.training.maxStaleness == 0",
        "the preset sets none for its ratio behavior, and with ratio proximal nothing corrects stale samples; set tis, "
        "or none if that is intended",
        ".algorithm.correction",
    )
    yield CelRule(
        "spec.algorithm",
        "!has(self.dualClip) || self.dualClip == 0.0 || self.dualClip > 1.0",
        "must be more than 1, or 0 for no bound",
        ".dualClip",
    )


def _chosen(field: str, of_presets: Mapping[str, str]) -> Callable[[list[str]], str]:
    """Return a function from values to the expression: the user's own value, or that of the preset, is one of them."""

    def is_one_of(values: list[str]) -> str:
        presets = [name for name, value in of_presets.items() if value in values]
        own = f"self.algorithm.{field}"
        return f"has({own}) ? {own} in {values} : self.algorithm.preset in {presets}"

    return is_one_of
