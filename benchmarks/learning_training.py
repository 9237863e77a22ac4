"""Trains the quickstart's model in this process: the trainer's own step, with answers of an in-process sampler.

Each batch is sampled before the update of the batch before it, so every batch but the first has staleness 1, and ρ
differs from 1. With MINIBATCHES updates a batch the probability ratio differs from 1 too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_sampler import Answers, Sampler, quickstart
from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import POLICY, fill, frozen_models, needs_greedy
from rljob.api.models import LogprobTolerance
from rljob.api.roles import Trainer
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.example_model import build
from rljob.trainer.frozen_models import load_critic, load_models
from rljob.trainer.process_group import World, join_world, leave_world, make_deterministic, set_threads
from rljob.trainer.step import apply_batch, plan_step
from rljob.trainer.step_checks import StepChecks

STEPS, MINIBATCHES, PROBLEMS = 40, 4, 512
SHOWN = ("clip_fraction", "ratio_distance", "correction_mean", "masked_fraction", "entropy", "grad_norm")
SHOWN += ("value_loss", "explained_variance", "value_clip_fraction")
"""Metrics of the trainer whose mean over the steps is a figure."""


def settings() -> Trainer:
    """Return the trainer of the quickstart, whose learning rate all algorithms have."""
    trainer = quickstart().trainer
    trainer.dtype = "float32"
    trainer.critic_optimizer = trainer.optimizer
    return trainer


def make_model(directory: Path, seed: int) -> Path:
    """Make the quickstart's model once; return its directory."""
    model = directory / f"model-{seed}"
    if not model.exists():
        set_threads()
        build(model, quickstart().tasks[0], seed)
    return model


class Learner:
    """A policy, its optimizer and its sampler.

    Args:
        model: directory of the model.
        algorithm: resolved.
        seed: of problems and sampling.
    """

    def __init__(self, model: Path, algorithm: Algorithm, seed: int) -> None:
        self._world, self._model = _join(), model
        self.backend = FsdpBackend(model, settings(), self._world)
        self.use(algorithm)
        self.sampler = Sampler(model, seed)
        self._checks = StepChecks(LogprobTolerance(1e-4, 1e-3, "the mean", "the largest"), 1e-3, settings=settings())

    def use(self, algorithm: Algorithm) -> None:
        """Train by ``algorithm`` from now on, with a new critic if it has one."""
        self.algorithm = algorithm
        sources = {name: self._model for name in (POLICY, *frozen_models(algorithm).values())}
        self._frozen = load_models(algorithm, sources, self._model, self.backend)
        self._critic = load_critic(algorithm, settings(), sources, self._model, self.backend, None)

    def sample(self, version: int) -> Answers:
        """Return a batch of the current weights, which are of ``version``."""
        filtered, greedy = self.algorithm.group_filter == "nonconstant", needs_greedy(self.algorithm)
        return self.sampler.batch(self.backend.model, version, filtered, greedy)

    def accuracy(self) -> float:
        """Return the accuracy on held-out problems."""
        return self.sampler.accuracy(self.backend.model, PROBLEMS)

    def apply(self, answers: Answers, step: int) -> dict[str, float]:
        """Apply a batch; return the metrics. At step 0 sampler and trainer must compute the same log-probabilities."""
        train = Train(1, step, answers.samples, check_initial_logprobs=step == 0)
        budget = settings().microbatch_tokens
        assert budget is not None
        plan = plan_step(train, self.algorithm, self._world, budget)
        rows = {i: answers.rows[i] for i in plan.indices}
        return apply_batch(
            plan, rows, self.algorithm, self.backend, self._world, self._checks, self._frozen, self._critic
        ).metrics

    def close(self) -> None:
        """Leave the process groups, so that another learner can be made."""
        leave_world()


def _join() -> World:
    set_threads()
    world = join_world()
    make_deterministic(world.device)
    return world


def learn(model: Path, algorithm: Algorithm, seed: int, steps: int, name: str) -> dict[str, Any]:
    """Train for some steps; return accuracies, the reward of each batch, and means of metrics.

    Args:
        model: directory of the model.
        algorithm: resolved.
        seed: of problems and sampling.
        steps: number of batches.
        name: for the progress on stderr.
    """
    learner = Learner(model, algorithm, seed)
    try:
        before, rewards = learner.accuracy(), []
        metrics: list[dict[str, float]] = []
        answers = learner.sample(0)
        for step in range(steps):
            following = learner.sample(step)
            metrics.append(learner.apply(answers, step))
            rewards.append(answers.reward)
            shown = ", ".join(f"{key} {metrics[-1].get(key, 0):.4f}" for key in SHOWN[:2])
            sys.stderr.write(f"{name}: step {step}, reward {answers.reward:.3f}, {shown}\n")
            answers = following
        after = learner.accuracy()
    finally:
        learner.close()
    means = {key: sum(each[key] for each in metrics) / steps for key in SHOWN if all(key in each for each in metrics)}
    return {"accuracy_before": before, "accuracy_after": after, "gain": after - before, "rewards": rewards} | means


def change(model: Path, algorithm: Algorithm, seed: int) -> Tensor:
    """Return the change of all weights by a batch that is the same for all algorithms: stale, in several minibatches.

    GRPO's step comes first, so the weights that answer and those that train differ. Without the steps in which only a
    critic learns: they change no weight.
    """
    grpo = Algorithm(minibatches=MINIBATCHES)
    fill(grpo)
    learner = Learner(model, grpo, seed)
    try:
        first, second = learner.sample(0), learner.sampler.batch(learner.backend.model, 0, filtered=False, greedy=True)
        learner.apply(first, 0)
        before = _weights(learner.backend)
        learner.use(algorithm.model_copy(update={"critic_warmup_steps": 0}))
        learner.apply(second, 1)
        found = _weights(learner.backend) - before
        assert found.any(), "a change of 0 has the same distance from every other one"
        return found
    finally:
        learner.close()


def _weights(backend: FsdpBackend) -> Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in backend.named_tensors()])
