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
    get_megatron_optimizer,
)
from rljob.trainer.learning_rate import learning_rate

WEIGHT = "param"
"""Name of the float32 weights beside MOMENTS."""


class DistributedAdamW:
    """The optimizer of this rank.

    Args:
        model: the parameters of this rank, with their buffers.
        settings: of the job.
        dtype: of the model.
        data_group: the ranks that hold the same parameters.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: Optimizer,
        dtype: torch.dtype,
        data_group: dist.ProcessGroup,
    ) -> None:
        self._settings, self._data_group = settings, data_group
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
            chain = get_megatron_optimizer(config, [model], config_overrides={}, use_gloo_process_groups=False)
        self._optimizer: DistributedOptimizer = chain.chained_optimizers[0]
        self.updates = 0  # also AdamW's step count

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradients that the model's buffers hold and apply AdamW; see :meth:`Backend.update`."""
        rate = learning_rate(self._settings, step)
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.clip_grad_norm(self._settings.max_grad_norm))
        finite = math.isfinite(norm)  # of all ranks, so all take the same branch
        if finite:
            for group in self._optimizer.optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step_with_ready_grads()
            self.updates += 1
        self._optimizer.zero_grad()
        return OptimizerUpdate(norm, rate, skipped=not finite)

    def gather(self, parameter: Tensor, kind: str) -> Tensor:
        """Return the float32 weights or a moment of a parameter of this rank; all ranks of the data group take part.

        Args:
            parameter: of the model.
            kind: WEIGHT, or one of MOMENTS.
        """
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if (own := self._own_range(parameter)) is not None:
            tensors = self._optimizer._get_main_param_and_optimizer_states(parameter)
            if kind in tensors:  # there are no moments before the first update
                flat[own] = tensors[kind].detach()
        if self._data_group.size() > 1:
            dist.all_reduce(flat.view(torch.int32), group=self._data_group)  # the bits: -0.0 + 0.0 would be 0.0
        return flat.view(parameter.shape)

    def assign_weight(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter of the model, and the part of its float32 weights that this rank keeps."""
        parameter.detach().copy_(weight)
        if (own := self._own_range(parameter)) is not None:
            self._main(parameter).detach().copy_(weight.view(-1)[own])

    def assign_moments(self, parameter: Tensor, moments: dict[str, Tensor]) -> None:
        """Set the part of a parameter's moments that this rank keeps; :attr:`updates` must be set before."""
        if (own := self._own_range(parameter)) is not None:
            parts = {name: moments[name].view(-1)[own].clone() for name in MOMENTS}
            count = torch.tensor(float(self.updates), dtype=torch.float32)
            self._optimizer.optimizer.state[self._main(parameter)] = {"step": count, **parts}

    def _own_range(self, parameter: Tensor) -> slice | None:
        """Return the elements of a parameter whose float32 weights and moments this rank keeps."""
        if parameter not in self._optimizer.model_param_gbuf_map:
            return None
        found = self._optimizer._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)

    def _main(self, parameter: Tensor) -> Tensor:
        main: Tensor = self._optimizer._get_main_param_and_optimizer_states(parameter)[WEIGHT]
        return main
