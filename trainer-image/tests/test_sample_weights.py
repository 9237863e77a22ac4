"""Weights of samples by length, difficulty and truncation: against NumPy, and in the gradient of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from training_steps import apply, gradients_of

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.protocol.batch_samples import BatchSample
from rljob.trainer.algorithms.sample_weights import sample_weights
from rljob.trainer.backends.fsdp.backend import FsdpBackend

REWARDS, LENGTHS, GROUPS = [1.0, 0.0, 1.0, 1.0, -2.0, 0.5], [3, 9, 1, 0, 4, 7], "aabbcc"


def weights(rewards: list[float] = REWARDS, **fields: Any) -> list[float]:
    samples = [
        BatchSample(f"{i}", group, reward, 2, length, 2 + length, 0, 1.0, 10, truncated=length == 9)
        for i, (reward, length, group) in enumerate(zip(rewards, LENGTHS, GROUPS, strict=True))
    ]
    algorithm = Algorithm.model_validate(fields)
    fill(algorithm)
    return sample_weights(samples, algorithm).tolist()


def test_without_fields_all_weights_are_one():
    assert weights() == [1.0] * 6


def test_a_truncated_sample_has_its_weight():
    assert weights(truncatedWeight=0.25) == [1, 0.25, 1, 1, 1, 1]
    assert weights(truncatedWeight=0) == [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("exponent", [1, -0.5])
def test_weights_by_length_are_powers_of_the_length_over_its_mean(exponent):
    expected = [(length / 4) ** exponent if length else 1.0 for length in LENGTHS]
    np.testing.assert_allclose(weights(lengthExponent=exponent), expected, rtol=1e-12)


def test_weights_by_difficulty_are_powers_of_the_missing_reward_over_their_mean():
    hard = np.array([0.5, 0.5, 0.0, 0.0, 1.0, 1.0]) ** 2  # the mean of c is below 0
    np.testing.assert_allclose(weights(difficultyExponent=2), hard / hard.mean(), rtol=1e-12)
    together = weights(difficultyExponent=2, truncatedWeight=0.5)
    np.testing.assert_allclose(together, hard / hard.mean() * np.array([1, 0.5, 1, 1, 1, 1]), rtol=1e-12)


def test_if_all_groups_are_solved_their_weights_are_one():
    assert weights([1.0] * 6, difficultyExponent=2) == [1.0] * 6


def gradients(world, job, batch, **fields: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient of a batch, whose second sample is truncated, before clipping, and the metrics."""
    made = job(algorithm=fields, trainer={"optimizer": {"learningRate": 1e-3, "maxGradNorm": 1e9}})
    backend = FsdpBackend(Path(made.spec.models[0].source), made.spec.trainer, world)
    found = gradients_of(backend)
    train, shard = batch()
    train.samples[1] = msgspec.structs.replace(train.samples[1], truncated=True)
    return found, apply(world, backend, made.spec.algorithm, train, shard, 10_000).metrics


def test_a_weight_multiplies_the_gradient_of_its_sample_and_a_scale_that_of_all(world, job, batch):
    plain, metrics = gradients(world, job, batch)
    without, _ = gradients(world, job, batch, truncatedWeight=0)
    halved, _ = gradients(world, job, batch, truncatedWeight=0.5)
    scaled, of_scaled = gradients(world, job, batch, lossScale=3)
    assert any((plain[name] - without[name]).abs().max() > 1e-3 for name in plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(halved[name], (gradient + without[name]) / 2, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scaled[name], 3 * gradient, rtol=1e-5, atol=1e-6)
    assert of_scaled["loss"] == pytest.approx(3 * metrics["loss"], rel=1e-5)
