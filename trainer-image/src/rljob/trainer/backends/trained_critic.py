"""A critic: a network of a backend that gives values, with an optimizer and a state in checkpoints of its own.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rljob.trainer.backends.base import OptimizerUpdate, SavedState, ValueLoss
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_optimizer_tensor

PREFIX, WEIGHT, UPDATES = "critic.", "weight", "updates"
"""Parts of the names of a critic's tensors in a checkpoint."""


class ValueNetwork(Protocol):
    """A network with an output layer of one value, and its optimizer. All ranks call each method together."""

    @property
    def updates(self) -> int:
        """Optimizer updates since the start of the run."""
        ...

    def run_values(self, microbatches: Sequence[Microbatch], loss: ValueLoss | None) -> list[Tensor]:
        """Return the values (B, K) of each microbatch; see :meth:`Critic.run`."""
        ...

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradient, apply AdamW, clear the gradient."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call, by part."""
        ...

    def save(self) -> SavedState:
        """Return this rank's part of weights and moments."""
        ...

    def restore(self, checkpoint: Path, updates: int, moments: str, weights: str | None) -> None:
        """Load the state from the optimizer's file of a checkpoint.

        Args:
            checkpoint: to resume from.
            updates: number of updates.
            moments: begin of the names of the moments.
            weights: that of the names of the parameters; None: they are loaded already.
        """
        ...


Network = TypeVar("Network", bound=ValueNetwork)


class TrainedCritic(Generic[Network]):
    """See :class:`rljob.trainer.backends.base.Critic`.

    Args:
        network: of a backend.
    """

    def __init__(self, network: Network) -> None:
        self.network = network

    def run(self, microbatches: Sequence[Microbatch], loss: ValueLoss | None) -> list[Tensor]:
        """Return the values (B, K) of each microbatch; see :meth:`Critic.run`."""
        return self.network.run_values(microbatches, loss)

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
