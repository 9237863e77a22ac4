"""Low-rank adapters of linear layers (LoRA, https://arxiv.org/abs/2106.09685): y = x·Wᵀ + b + (α / r)·x·Aᵀ·Bᵀ.

Only A and B are trained. The model's own parameters do not change and are kept in the type of the forward pass. What
leaves the backend under the names of the model are the merged weights W + (α / r)·B·A.

Shapes: r rank, I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import blake3
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rljob.api.roles import Lora
from rljob.trainer.backends.fsdp.gather_weights import own_tensors, whole_tensors
from rljob.trainer.backends.fsdp.lora_targets import unknown_target
from rljob.trainer.backends.fsdp.model_layers import decoder_layers
from rljob.trainer.backends.fsdp.read_weights import local_rows
from rljob.trainer.errors import ModelError

log = logging.getLogger(__name__)

A, B = ".lora_A", ".lora_B"
"""Ends of the names of the adapters' parameters; the beginning is the name of the linear layer."""


class LoraLinear(torch.nn.Linear):
    """A linear layer with an adapter. Its weight and bias keep their names, so they are read from files as before.

    Args:
        replaced: the linear layer, on the meta device.
        rank: of the adapter.
        scale: factor of the adapter's result.
    """

    def __init__(self, replaced: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__(replaced.in_features, replaced.out_features, replaced.bias is not None, device="meta")
        self.weight, self.bias = replaced.weight, replaced.bias
        self.lora_A = torch.nn.Parameter(torch.empty(rank, self.in_features, device="meta"))
        self.lora_B = torch.nn.Parameter(torch.empty(self.out_features, rank, device="meta"))
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Return the results (…, O) for inputs (…, I)."""
        return super().forward(input) + self.scale * linear(linear(input, self.lora_A), self.lora_B)


class Adapters:
    """The adapters of a model.

    Args:
        model: on the meta device, before it is sharded. Its layers are replaced, and its parameters frozen.
        settings: of the job.
        dtype: of forward and backward passes; the frozen parameters get it.
        source: directory of the model, for messages.

    Raises:
        ModelError: the model has no such layers.
    """

    def __init__(self, model: PreTrainedModel, settings: Lora, dtype: torch.dtype, source: Path) -> None:
        self._scale = settings.alpha / settings.rank
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        self._layers = _chosen(model, settings.targets, source)
        for name in self._layers:
            model.set_submodule(name, LoraLinear(model.get_submodule(name), settings.rank, self._scale))  # type: ignore[arg-type]
        self.names = frozenset(f"{layer}{end}" for layer in self._layers for end in (A, B))
        """Names of the adapters' parameters."""
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        log.info("adapters of rank %d on %d layers: %d parameters", settings.rank, len(self._layers), trained)

    def initialize(self, parameters: Mapping[str, DTensor]) -> None:
        """Set A to random numbers that depend on its name only, and B to 0: the model is the one that was loaded."""
        with torch.no_grad():
            for layer in self._layers:
                shard = parameters[layer + A]
                shard.to_local().copy_(_first(layer + A, shard.shape)[local_rows(shard)])
                parameters[layer + B].to_local().zero_()

    def merged(self, parameters: Mapping[str, DTensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters as whole tensors with merged adapters; see :meth:`Backend.named_tensors`.

        The sum is computed in float32 for one tensor at a time, from whole tensors: its bits do not depend on the
        number of ranks.
        """
        merge = self._merge(parameters)
        for name, tensor in whole_tensors(self._frozen(parameters), dtype):
            yield name, merge(name, tensor)

    def own_merged(self, parameters: Mapping[str, DTensor], ranks: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters that this rank has in ``ranks``: merged float32 copies on the host. See
        :func:`own_tensors`."""
        merge = self._merge(parameters)
        for name, tensor in own_tensors(self._frozen(parameters).items(), ranks):
            yield name, merge(name, tensor.float()).cpu()

    def _frozen(self, parameters: Mapping[str, DTensor]) -> dict[str, DTensor]:
        return {name: parameter for name, parameter in parameters.items() if name not in self.names}

    def _merge(self, parameters: Mapping[str, DTensor]) -> Callable[[str, Tensor], Tensor]:
        """Return a function of a parameter's name and whole tensor that returns the merged tensor in the same type."""
        trained = {name: parameter for name, parameter in parameters.items() if name in self.names}
        whole = dict(whole_tensors(trained, torch.float32))
        adapted = {f"{layer}.weight": layer for layer in self._layers}

        def merge(name: str, tensor: Tensor) -> Tensor:
            layer = adapted.get(name)
            if layer is None:
                return tensor
            b_OR, a_RI = whole[layer + B], whole[layer + A]
            return torch.addmm(tensor.to(b_OR.device).float(), b_OR, a_RI, alpha=self._scale).to(tensor.dtype)

        return merge


def _chosen(model: PreTrainedModel, targets: list[str] | None, source: Path) -> list[str]:
    """Return the names of the linear layers inside the decoder layers that get adapters.

    Raises:
        ModelError: there are none, or none of a name in ``targets``.
    """
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    found = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and module in inside]
    known = {name.rpartition(".")[2] for name in found}
    if not found:
        raise ModelError(f"{source}: transformers names no linear layers of this model; remove spec.trainer.lora")
    for i, target in enumerate(targets or ()):
        if not any(_named(name, target) for name in found):
            raise ModelError(unknown_target(i, source, target, known))
    return [name for name in found if targets is None or any(_named(name, target) for target in targets)]


def _named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _first(name: str, shape: torch.Size) -> Tensor:
    """Return the initial A, uniform in ±1/√I, the same on any number of ranks."""
    seed = int.from_bytes(blake3.blake3(name.encode()).digest(7), "little")
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
