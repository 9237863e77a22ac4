"""Megatron-Core's distributed optimizer: each data-parallel rank keeps float32 weights and moments of its elements.

It applies AdamW with the settings and rules of the FSDP2 backend: weight decay on all parameters, clipping by the norm
of the whole gradient. The library saves its state but does not load it with PyTorch's AdamW, so tensors are taken from
it and given to it here.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from rljob.api.roles import Optimizer
from rljob.trainer.backends.base import OptimizerUpdate
from rljob.trainer.backends.fsdp.sharded_adamw import MOMENTS
from rljob.trainer.backends.megatron.megatron_library import (
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.learning_rate import learning_rate

WEIGHT = "param"
"""Name of the float32 weights beside MOMENTS."""


class DistributedAdamW:
    """The optimizer of this rank.

    Args:
        chunks: the parameters of this rank, with their buffers.
        settings: of the job.
        dtype: of the model.
        grid: the ranks.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        settings: Optimizer,
        dtype: torch.dtype,
        grid: ProcessGrid,
    ) -> None:
        self._settings, self._grid = settings, grid
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.epsilon,
            clip_grad=settings.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        # No overrides: the library's own exempt biases and norms from weight decay.
        with torch.no_grad():  # its float32 weights are views of parameters
            self._chain = get_megatron_optimizer(config, chunks, config_overrides={}, use_gloo_process_groups=False)
        self._optimizers: list[DistributedOptimizer] = self._chain.chained_optimizers  # experts may have their own
        self.updates = 0  # also AdamW's step count

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradients that the model's buffers hold and apply AdamW; see :meth:`Backend.update`."""
        rate = learning_rate(self._settings, step)
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        finite = math.isfinite(norm)  # of all ranks, so all take the same branch
        if finite:
            for optimizer in self._optimizers:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._settings.max_grad_norm, norm)
                for group in optimizer.optimizer.param_groups:
                    group["lr"] = rate
            self._chain.step_with_ready_grads()
            self.updates += 1
        self._chain.zero_grad()
        return OptimizerUpdate(norm, rate, skipped=not finite)

    def gather(self, parameter: Tensor, kind: str) -> Tensor:
        """Return the float32 weights or a moment of a parameter of this rank; all ranks that hold it take part.

        Args:
            parameter: of the model.
            kind: WEIGHT, or one of MOMENTS.
        """
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if (owned := self._owned(parameter)) is not None:
            optimizer, own = owned
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            if kind in tensors:  # there are no moments before the first update
                flat[own] = tensors[kind].detach()
        holders = self._grid.copy_group if getattr(parameter, "allreduce", True) else self._grid.expert_copy_group
        if holders.size() > 1:
            dist.all_reduce(flat.view(torch.int32), group=holders)  # the bits: -0.0 + 0.0 would be 0.0
        return flat.view(parameter.shape)

    def assign_weight(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter of the model, and the part of its float32 weights that this rank keeps."""
        parameter.detach().copy_(weight)
        if (owned := self._owned(parameter)) is not None:
            optimizer, own = owned
            _main(optimizer, parameter).detach().copy_(weight.view(-1)[own])

    def assign_moments(self, parameter: Tensor, moments: dict[str, Tensor]) -> None:
        """Set the part of a parameter's moments that this rank keeps; :attr:`updates` must be set before."""
        if (owned := self._owned(parameter)) is not None:
            optimizer, own = owned
            parts = {name: moments[name].view(-1)[own].clone() for name in MOMENTS}
            count = torch.tensor(float(self.updates), dtype=torch.float32)
            optimizer.optimizer.state[_main(optimizer, parameter)] = {"step": count, **parts}

    def _owned(self, parameter: Tensor) -> tuple[DistributedOptimizer, slice] | None:
        """Return the elements of a parameter whose float32 weights and moments this rank keeps, and where."""
        for optimizer in self._optimizers:
            if parameter in optimizer.model_param_gbuf_map:
                found = optimizer._get_model_param_range_map(parameter)["param"]
                return optimizer, slice(found.start, found.end)
        return None


def _main(optimizer: DistributedOptimizer, parameter: Tensor) -> Tensor:
    main: Tensor = optimizer._get_main_param_and_optimizer_states(parameter)[WEIGHT]
    return main
