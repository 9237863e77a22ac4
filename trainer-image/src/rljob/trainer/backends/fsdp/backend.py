"""The FSDP2 backend: a transformers model sharded over the data-parallel ranks, and AdamW on the shards.

Parameters are float32 and sharded on their first dimension; forward and backward run in the job's dtype. Weights and
moments are loaded and saved as whole tensors under their Hugging Face names, so no other module depends on the number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rljob.api.roles import Optimizer, Trainer
from rljob.trainer.backends.base import Loss, OptimizerUpdate, Output, SavedState, ValueLoss
from rljob.trainer.backends.fsdp.critic import fill_head, give_head, reset_head
from rljob.trainer.backends.fsdp.frozen_model import FrozenFsdpModel
from rljob.trainer.backends.fsdp.gather_weights import assign_tensors, own_tensors, whole_tensors
from rljob.trainer.backends.fsdp.lora import Adapters
from rljob.trainer.backends.fsdp.model_layers import recompute_layers
from rljob.trainer.backends.fsdp.output_layer import TargetLogprobs
from rljob.trainer.backends.fsdp.packed_rows import packed
from rljob.trainer.backends.fsdp.packing import choose_layout
from rljob.trainer.backends.fsdp.read_weights import meta_model, read_weights
from rljob.trainer.backends.fsdp.sharded_adamw import MOMENTS, ShardedAdamW, read_shard
from rljob.trainer.backends.fsdp.sharding import free_whole_parameters, make_mesh, shard
from rljob.trainer.backends.trained_critic import TrainedCritic
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_state
from rljob.trainer.metrics import Stopwatch
from rljob.trainer.process_group import World

ADAPTER = "adapter"
ONE_EXCHANGE_BYTES = 2 << 30
"""Largest float32 gradient, in bytes, that every rank keeps whole during an update. Then ranks exchange gradients and
parameters once per update. With larger models they exchange them in each microbatch, which takes less time than its
computation, and keep shards only."""


class _Detachable(Protocol):
    def detach(self) -> Self: ...


Result = TypeVar("Result", bound=_Detachable)


class FsdpBackend:
    """See :class:`rljob.trainer.backends.base.Backend`.

    Args:
        source: Hugging Face directory of the weights to start from.
        settings: the job's trainer.
        world: the ranks.
        values: whether the model gets a new output layer of one value, for a critic.

    Raises:
        ModelError: the directory has no causal language model that can be trained.
    """

    def __init__(self, source: Path, settings: Trainer, world: World, values: bool = False) -> None:
        self.world, self._settings = world, settings
        mesh = self._mesh = make_mesh(world, settings.parallelism.replicate)
        self._ranks_of_copy = mesh.size(mesh.ndim - 1)
        self._in_first_copy = world.rank < self._ranks_of_copy
        self.dtype: torch.dtype = getattr(torch, str(settings.dtype))
        self.model, conversions = meta_model(source)
        self.vocabulary: int = self.model.config.get_text_config().vocab_size
        head = give_head(self.model) if values else frozenset()
        size = 4 * sum(parameter.numel() for parameter in self.model.parameters())
        self._one_exchange = self._ranks_of_copy == 1 or size <= ONE_EXCHANGE_BYTES
        self._adapters = Adapters(self.model, settings.lora, self.dtype, source) if settings.lora else None
        if settings.recompute == "layer":
            recompute_layers(self.model, source)
        # On one rank in float32 FSDP would only copy parameters and gradients.
        self._root: FSDPModule | None = None
        if mesh.size() > 1 or self.dtype != torch.float32:
            self._root = shard(self.model, mesh, self.dtype, not self._one_exchange)
        added = self._adapters.names if self._adapters else head
        read_weights(self.model, conversions, source, world, added)
        self._own = dict(self.model.named_parameters())
        self._parameters = {name: _as_dtensor(parameter, mesh) for name, parameter in self._own.items()}
        if self._adapters:
            self._adapters.initialize(self._parameters)
        fill_head(self._parameters, head)
        inputs = choose_layout(self.model, settings, world, self.dtype, source, values)
        self.packs = inputs is packed
        self._logprobs = TargetLogprobs(self.model, inputs)
        reset_head(self._parameters, head)
        self._trained = {name: p for name, p in self._parameters.items() if self._own[name].requires_grad}
        self._optimizer = ShardedAdamW(self._trained, settings.optimizer, world, settings.parallelism.replicate)
        self._watch = Stopwatch(world.device)

    def run(self, microbatches: Sequence[Microbatch], loss: Loss | None, entropy: bool = False) -> list[Output]:
        """Run the microbatches through the model, one after the other; see :class:`Backend`."""
        return self.passes(microbatches, partial(self._logprobs, entropy=entropy), loss)

    def passes(
        self,
        microbatches: Sequence[Microbatch],
        compute: Callable[[Microbatch], Result],
        loss: Callable[[int, Result], Tensor] | None,
    ) -> list[Result]:
        """Return what ``compute`` returns for each microbatch, without gradient; see :meth:`Backend.run`."""
        if loss is None:
            with torch.no_grad(), self._watch.time("seconds_forward"):
                outputs = [compute(microbatch) for microbatch in microbatches]
            free_whole_parameters(self.model)
            return outputs
        outputs = []
        for i, microbatch in enumerate(microbatches):
            self._exchange(i == len(microbatches) - 1)
            with self._watch.time("seconds_forward"):
                output = compute(microbatch)
                share = loss(i, output)
            with self._watch.time("seconds_backward"):
                (share * self.world.dp_size).backward()  # FSDP averages gradients over ranks; the loss is a sum
            outputs.append(output.detach())
        return outputs

    def run_values(self, microbatches: Sequence[Microbatch], loss: ValueLoss | None) -> list[Tensor]:
        """Return what the output layer of a critic gives for the targets, (B, K); see :class:`Critic`."""
        return self.passes(microbatches, self._logprobs.values, loss)

    def _exchange(self, last: bool) -> None:
        """Set what the next backward pass exchanges. Before the last one of an update, copies of the model exchange
        nothing, and the ranks of a copy nothing if they keep gradients and parameters whole."""
        if self._root is None:
            return
        self._root.set_requires_all_reduce(last)
        if self._one_exchange:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradient, apply AdamW, clear the gradient.

        Args:
            step: training step, for the learning rate.

        A gradient that is not finite changes neither weights nor moments.
        """
        with self._watch.time("seconds_optimizer"):
            result = self._optimizer.update(step, self.gradients())
            self.model.zero_grad()
        return result

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's shards of the gradients, by name."""
        found = {name: parameter.grad for name, parameter in self._own.items() if parameter.grad is not None}
        return {name: g.to_local() if isinstance(g, DTensor) else g for name, g in found.items()}

    def load_frozen(self, source: Path) -> FrozenFsdpModel:
        """Return a model that is not trained, sharded like this one; see :class:`LoadsFrozenModels`."""
        return FrozenFsdpModel(source, self._settings_of_others(), self._mesh, self.world)

    def load_critic(self, source: Path, optimizer: Optimizer) -> TrainedCritic[FsdpBackend]:
        """Return a critic, sharded like this model; see :class:`TrainsCritic`. All its parameters are trained."""
        settings = self._settings_of_others().model_copy(update={"optimizer": optimizer, "lora": None})
        return TrainedCritic(FsdpBackend(source, settings, self.world, values=True))

    def _settings_of_others(self) -> Trainer:
        """Return the settings of models beside this one, which get their inputs in its layout."""
        return self._settings.model_copy(update={"packing": "varlen" if self.packs else "none"})

    @property
    def updates(self) -> int:
        """Optimizer updates since the start of the run."""
        return self._optimizer.updates

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call."""
        return self._watch.take()

    def named_tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter as a whole tensor, by name; see :class:`Backend`. Ranks of other copies than that of
        rank 0 get their shards, and exchange nothing."""
        if not self._in_first_copy:
            added = self._adapters.names if self._adapters else frozenset()
            return ((name, p.to_local().detach()) for name, p in self._parameters.items() if name not in added)
        if self._adapters:
            return self._adapters.merged(self._parameters, dtype)
        return whole_tensors(self._parameters, dtype)

    def save(self) -> SavedState:
        """Return this rank's part of the weights, and of AdamW's moments, named ``exp_avg.NAME`` and
        ``exp_avg_sq.NAME``. With adapters the weights are merged; A and B are beside the moments, as ``adapter.NAME``.
        """
        if not self._in_first_copy:
            return SavedState({}, {})
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
        """Return the rank of a copy that writes each parameter."""
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        return assign_tensors(sizes, self._ranks_of_copy)

    def _named_state(self, kind: str) -> Iterator[tuple[str, DTensor]]:
        return iter(self._trained.items()) if kind == ADAPTER else self._optimizer.named_state(kind)

    def load(self, checkpoint: Path) -> None:
        """Load the moments, the adapters and the number of updates of a checkpoint."""
        self.restore(checkpoint, read_state(checkpoint).updates, "", f"{ADAPTER}." if self._adapters else None)

    def restore(self, checkpoint: Path, updates: int, moments: str, weights: str | None) -> None:
        """Load the state of the trained parameters from the optimizer's file of a checkpoint.

        Args:
            checkpoint: to resume from.
            updates: number of updates.
            moments: begin of the names of the moments.
            weights: that of the names of the parameters; None: they are loaded already.
        """
        self._optimizer.load(checkpoint, updates, moments)
        if weights is not None:
            for name, parameter in self._trained.items():
                self._optimizer.assign(name, read_shard(checkpoint, f"{weights}{name}", parameter))


def _as_dtensor(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a parameter as a sharded tensor with its memory; one that is not sharded belongs to one rank."""
    if isinstance(parameter, DTensor):
        return parameter
    return DTensor.from_local(parameter.detach(), mesh, (Shard(0),), run_check=False)
