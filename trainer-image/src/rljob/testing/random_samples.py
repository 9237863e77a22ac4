"""Random samples, on which a function of an algorithm is compared with a reference in NumPy.

Shapes: T the model's tokens of a sample, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.api.errors import ManifestError, sentences
from rljob.trainer.process_group import World

Floats = NDArray[np.float64]
MAX_TOKENS = 16
ONE_RANK = World(0, 1, torch.device("cpu"), cast("Any", None), dp_rank=0, dp_size=1)
"""The only process of a trainer."""
GROUPS = {"a": 3, "b": 1, "c": 4, "d": 2}
"""Group → members. The rewards of d are equal."""
BASELINES = {"a": 0.5, "b": -0.25, "c": 0.0, "d": 0.0}
"""Group → reward of its greedy answer."""


@dataclass(frozen=True)
class ReferenceSample:
    """What a reference knows of one sample. All arrays are float64, with one entry for each of the model's tokens."""

    group: str
    reward: float
    max_tokens: int
    logprobs_T: Floats  # of the policy in training; the gradient is by these
    fixed_T: Floats  # the same numbers, for terms without gradient
    old_T: Floats  # of the trainer before the batch
    behavior_T: Floats  # of the engine
    reference_T: Floats  # of the reference model
    teacher_T: Floats  # of the teacher
    advantages_T: Floats
    rewards_T: Floats  # reward that arrives at each token; their sum is ``reward``
    entropy_T: Floats
    turns_T: NDArray[np.int64]  # number of the turn, from 0
    states: tuple[str, ...]  # of the environment before each turn; equal names are equal states
    values_T: Floats  # of a critic, before the token; exact in float32
    baseline: float  # reward of the greedy answer of its group, which only `remax` has
    keys_T: Floats  # in [0, 1): a random number for each token, which a selection gets
    selected_T: NDArray[np.bool_]  # what the selection of the objective returned; all False without one


def resolved(fields: Mapping[str, Any]) -> Algorithm:
    """Return ``spec.algorithm`` with the values of its preset.

    Raises:
        ManifestError: a field is unknown or has a wrong value.
    """
    try:
        algorithm = Algorithm.model_validate(dict(fields))
    except ValidationError as error:
        raise ManifestError([f"spec.algorithm.{line}" for line in sentences(error, Algorithm)]) from None
    fill(algorithm)
    return algorithm


@contextmanager
def naming(algorithm: Algorithm, field: str) -> Iterator[None]:
    """Begin the message of a ValueError with a field of ``spec.algorithm`` and the function that it names.

    Args:
        algorithm: resolved.
        field: of the function.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"spec.algorithm.{to_camel(field)}: {getattr(algorithm, field)}: {error}") from error


def random_samples(seed: int) -> list[ReferenceSample]:
    """Return ten samples in four groups, of one to three turns and up to MAX_TOKENS tokens.

    Ratios are between 0.1 and 10, some far from 1, so that every clip and cap holds somewhere. Tokens of a sample have
    different advantages, some 0.
    """
    generator = np.random.default_rng(seed)
    return [_sample(group, generator) for group, members in GROUPS.items() for _ in range(members)]


def _sample(group: str, generator: np.random.Generator) -> ReferenceSample:
    length = int(generator.integers(1, MAX_TOKENS))
    logprobs_T = -3 * generator.random(length) - 0.05
    old_T = np.minimum(logprobs_T + 0.4 * generator.standard_normal(length), -0.01)
    behavior_T = np.minimum(old_T + 0.3 * generator.standard_normal(length), -0.01)
    noise_2T = generator.spawn(1)[0].standard_normal((2, length))
    reference_T, teacher_T = np.minimum(logprobs_T + 0.5 * noise_2T, -0.01)
    turns_T = np.unique(np.sort(generator.integers(0, 3, length)), return_inverse=True)[1]
    rewards_T = np.where(np.diff(turns_T, append=len(GROUPS)) > 0, generator.normal(size=length), 0.0)
    if group == "d":
        rewards_T[:] = 0.0
    return ReferenceSample(
        group=group,
        reward=float(rewards_T.sum()),
        max_tokens=MAX_TOKENS,
        logprobs_T=logprobs_T,
        fixed_T=logprobs_T,
        old_T=old_T,
        behavior_T=behavior_T,
        reference_T=reference_T,
        teacher_T=teacher_T,
        advantages_T=generator.normal(size=length) * (generator.random(length) > 0.1),
        rewards_T=rewards_T,
        entropy_T=generator.random(length),
        turns_T=turns_T,
        states=tuple(map(str, generator.spawn(1)[0].integers(0, 2, int(turns_T[-1]) + 1))),
        values_T=generator.spawn(1)[0].normal(size=length).astype(np.float32).astype(np.float64),
        baseline=BASELINES[group],
        keys_T=generator.spawn(1)[0].random(length),
        selected_T=np.zeros(length, np.bool_),
    )


def compare(what: str, found: Floats, expected: Floats, tolerance: float, sample: int, seed: int) -> None:
    """Assert that arrays of the tokens of a sample are equal.

    Args:
        what: name of the values.
        found: of the function.
        expected: of the reference.
        tolerance: relative, and absolute for values below 1.
        sample: number of the sample.
        seed: of :func:`random_samples`.

    Raises:
        AssertionError: with the first token that differs.
    """
    if found.shape != expected.shape:
        raise AssertionError(f"{what} of sample {sample} (seed {seed}): shape {found.shape}, not {expected.shape}")
    wrong_T = ~(np.abs(found - expected) <= tolerance * np.maximum(1.0, np.abs(expected)))
    if wrong_T.any():
        t = int(np.flatnonzero(wrong_T)[0])
        raise AssertionError(
            f"{what} of token {t} of sample {sample} (seed {seed}): {found[t]:.15g}, not {expected[t]:.15g}"
        )


def alone_and_reversed(samples: Sequence[ReferenceSample]) -> list[list[int]]:
    """Return other microbatches of the same samples: all in reversed order, and each alone."""
    return [list(reversed(range(len(samples)))), *([i] for i in range(len(samples)))]
