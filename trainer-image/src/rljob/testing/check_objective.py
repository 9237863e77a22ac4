"""Compares an objective with a reference in NumPy: values, and the gradient by finite differences of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.testing.random_samples import (
    ONE_RANK,
    Floats,
    ReferenceSample,
    alone_and_reversed,
    compare,
    naming,
    random_samples,
    resolved,
)
from rljob.trainer.algorithms.needs import load_function, needs
from rljob.trainer.algorithms.objectives.base import (
    ObjectiveFunction,
    ObjectiveInputs,
    checked_objective,
    is_zero_without_advantage,
)
from rljob.trainer.algorithms.token_selection import SelectionInputs, selection_of
from rljob.trainer.select_tokens import log_ratio_before, selected_tokens

ObjectiveReference: TypeAlias = Callable[[ReferenceSample, Algorithm], Floats]
"""(sample, resolved spec.algorithm) → value of each of the model's tokens (T,)."""
VALUE, GRADIENT, SAME = 1e-10, 1e-6, 1e-12
STEP = 1e-5  # of central differences: their error is about 1e-10


def check_objective(reference: ObjectiveReference, fields: Mapping[str, Any], seeds: int = 5) -> None:
    """Check the objective of an algorithm in float64 on random samples of several turns.

    The value of each token equals that of the reference within 1e-10. The gradient of the sum over a sample's tokens
    equals the central differences of the reference within 1e-6. Both stay the same if the samples are in another order,
    padded, or alone. An objective that is declared ``zero_without_advantage`` has value and gradient 0 there. A
    selection that it declares is called once for all samples of a batch, and selects the same tokens in another order.

    Args:
        reference: it varies with ``logprobs_T`` alone; terms without gradient use ``fixed_T``. It reads the declared
            selection as ``selected_T``.
        fields: ``spec.algorithm``, as in a manifest; ``objective`` names the function.
        seeds: number of random batches.

    Raises:
        AssertionError: the objective differs; the message names the first token.
        ValueError: the fields are wrong, or the objective returns another shape or type.
    """
    algorithm = resolved(fields)
    function: ObjectiveFunction = load_function(algorithm, "objective")
    for seed in range(seeds):
        samples = selected_samples(function, algorithm, random_samples(seed))
        found = _evaluate(function, algorithm, samples)
        for i, (values_T, gradient_T) in enumerate(found):
            expected_T = np.asarray(reference(samples[i], algorithm), np.float64)
            compare("the value", values_T, expected_T, VALUE, i, seed)
            compare("the derivative", gradient_T, _differences(reference, samples[i], algorithm), GRADIENT, i, seed)
        for indices in alone_and_reversed(samples):
            part = [samples[i] for i in indices]
            if len(part) == len(samples):
                part = selected_samples(function, algorithm, part)
            others = _evaluate(function, algorithm, part, padding=3)
            for i, (values_T, gradient_T) in zip(indices, others, strict=True):
                compare("in another microbatch, the value", values_T, found[i][0], SAME, i, seed)
                compare("in another microbatch, the derivative", gradient_T, found[i][1], SAME, i, seed)
        if is_zero_without_advantage(function):
            _check_zeros(function, algorithm, samples, seed)


def selected_samples(
    function: ObjectiveFunction, algorithm: Algorithm, samples: Sequence[ReferenceSample]
) -> list[ReferenceSample]:
    """Return the samples of a batch with the tokens that the declared selection of an objective selects, if any.

    Raises:
        ValueError: the selection returned an array of another shape or type.
    """
    selection = selection_of(function)
    if selection is None:
        return list(samples)
    lengths = [len(sample.turns_T) for sample in samples]
    old_T = np.concatenate([sample.old_T for sample in samples])
    behavior_T = np.concatenate([sample.behavior_T for sample in samples])
    inputs = SelectionInputs(
        samples_T=np.repeat(np.arange(len(samples)), lengths),
        samples=len(samples),
        advantages_T=np.concatenate([sample.advantages_T for sample in samples]),
        logprobs_T=old_T,
        log_ratio_T=log_ratio_before(old_T, behavior_T, algorithm),
        keys_T=np.concatenate([sample.keys_T for sample in samples]),
        world=ONE_RANK,
        algorithm=algorithm,
    )
    parts = np.split(selected_tokens(selection, inputs), np.cumsum(lengths)[:-1])
    return [replace(sample, selected_T=part_T) for sample, part_T in zip(samples, parts, strict=True)]


def _check_zeros(
    function: ObjectiveFunction, algorithm: Algorithm, samples: Sequence[ReferenceSample], seed: int
) -> None:
    without = [replace(sample, advantages_T=np.zeros_like(sample.advantages_T)) for sample in samples]
    without = selected_samples(function, algorithm, without)
    for i, arrays in enumerate(_evaluate(function, algorithm, without)):
        for name, values_T in zip(("value", "derivative"), arrays, strict=True):
            what = f"without an advantage, which zero_without_advantage declares to give 0, the {name}"
            compare(what, values_T, np.zeros_like(values_T), 0.0, i, seed)


def _differences(reference: ObjectiveReference, sample: ReferenceSample, algorithm: Algorithm) -> Floats:
    """Return the derivative of the sum of the reference's values by each log-probability (T,)."""
    slopes_T = np.empty(len(sample.logprobs_T))
    for t in range(len(slopes_T)):
        ends = []
        for sign in (1, -1):
            moved_T = sample.logprobs_T.copy()
            moved_T[t] += sign * STEP
            ends.append(float(np.sum(reference(replace(sample, logprobs_T=moved_T), algorithm))))
        slopes_T[t] = (ends[0] - ends[1]) / (2 * STEP)
    return slopes_T


def _evaluate(
    function: ObjectiveFunction, algorithm: Algorithm, samples: Sequence[ReferenceSample], padding: int = 0
) -> list[tuple[Floats, Floats]]:
    """Return value and derivative of each of the model's tokens of each sample, from one microbatch.

    A turn starts after one token of an observation, and every second row one position later.
    """
    places = [i % 2 + np.arange(len(sample.turns_T)) + sample.turns_T for i, sample in enumerate(samples)]
    shape = len(samples), 1 + padding + max(int(own.max()) for own in places)

    def rows(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        values_BK = np.zeros(shape)
        for b, own in enumerate(places):
            values_BK[b, own] = getattr(samples[b], name)
        return torch.from_numpy(values_BK).to(dtype)

    mask_BK = torch.zeros(shape, dtype=torch.bool)
    for b, own in enumerate(places):
        mask_BK[b, own] = True
    logprobs_BK = rows("logprobs_T").requires_grad_()
    needed = needs(algorithm)
    returned = function(
        ObjectiveInputs(
            logprobs_BK=logprobs_BK.where(mask_BK, 0.0),
            old=rows("old_T") if needed.old else None,
            behavior_BK=rows("behavior_T"),
            advantages_BK=rows("advantages_T"),
            mask_BK=mask_BK,
            rewards_B=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
            turns_BK=rows("turns_T", torch.int64),
            turns=1 + max(int(sample.turns_T.max()) for sample in samples),
            algorithm=algorithm,
            entropy_BK=rows("entropy_T") if needed.entropy else None,
            reference=rows("reference_T") if needed.reference else None,
            selected=rows("selected_T", torch.bool) if selection_of(function) else None,
        )
    )
    with naming(algorithm, "objective"):
        objective = checked_objective(returned, mask_BK)
    objective.values_BK.where(mask_BK, 0.0).sum().backward()
    assert logprobs_BK.grad is not None
    values, gradients = objective.values_BK.detach().numpy(), logprobs_BK.grad.numpy()
    return [(values[b, own], gradients[b, own]) for b, own in enumerate(places)]
