"""Several teachers: the term of each token against NumPy, its gradient, and which samples they teach."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from training_steps import apply, gradients_of, noisy_copy

from rljob.api.algorithm import Algorithm
from rljob.protocol.environment import ComponentEnvironment
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Row
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.frozen_models import load_models, read_sources
from rljob.trainer.kl_terms import teacher_terms
from rljob.trainer.scores import Scores, mean_of_teachers

TEACHERS = [
    {"model": "other", "weight": 0.3},
    {"pool": "big", "weight": 1.7, "tasks": ["sums"]},
    {"pool": "small", "weight": 0.6, "tasks": ["more", "sums"]},
]
TASKS = ("sums", "more", "none")


def terms(teachers: list[dict[str, Any]], logprobs: list[list[Any]], old: list[Any], tasks: tuple[str, ...]):
    """Return the terms of one sample for each task; ``logprobs``: of each teacher, of each sample (L,)."""
    algorithm = Algorithm.model_validate({"teachers": teachers})
    roles = [f"teachers[{i}]" for i in range(len(teachers))]
    rows = {
        i: Row(
            np.arange(len(each)),
            np.zeros(len(each), np.float32),
            np.ones(len(each), np.bool_),
            np.zeros(len(each)),
            models={
                role: given[i]
                for role, teacher, given in zip(roles, teachers, logprobs, strict=True)
                if "pool" in teacher
            },
        )
        for i, each in enumerate(old)
    }
    batch: Any = SimpleNamespace(
        rows=rows, train=SimpleNamespace(samples=[SimpleNamespace(task=task, sample=task) for task in tasks])
    )
    in_trainer = {
        role: dict(enumerate(given))
        for role, teacher, given in zip(roles, teachers, logprobs, strict=True)
        if "model" in teacher
    }
    scores = Scores(batch, [], {}, None, mean_of_teachers(batch, algorithm, in_trainer))
    scores.__dict__["old_by_row"] = lambda: dict(enumerate(old))
    return teacher_terms(scores, algorithm)


def test_the_term_of_a_token_is_the_weighted_sum_over_the_teachers_of_its_task():
    generator = np.random.default_rng(0)
    old = [-generator.random(length).astype(np.float32) for length in (3, 5, 4)]
    logprobs = [[-3 * generator.random(len(each)).astype(np.float32) for each in old] for _ in TEACHERS]
    first, second, third = (
        [given.astype(np.float64) - each for given, each in zip(of_teacher, old, strict=True)]
        for of_teacher in logprobs
    )
    found = terms([{**TEACHERS[0], "tasks": ["sums", "more"]}, *TEACHERS[1:]], logprobs, old, TASKS)
    np.testing.assert_allclose(found[0], 0.3 * first[0] + 1.7 * second[0] + 0.6 * third[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found[1], 0.3 * first[1] + 0.6 * third[1], rtol=1e-12, atol=1e-14)
    assert (found[2] == 0).all(), "no teacher teaches it"


def test_the_advantage_is_the_gradient_of_the_weighted_divergences_and_of_that_from_their_geometric_mean():
    """Exact expectation over a policy of three tokens, in float64; the gradient by central differences."""
    logits, weights = np.array([0.3, -0.5, 0.9]), (0.4, 1.1)
    teachers = [np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.1, 0.3])]

    def policy(logits: Any) -> Any:
        return np.exp(logits) / np.exp(logits).sum()

    def divergences(logits: Any) -> float:
        pi = policy(logits)
        return sum(w * (pi * np.log(pi / p)).sum() for w, p in zip(weights, teachers, strict=True))

    def from_mean(logits: Any) -> float:
        pi, mean = policy(logits), np.exp(sum(w * np.log(p) for w, p in zip(weights, teachers, strict=True)) / 1.5)
        return 1.5 * float((pi * np.log(pi * mean.sum() / mean)).sum())

    pi = policy(logits)
    given = [{"pool": "a", "weight": weights[0]}, {"pool": "b", "weight": weights[1]}]
    advantage_V = terms(given, [[np.log(p)] for p in teachers], [np.log(pi)], ("sums",))[0]
    gradient_V = pi * (advantage_V - (pi * advantage_V).sum())  # Σ π·A·∇ log π
    for divergence in (divergences, from_mean):
        steps = 1e-5 * np.eye(3)
        expected = np.array([(divergence(logits + step) - divergence(logits - step)) / 2e-5 for step in steps])
        np.testing.assert_allclose(gradient_V, -expected, rtol=1e-7, atol=1e-9)


@pytest.fixture
def step(world, job, batch, model_directory, tmp_path):
    """Function that applies a batch of three tasks with some of TEACHERS; returns its gradient and metrics."""
    other = noisy_copy(model_directory, tmp_path / "other")
    models = [{"name": "policy", "source": str(model_directory)}, {"name": "other", "source": str(other)}]
    pools = [{"name": name, "model": "other", "maxModelLength": 513} for name in ("big", "small")]
    train, shard = batch()
    generator = np.random.default_rng(1)
    tasks = [{"name": name, "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"} for name in TASKS]
    train.samples[:] = [msgspec.structs.replace(sample, task=TASKS[i % 3]) for i, sample in enumerate(train.samples)]

    def apply_with(
        teachers: list[dict[str, Any]], missing: str = ""
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        made = job(
            algorithm={"teachers": teachers},
            trainer={"optimizer": {"learningRate": 1e-3, "maxGradNorm": 1e9}},
            models=models,
            rollouts=[{"name": "main", "maxModelLength": 512}, *pools],
            tasks=tasks,
        )
        backend = FsdpBackend(model_directory, made.spec.trainer, world)
        sources = read_sources(ComponentEnvironment(made, Path("/nowhere"), "", "", "", "", ""))
        frozen = load_models(made.spec.algorithm, sources, model_directory, backend)
        gradients = gradients_of(backend)
        found = []
        for i, tokens in enumerate(shard):
            known = {
                f"teachers[{j}]": of_pools[teacher["pool"]][i]
                for j, teacher in enumerate(teachers)
                if "pool" in teacher and TASKS[i % 3] in teacher["tasks"] and missing != tokens.sample
            }
            found.append(msgspec.structs.replace(tokens, models=known))
        metrics = apply(world, backend, made.spec.algorithm, train, found, 20, True, frozen=frozen).metrics
        return gradients, metrics

    of_pools = {
        name: [(-4 * generator.random(sum(tokens.loss_mask))).astype("<f4").tobytes() for tokens in shard]
        for name in ("big", "small")
    }
    return apply_with


def test_gradients_of_teachers_in_the_trainer_and_in_pools_add_up(step):
    whole, metrics = step(TEACHERS)
    none, of_none = step([])
    parts = [step([teacher])[0] for teacher in TEACHERS]
    assert any((whole[name] - none[name]).abs().max() > 1e-2 for name in whole)
    for name, gradient in whole.items():
        expected = none[name] + sum(part[name] - none[name] for part in parts)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert metrics["teacher_kl_k3"] > 0.01 and "teacher_kl_k1" not in of_none


def test_the_metrics_count_only_tokens_that_have_a_teacher(step):
    _, alone = step([TEACHERS[2] | {"tasks": ["sums"]}])
    _, same = step([TEACHERS[2] | {"tasks": ["sums"]}, TEACHERS[2] | {"tasks": ["more"]}])
    _, of_both = step([TEACHERS[2]])
    assert same["teacher_kl_k1"] == of_both["teacher_kl_k1"] != alone["teacher_kl_k1"]
    assert alone["teacher_kl_k3"] > 0.5, "not diluted by the tokens of other tasks"


def test_a_sample_without_the_log_probabilities_of_its_teacher_ends_the_run(step):
    with pytest.raises(UnrecoverableError, match=r"sample g1\.1 has no log-probabilities of the model teachers\[2\]"):
        step(TEACHERS, missing="g1.1")
