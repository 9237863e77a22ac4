"""A critic: a transformers model whose output layer gives the value of the state before each token.

It is a network of the FSDP2 backend with an optimizer of its own. The values of a new critic are 0.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, H features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rljob.trainer.backends.base import OptimizerUpdate, ValueLoss
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_optimizer_tensor

if TYPE_CHECKING:  # the backend makes critics
    from rljob.trainer.backends.fsdp.backend import FsdpBackend

PREFIX, WEIGHT, UPDATES = "critic.", "weight", "updates"
"""Parts of the names of a critic's tensors in a checkpoint."""


class ValueHead(torch.nn.Linear):
    """The output layer of a critic. It computes in at least float32: a bfloat16 value has three digits."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the values (B, K, 1) for inputs (B, K, H)."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        values_BK1 = linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        return values_BK1.clone()  # FSDP needs outputs that are no views


def give_head(model: PreTrainedModel) -> frozenset[str]:
    """Replace the output layer of a meta model by one of one value; return the names of its parameters."""
    own = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is own)
    with torch.device("meta"):
        head = ValueHead(own.in_features, 1, dtype=own.weight.dtype)
    head._is_hf_initialized = True  # type: ignore[assignment] # transformers' initialization leaves it
    model.set_submodule(name, head)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
        if hasattr(config, "final_logit_softcapping"):
            config.final_logit_softcapping = None  # values have no bound
    return frozenset((f"{name}.weight", f"{name}.bias"))


def fill_head(parameters: Mapping[str, DTensor], names: Iterable[str]) -> None:
    """Set the parameters ``names`` to random numbers, so that values differ between inputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in names:
            own = parameters[name].to_local()
            own.copy_((torch.rand(own.shape, generator=generator) - 0.5) / parameters[name].shape[-1] ** 0.5)


def reset_head(parameters: Mapping[str, DTensor], names: Iterable[str]) -> None:
    """Set the parameters ``names`` to 0: the first values are 0 on any number of ranks."""
    with torch.no_grad():
        for name in names:
            parameters[name].to_local().zero_()


class FsdpCritic:
    """See :class:`rljob.trainer.backends.base.Critic`.

    Args:
        network: with an output layer of :func:`give_head`.
    """

    def __init__(self, network: FsdpBackend) -> None:
        self.network = network

    def run(self, microbatches: Sequence[Microbatch], loss: ValueLoss | None) -> list[Tensor]:
        """Return the values (B, K) of each microbatch; see :meth:`Critic.run`."""
        return self.network.passes(microbatches, self.network.values, loss)

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradient, apply AdamW, clear the gradient."""
        return self.network.update(step)

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        return {"seconds_critic": sum(self.network.metrics().values())}

    def save(self) -> dict[str, Tensor]:
        """Return this rank's part: ``critic.weight.NAME``, ``critic.exp_avg.NAME``, ``critic.exp_avg_sq.NAME``, and
        ``critic.updates``."""
        saved = self.network.save()
        tensors = {f"{WEIGHT}.{name}": tensor for name, tensor in saved.weights.items()} | saved.optimizer
        tensors[UPDATES] = torch.tensor(self.network.updates)
        return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}

    def load(self, checkpoint: Path) -> None:
        """Load weights, moments and number of updates."""
        updates = int(read_optimizer_tensor(checkpoint, f"{PREFIX}{UPDATES}"))
        self.network.restore(checkpoint, updates, PREFIX, f"{PREFIX}{WEIGHT}.")
