"""Losses, gradients and updates in float64 equal recorded numbers: a refactoring must keep them.

``golden/steps.json`` holds for each case the metrics and advantages of two steps, and one number for each gradient of
each optimizer update and for each final parameter. All samples are computed, also those without an advantage.
The gradient is not clipped: its norm is computed in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import on_ranks
from safetensors.numpy import save_file
from training_steps import apply, whole_gradients

from rljob.api.models import RLJob
from rljob.trainer.backends.fsdp import backend as backend_module
from rljob.trainer.backends.fsdp import read_weights
from rljob.trainer.process_group import World

GOLDEN = Path(__file__).parent / "golden" / "steps.json"
TOLERANCE = 1e-12
METRICS = ("loss", "learning_rate", "clip_fraction", "ratio_mean", "ratio_max", "kl_k3", "ess", "training_log_ppl")
UNCORRECTED = {"ratio": "behavior", "correction": "none"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo", **UNCORRECTED, "dualClip": None},
    "dr_grpo": {"preset": "dr_grpo", **UNCORRECTED, "dualClip": None},
    "proximal": {"correction": "none", "ratio": "proximal", "minibatches": 4, "clipHigh": 0.28, "dualClip": 1.5},
    "behavior": {"preset": "dr_grpo", **UNCORRECTED, "minibatches": 4, "dualClip": 1.1},
}
"""Explicit values: the numbers do not depend on what presets fill."""
TRAINER = {
    "microbatchTokens": 60,
    "optimizer": {"learningRate": 1e-2, "maxGradNorm": 1e9, "weightDecay": 0.1, "epsilon": 1e-3, "warmupSteps": 3},
}


@pytest.fixture
def seeded_model(tmp_path: Path, model_directory: Path) -> Path:
    """The tiny model with weights from numpy, which do not depend on torch's or transformers' initialisation."""
    from transformers import AutoModelForCausalLM

    generator = np.random.default_rng(3)
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    weights = {
        name: (0.2 * generator.standard_normal(p.shape) + ("norm" in name)).astype(np.float32)
        for name, p in sorted(model.named_parameters())
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model_directory / "config.json").read_bytes())
    return tmp_path


def projection(tensor: torch.Tensor) -> float:
    flat = tensor.flatten()
    return float(flat @ torch.cos(torch.arange(len(flat), dtype=flat.dtype)))


def measure(world: World, source: Path, job: RLJob, steps: list[Any]) -> dict[str, Any]:
    """Train the float64 model on this rank's shards; return what ``steps.json`` holds of a case."""

    def in_float64(path: Path) -> Any:
        model, conversions = read_weights.meta_model(path)
        return model.double(), conversions

    with mock.patch.object(backend_module, "meta_model", in_float64):
        backend = backend_module.FsdpBackend(source, job.spec.trainer, world)
    gradients: list[list[float]] = []
    update = backend.update

    def observed(step: int) -> Any:
        gradients.append([projection(gradient) for gradient in whole_gradients(backend).values()])
        return update(step)

    backend.update = observed
    metrics = []
    for train, tokens in steps:
        result = apply(world, backend, job.spec.algorithm, train, tokens, job.spec.trainer.microbatch_tokens, True)
        metrics.append([result.metrics[name] for name in METRICS] + result.advantages_N.tolist())
    parameters = [projection(tensor) for _, tensor in backend.named_tensors(torch.float64)]
    return {"metrics": metrics, "gradients": gradients, "parameters": parameters}


def measure_all(world: World, source: Path, jobs: dict[str, RLJob], steps: list[Any]) -> dict[str, Any]:
    return {name: measure(world, source, job, steps) for name, job in jobs.items()}


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value)
    elif isinstance(expected[0], float):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_in_float64_equal_the_recorded_numbers(seeded_model, job, batch, ranks):
    jobs = {name: job(algorithm=algorithm, trainer=TRAINER) for name, algorithm in CASES.items()}
    steps = [batch(seed, step=seed) for seed in range(2)]
    for found in on_ranks(ranks, measure_all, seeded_model, jobs, steps):
        close(found, json.loads(GOLDEN.read_text()))
