"""A network of Megatron-Core whose output layer gives the value of the state before each token, for a critic.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, k positions of this rank, H
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rljob.api.roles import Optimizer, Trainer
from rljob.trainer.backends.base import ValueLoss
from rljob.trainer.backends.megatron.megatron_network import MegatronNetwork
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.backends.megatron.trained_network import TrainedNetwork
from rljob.trainer.batch import Microbatch


class WholeValueHead(nn.Module):
    """The output layer of a critic, whole on every tensor-parallel rank. It computes in at least float32: a bfloat16
    value has three digits. The values of a new critic are 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, input: Tensor, *others: Any, **options: Any) -> tuple[Tensor, None]:
        """Return the values (k, B, 1) for inputs (k, B, H), and no bias, as the library's output layers do."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        return linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype)), None


class MegatronValues(TrainedNetwork):
    """The trained network of a critic; see :class:`rljob.trainer.backends.trained_critic.ValueNetwork`.

    Args:
        source: Hugging Face directory that all parameters but those of the output layer start from.
        settings: the job's trainer.
        optimizer: of the critic.
        grid: the ranks.

    Raises:
        ModelError: the directory has no model that can be trained, or not in this layout.
    """

    def __init__(self, source: Path, settings: Trainer, optimizer: Optimizer, grid: ProcessGrid) -> None:
        super().__init__(MegatronNetwork(source, settings, grid, head=WholeValueHead), optimizer)
        self.read(source)

    def run_values(self, microbatches: Sequence[Microbatch], loss: ValueLoss | None) -> list[Tensor]:
        """Return the values (B, K) of each microbatch; see :meth:`Critic.run`."""
        of_tensors = None if loss is None else (lambda i, values_BK1: loss(i, values_BK1.squeeze(-1)))
        return [values_BK1.squeeze(-1) for values_BK1 in self._network.run(microbatches, of_tensors)]
