"""AdamW on the shards of this rank, with moments on the device or in the memory of the host.

AdamW is elementwise, so it runs on plain local shards. Moments are saved and loaded as whole tensors, so a checkpoint
does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljob.api.roles import Optimizer
from rljob.trainer.backends.base import OptimizerUpdate
from rljob.trainer.backends.expert_tensors import OF_LAYER, of_layer
from rljob.trainer.backends.fsdp.read_weights import local_rows
from rljob.trainer.checkpoint import optimizer_names, read_optimizer_tensor
from rljob.trainer.learning_rate import learning_rate
from rljob.trainer.process_group import World

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """The optimizer of this rank.

    Args:
        parameters: sharded float32 parameters that are trained, by name.
        settings: of the job.
        world: the ranks.
        copies: of the model; each has all parameters.
    """

    def __init__(self, parameters: Mapping[str, DTensor], settings: Optimizer, world: World, copies: int) -> None:
        self._parameters, self._settings, self._world, self._copies = parameters, settings, world, copies
        self._offloads = settings.offload and is_apart(world.device)
        self.local = {name: torch.nn.Parameter(self._placed(p.to_local())) for name, p in parameters.items()}
        """What AdamW changes: the shards, or with offload copies of them in the memory of the host."""
        self._adamw = torch.optim.AdamW(
            self._groups(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            foreach=not self._offloads,  # the same operations; foreach needs temporary tensors over all parameters
        )
        self.state = self._adamw.state
        self.updates = 0  # also AdamW's step count

    def _groups(self) -> list[dict[str, Any]]:
        """Return AdamW's groups of parameters: with weight decay and without."""
        parts: dict[float, list[torch.nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            decayed = self._settings.decayed == "all" or is_matrix(name, parameter)
            parts.setdefault(self._settings.weight_decay if decayed else 0.0, []).append(self.local[name])
        return [{"params": parameters, "weight_decay": decay} for decay, parameters in parts.items()]

    def _placed(self, shard: Tensor) -> Tensor:
        """Return a shard where AdamW computes: the shard itself, or a copy on the host."""
        return shard.detach().to("cpu", copy=True) if self._offloads else shard

    def update(self, step: int, gradients: Mapping[str, Tensor]) -> OptimizerUpdate:
        """Clip the gradient in place and apply AdamW; see :meth:`Backend.update`.

        Args:
            step: training step, for the learning rate.
            gradients: this rank's shards by name.
        """
        norm = self._clip(list(gradients.values()))
        rate = learning_rate(self._settings, step)
        finite = math.isfinite(norm)  # of all ranks, so all take the same branch
        if finite:
            for name, gradient in gradients.items():
                self.local[name].grad = self._placed(gradient)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self.updates += 1
            self._copy_back()
        self._adamw.zero_grad()
        return OptimizerUpdate(norm, rate, skipped=not finite)

    def _copy_back(self) -> None:
        if self._offloads:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.to_local().copy_(self.local[name])

    def _clip(self, gradients: list[Tensor]) -> float:
        norms = torch._foreach_norm([gradient.float() for gradient in gradients])
        # A sum over all ranks, not over those of a copy: its bits are the same everywhere, so copies stay equal.
        squares = self._world.sum_over_data(torch.stack(norms).square().sum()) / self._copies
        norm = float(squares.sqrt())
        if norm > self._settings.max_grad_norm:
            torch._foreach_mul_(gradients, self._settings.max_grad_norm / (norm + 1e-6))
        return norm

    def named_state(self, moment: str) -> Iterator[tuple[str, DTensor]]:
        """Yield one of MOMENTS of each parameter, by the parameter's name, sharded on the device."""
        for name, parameter in self._parameters.items():
            local = self.local[name]
            state = self.state.get(local)
            yield name, _like(parameter, torch.zeros_like(local) if state is None else state[moment])

    def load(self, checkpoint: Path, updates: int, prefix: str = "") -> None:
        """Load the moments of a checkpoint.

        Args:
            checkpoint: to resume from.
            updates: number of updates.
            prefix: begin of the names of the moments.
        """
        self.updates = updates
        for name, parameter in self._parameters.items():
            moments = {m: self._placed(read_shard(checkpoint, f"{prefix}{m}.{name}", parameter)) for m in MOMENTS}
            count = torch.tensor(float(self.updates), dtype=torch.float32)
            self.state[self.local[name]] = {"step": count, **moments}

    def assign(self, name: str, shard: Tensor) -> None:
        """Set this rank's shard of a parameter."""
        with torch.no_grad():
            self.local[name].copy_(shard)
        self._copy_back()


def is_apart(device: torch.device) -> bool:
    """Return whether the memory of the host is another one than that of the device."""
    return device.type != "cpu"


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is neither a norm nor a bias; biases of experts have two dimensions."""
    return parameter.ndim >= 2 and "bias" not in name.rpartition(".")[2]


def read_shard(checkpoint: Path, name: str, parameter: DTensor) -> Tensor:
    """Return this rank's rows of a tensor of a checkpoint's optimizer that has the shape of ``parameter``. A checkpoint
    of another backend has the tensors of experts by expert."""
    rows = local_rows(parameter)
    if OF_LAYER.fullmatch(name) and name not in optimizer_names(checkpoint):
        experts = range(rows.start, rows.stop)
        if not experts:
            return torch.empty(0, *parameter.shape[1:], device=parameter.device)
        return of_layer(name, experts, partial(read_optimizer_tensor, checkpoint)).to(parameter.device)
    mapped = read_optimizer_tensor(checkpoint, name, rows)
    return mapped.to(parameter.device, copy=True)


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
