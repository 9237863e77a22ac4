"""A network of Megatron-Core with its optimizer, and their state in checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rljob.api.roles import Optimizer
from rljob.trainer.backends.base import OptimizerUpdate, SavedState
from rljob.trainer.backends.expert_tensors import by_expert
from rljob.trainer.backends.fsdp.read_weights import StoredTensor, open_safetensors
from rljob.trainer.backends.fsdp.sharded_adamw import MOMENTS
from rljob.trainer.backends.megatron.cpu_shims import megatron_on
from rljob.trainer.backends.megatron.distributed_adamw import WEIGHT, DistributedAdamW
from rljob.trainer.backends.megatron.megatron_library import finalize_model_grads
from rljob.trainer.backends.megatron.megatron_network import MegatronNetwork
from rljob.trainer.checkpoint import optimizer_files
from rljob.trainer.errors import ModelError
from rljob.trainer.metrics import Stopwatch


class TrainedNetwork:
    """The optimizer of a network.

    Args:
        network: with gradients.
        settings: of the optimizer.
    """

    def __init__(self, network: MegatronNetwork, settings: Optimizer) -> None:
        self._network, self._device = network, network.grid.world.device
        with megatron_on(self._device):
            self._optimizer = DistributedAdamW(network.chunks, settings, network.dtype, network.grid)
        self._watch = Stopwatch(self._device)

    @property
    def updates(self) -> int:
        """Optimizer updates since the start of the run."""
        return self._optimizer.updates

    def read(self, source: Path) -> None:
        """Read the weights of a Hugging Face directory; all ranks take part."""
        self._network.read(source, self._assign_weight)

    def update(self, step: int) -> OptimizerUpdate:
        """Exchange the gradients between replicas and stages, clip them, apply AdamW; see :meth:`Backend.update`."""
        chunks = self._network.chunks
        with self._watch.time("seconds_optimizer"), megatron_on(self._device):
            finalize_model_grads(chunks)
            result = self._optimizer.update(step)
            for chunk in chunks:
                chunk.zero_grad_buffer()
        return result

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call, of passes and of the optimizer."""
        return self._network.metrics() | self._watch.take()

    def weight(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a parameter of this rank; in float32 the exact one, for which all ranks that hold it exchange their
        elements."""
        parameter = self._network.parameters[name]
        if dtype == self._network.dtype:
            return parameter.detach()
        return self._optimizer.gather(parameter, WEIGHT).to(dtype)

    def save(self) -> SavedState:
        """Return this rank's part of the weights and of the moments; see :meth:`Backend.save`."""
        parts = {WEIGHT: self.weight} | {kind: partial(self._moment, kind=kind) for kind in MOMENTS}
        saved = SavedState({}, {})
        for kind, name, tensor in self._network.exchange.own_tensors(parts):
            if kind == WEIGHT:
                saved.weights[name] = tensor
            else:
                saved.optimizer[f"{kind}.{name}"] = tensor
        return saved

    def restore(self, checkpoint: Path, updates: int, moments: str = "", weights: str | None = None) -> None:
        """Load the state of the optimizer from its file of a checkpoint.

        Args:
            checkpoint: to resume from.
            updates: number of updates.
            moments: begin of the names of the moments.
            weights: that of the names of the parameters; None: they are loaded already.
        """
        self._optimizer.updates = updates
        with ExitStack() as files:
            stored = by_expert(_open(checkpoint, files))

            def read(prefix: str, name: str) -> Tensor:
                def content(full: str) -> Any:
                    if (tensor := stored.get(f"{prefix}{full}")) is None:
                        raise ModelError(f"{checkpoint} has no {prefix}{full}; resume from another checkpoint")
                    return tensor.content

                return self._network.exchange.read(content, name).to(self._device)

            for name, parameter in self._network.parameters.items():
                if weights is not None:
                    self._assign_weight(name, read(weights, name))
                found = {kind: read(f"{moments}{kind}.", name) for kind in MOMENTS}
                self._optimizer.assign_moments(parameter, found)

    def _assign_weight(self, name: str, content: Tensor) -> None:
        self._optimizer.assign_weight(self._network.parameters[name], content.to(self._device))

    def _moment(self, name: str, kind: str) -> Tensor:
        return self._optimizer.gather(self._network.parameters[name], kind)


def _open(checkpoint: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Return the tensors of the optimizer's files of a checkpoint; nothing is read yet.

    Raises:
        ModelError: the files cannot be read.
    """
    stored: dict[str, StoredTensor] = {}
    for path in optimizer_files(checkpoint):
        try:
            stored |= open_safetensors(path, files)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}); resume from another checkpoint") from None
    return stored
