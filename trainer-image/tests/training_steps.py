"""Applies a batch of a test as the trainer does: plan, the planned samples, step."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from rljob.api.algorithm import Algorithm
from rljob.api.models import LogprobTolerance
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.backends.base import Backend, Critic, FrozenModel, OptimizerUpdate, PacksRows
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch_plan import BatchPlan, plan_batch
from rljob.trainer.fetch_batch import check_shard
from rljob.trainer.metrics import METRICS
from rljob.trainer.process_group import World
from rljob.trainer.step import StepResult, apply_batch, plan_step
from rljob.trainer.step_checks import StepChecks

OF_CRITIC = {"seconds_critic", "explained_variance"}
OF_CRITIC |= {name for name in METRICS if name.startswith(("value_", "critic_"))}
"""Metrics of a critic."""
OF_OTHERS = {name for name in METRICS if name.startswith(("reference_", "teacher_"))}
OF_OTHERS |= OF_CRITIC | {"seconds_frozen", "kl_coefficient"}
"""Metrics of other models than the policy."""
CHECKS = StepChecks(LogprobTolerance(1e-4, 1e-4, "mean", "largest"))


def plan_all(train: Train, algorithm: Algorithm, world: World, budget: int, packed: bool = False) -> BatchPlan:
    """Return the plan that trains every sample."""
    trained_N = np.ones(len(train.samples), np.bool_)
    return plan_batch(train, trained_N, algorithm.minibatches or 1, world.dp_rank, world.dp_size, budget, packed)


def whole_gradients(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    """Return copies of the gradients as whole tensors, by name; all ranks take part."""
    found = {name: parameter.grad for name, parameter in backend.model.named_parameters()}
    return {
        name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        for name, gradient in found.items()
        if gradient is not None
    }


def gradients_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    """Return a dictionary that each update fills with the gradients before clipping."""
    gradients: dict[str, torch.Tensor] = {}
    update = backend.update

    def observed(step: int) -> OptimizerUpdate:
        gradients.update(whole_gradients(backend))
        return update(step)

    backend.update = observed  # type: ignore[method-assign]
    return gradients


def noisy_copy(policy: Path, directory: Path) -> Path:
    """Write the policy with other weights; return the directory."""
    shutil.copytree(policy, directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    noisy = {name: tensor + 0.03 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(noisy, directory / "model.safetensors", {"format": "pt"})
    return directory


def reference_logprobs(model: torch.nn.Module, tokens: SampleTokens, temperature: float) -> torch.Tensor:
    """Return the log-probability of each token but the first, from plain transformers."""
    ids = torch.from_numpy(np.frombuffer(tokens.token_ids, np.int32).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]


def apply(
    world: World,
    backend: Backend,
    algorithm: Algorithm,
    train: Train,
    tokens: list[SampleTokens],
    budget: int,
    all_samples: bool = False,
    checks: StepChecks | None = None,
    frozen: Mapping[str, FrozenModel] | None = None,
    critic: Critic | None = None,
    accumulated: int = 1,
) -> StepResult:
    """Apply a batch; ``tokens`` are all its samples. ``all_samples`` also trains those whose advantage is 0.
    ``accumulated``: consecutive minibatches whose gradients one update has."""
    make_plan = plan_all if all_samples else plan_step
    plan = make_plan(train, algorithm, world, budget, isinstance(backend, PacksRows) and backend.packs)
    parts = range(0, len(plan.minibatches), accumulated)
    plan = replace(
        plan,
        minibatches=[list(itertools.chain(*plan.minibatches[i : i + accumulated])) for i in parts],
        microbatches=[list(itertools.chain(*plan.microbatches[i : i + accumulated])) for i in parts],
    )
    rows = check_shard([tokens[i] for i in plan.indices], train.samples, plan.indices)
    return apply_batch(plan, rows, algorithm, backend, world, checks or CHECKS, frozen, critic)
