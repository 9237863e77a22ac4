"""The FSDP2 backend: a transformers model sharded over the data-parallel ranks, and AdamW on the shards.

Parameters are float32 and sharded on their first dimension; forward and backward run in the job's dtype. AdamW is
elementwise, so it runs on the plain local shards. Weights and moments are loaded and saved as whole tensors under their
Hugging Face names, so no other module depends on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rljob.api.roles import Optimizer, Trainer
from rljob.trainer.backends.base import Loss, OptimizerUpdate, Output, SavedState
from rljob.trainer.backends.fsdp.gather_weights import assign_tensors, own_tensors, whole_tensors
from rljob.trainer.backends.fsdp.lora import Adapters
from rljob.trainer.backends.fsdp.model_layers import decoder_layers, recompute_layers
from rljob.trainer.backends.fsdp.output_layer import TargetLogprobs
from rljob.trainer.backends.fsdp.read_weights import meta_model, read_weights
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_optimizer_tensor, read_state
from rljob.trainer.metrics import Stopwatch
from rljob.trainer.process_group import World

MOMENTS = ("exp_avg", "exp_avg_sq")
ADAPTER = "adapter"
ONE_EXCHANGE_BYTES = 2 << 30
"""Largest float32 gradient, in bytes, that every rank keeps whole during an update. Then ranks exchange gradients and
parameters once per update. With larger models they exchange them in each microbatch, which takes less time than its
computation, and keep shards only."""


class FsdpBackend:
    """See :class:`rljob.trainer.backends.base.Backend`.

    Args:
        source: Hugging Face directory of the weights to start from.
        settings: the job's trainer.
        world: the ranks.

    Raises:
        ModelError: the directory has no causal language model that can be trained.
    """

    def __init__(self, source: Path, settings: Trainer, world: World) -> None:
        self.world = world
        self._settings = settings.optimizer
        self._mesh = init_device_mesh(world.device.type, (world.dp_size,))
        self.dtype: torch.dtype = getattr(torch, str(settings.dtype))
        self.model, conversions = meta_model(source)
        self.vocabulary: int = self.model.config.get_text_config().vocab_size
        size = 4 * sum(parameter.numel() for parameter in self.model.parameters())
        self._one_exchange = world.dp_size == 1 or size <= ONE_EXCHANGE_BYTES
        self._adapters = Adapters(self.model, settings.lora, self.dtype, source) if settings.lora else None
        if settings.recompute == "layer":
            recompute_layers(self.model, source)
        self._root = _shard(self.model, self._mesh, self.dtype, not self._one_exchange)
        read_weights(self.model, conversions, source, world, self._adapters.names if self._adapters else frozenset())
        self._logprobs = TargetLogprobs(self.model)
        self._parameters: dict[str, DTensor] = dict(self.model.named_parameters())  # type: ignore[arg-type]
        if self._adapters:
            self._adapters.initialize(self._parameters)
        self._trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._local = {name: torch.nn.Parameter(p.to_local()) for name, p in self._trained.items()}
        self._optimizer = _adamw(list(self._local.values()), self._settings)
        self.updates = 0  # also AdamW's step count
        self._watch = Stopwatch(world.device)

    def run(self, microbatches: Sequence[Microbatch], loss: Loss | None) -> list[Output]:
        """Run the microbatches through the model, one after the other; see :class:`Backend`."""
        if loss is None:
            with torch.no_grad(), self._watch.time("seconds_forward"):
                outputs = [Output(self._logprobs(microbatch)) for microbatch in microbatches]
            self._reshard()
            return outputs
        outputs = []
        for i, microbatch in enumerate(microbatches):
            if self._one_exchange:
                self._exchange(i == len(microbatches) - 1)
            with self._watch.time("seconds_forward"):
                output = Output(self._logprobs(microbatch))
                share = loss(i, output)
            with self._watch.time("seconds_backward"):
                (share * self.world.dp_size).backward()  # FSDP averages gradients over ranks; the loss is a sum
            outputs.append(Output(output.logprobs_BK.detach()))
        return outputs

    def _exchange(self, wanted: bool) -> None:
        """Set whether the next backward pass ends with shards of gradients and parameters, or keeps them whole."""
        self._root.set_requires_gradient_sync(wanted)
        self._root.set_reshard_after_backward(wanted)

    def _reshard(self) -> None:
        """Free the whole parameters that forward passes without a backward pass have left."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradient, apply AdamW, clear the gradient.

        Args:
            step: training step, for the warm-up.

        A gradient that is not finite changes neither weights nor moments.
        """
        with self._watch.time("seconds_optimizer"):
            return self._update(step)

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call."""
        return self._watch.take()

    def _update(self, step: int) -> OptimizerUpdate:
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                self._local[name].grad = cast(DTensor, parameter.grad).to_local()
        norm = self._clip()
        rate = learning_rate(self._settings, step)
        finite = math.isfinite(norm)  # of all ranks, so all take the same branch
        if finite:
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad()
        self.model.zero_grad()
        return OptimizerUpdate(norm, rate, skipped=not finite)

    def _clip(self) -> float:
        gradients = [local.grad for local in self._local.values() if local.grad is not None]
        norms = torch._foreach_norm([gradient.float() for gradient in gradients])
        norm = float(self.world.sum_over_data(torch.stack(norms).square().sum()).sqrt())
        if norm > self._settings.max_grad_norm:
            torch._foreach_mul_(gradients, self._settings.max_grad_norm / (norm + 1e-6))
        return norm

    def named_tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter as a whole tensor, by name; see :class:`Backend`."""
        if self._adapters:
            return self._adapters.merged(self._parameters, dtype)
        return whole_tensors(self._parameters, dtype)

    def save(self) -> SavedState:
        """Return this rank's part of the weights, and of AdamW's moments, named ``exp_avg.NAME`` and
        ``exp_avg_sq.NAME``. With adapters the weights are merged; A and B are beside the moments, as ``adapter.NAME``.
        """
        ranks = self._assign(self._parameters)
        if self._adapters:
            weights = dict(self._adapters.own_merged(self._parameters, ranks))
        else:
            weights = dict(own_tensors(self._parameters.items(), ranks))
        ranks = self._assign(self._trained)
        kinds = (*MOMENTS, ADAPTER) if self._adapters else MOMENTS
        own = ((kind, own_tensors(self._named_state(kind), ranks)) for kind in kinds)
        return SavedState(weights, {f"{kind}.{name}": tensor for kind, tensors in own for name, tensor in tensors})

    def _assign(self, parameters: Mapping[str, DTensor]) -> dict[str, int]:
        return assign_tensors({name: parameter.numel() for name, parameter in parameters.items()}, self._mesh.size())

    def _named_state(self, kind: str) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self._trained.items():
            local = self._local[name]
            if kind == ADAPTER:
                yield name, _like(parameter, local.detach())
            else:
                state = self._optimizer.state.get(local)
                yield name, _like(parameter, torch.zeros_like(local) if state is None else state[kind])

    def load(self, checkpoint: Path) -> None:
        """Load the moments, the adapters and the number of updates of a checkpoint."""
        self.updates = read_state(checkpoint).updates
        for name, parameter in self._trained.items():
            moments = {moment: self._read(checkpoint, f"{moment}.{name}", parameter) for moment in MOMENTS}
            count = torch.tensor(float(self.updates), dtype=torch.float32)
            self._optimizer.state[self._local[name]] = {"step": count, **moments}
            if self._adapters:
                self._local[name].data.copy_(self._read(checkpoint, f"{ADAPTER}.{name}", parameter))

    def _read(self, checkpoint: Path, name: str, parameter: DTensor) -> Tensor:
        """Return this rank's rows of a tensor of a checkpoint that has the shape of ``parameter``."""
        whole = read_optimizer_tensor(checkpoint, name).to(parameter.device)
        # Every rank has read the file, so no rank sends.
        return distribute_tensor(whole, self._mesh, parameter.placements, src_data_rank=None).to_local()


def learning_rate(settings: Optimizer, step: int) -> float:
    """Return the learning rate of a 0-based training step: linear warm-up, then constant."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def _shard(model: PreTrainedModel, mesh: Any, dtype: torch.dtype, reshard: bool) -> FSDPModule:
    """Shard each layer, and the rest of the model, over the ranks.

    Args:
        model: on the meta device.
        mesh: the ranks.
        dtype: of forward and backward passes.
        reshard: whether a layer frees its whole parameters after its forward pass. The rest of the model keeps them,
            because the backward pass starts with it.
    """
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def _adamw(parameters: list[torch.nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=True,
    )


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
