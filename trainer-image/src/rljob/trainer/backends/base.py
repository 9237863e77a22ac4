"""Interface of a backend: one model, sharded over the ranks, with its optimizer.

``spec.trainer.backend`` names a callable with the parameters (source, settings, world): a built-in name or
``module:attribute`` of a user's package. ``source`` is the Hugging Face directory of the weights to start from, a model
or a checkpoint; ``settings`` is ``spec.trainer``. With ``settings.lora`` it is always the initial model, and
:meth:`Backend.load` loads the adapters of a checkpoint. The callable returns a :class:`Backend` and raises ModelError
for a directory without a model that it can train.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from rljob.api.roles import Optimizer, Trainer
from rljob.trainer.batch import Microbatch
from rljob.trainer.process_group import World


@dataclass(frozen=True)
class Output:
    """Result of a forward pass for the targets of a microbatch."""

    logprobs_BK: Tensor  # at each row's temperature, at least float32
    entropy_BK: Tensor | None = None  # of the distribution at the row's temperature, in nats; on request

    def detach(self) -> Output:
        """Return the log-probabilities without gradient."""
        return Output(self.logprobs_BK.detach())


Loss: TypeAlias = Callable[[int, Output], Tensor]
"""(index of the microbatch, its output with gradient) → this microbatch's share of the loss: a scalar. The loss of an
update is the sum of all shares of all replicas."""


ValueLoss: TypeAlias = Callable[[int, Tensor], Tensor]
"""(index of the microbatch, its values (B, K) with gradient) → this microbatch's share of the critic's loss: a scalar.
The loss of an update is the sum of all shares of all replicas."""


@dataclass(frozen=True)
class OptimizerUpdate:
    """Result of one optimizer update."""

    norm: float  # of the gradient before clipping
    learning_rate: float
    skipped: bool = False  # the weights did not change because the gradient was not finite


@dataclass(frozen=True)
class SavedState:
    """The tensors that this rank writes to a checkpoint: whole tensors on the CPU. All ranks together have all tensors;
    of a tensor that several ranks have, the first one's is written. They share no memory with the model or the
    optimizer: they are written while training continues."""

    weights: dict[str, Tensor]  # float32, by Hugging Face name, adapters merged
    optimizer: dict[str, Tensor]  # ``STATE.NAME``, also of the critic; only the backend reads them


class Backend(Protocol):
    """One model and its optimizer on this rank. All ranks call each method together, in the same order."""

    world: World
    """The world from the factory, with the data-parallel rank and size that follow from the backend's parallelism."""
    dtype: torch.dtype
    """Type of forward and backward passes, and of weights on the wire."""
    vocabulary: int
    """Number of token ids."""
    updates: int
    """Optimizer updates since the start of the run."""

    def run(self, microbatches: Sequence[Microbatch], loss: Loss | None, entropy: bool = False) -> list[Output]:
        """Run the microbatches through the model; return their outputs without gradient.

        The backend owns the schedule, recomputation and the scaling between replicas. Each replica gets the same number
        of microbatches. Every rank of a replica gets the outputs and calls the loss, which also collects metrics.

        Args:
            microbatches: of this replica, for one update.
            loss: its gradients are added to the gradients since the last update. None: forward passes only.
            entropy: whether outputs have the entropy, with gradient. It is passed only if the algorithm needs it, so a
                backend without it has no such parameter.
        """
        ...

    def update(self, step: int) -> OptimizerUpdate:
        """Apply the gradients to the weights and clear them.

        Gradients that are not finite are not applied: weights, optimizer and ``updates`` stay as they are, and the
        result says ``skipped``, on all ranks. After several in a row the run ends.

        Args:
            step: 0-based training step, for the learning rate.

        Raises:
            UnrecoverableError: the gradient cannot be applied; raised on all ranks.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, by name, for example ``seconds_forward``. They go to StepDone."""
        ...

    def named_tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter as a whole tensor, by Hugging Face name; tied parameters are yielded once.

        Every rank gets every name; only rank 0 reads the tensors. A tensor may share memory with the model: copy it to
        keep it beyond the next update.

        Args:
            dtype: of the tensors; float32 gives the exact weights.
        """
        ...

    def save(self) -> SavedState:
        """Return this rank's part of the state of the model for a checkpoint. The state does not depend on the number
        of ranks, and a backend that resumes from it yields the same bits from :meth:`named_tensors`; otherwise the
        checkpoint is refused.

        The backend writes no file: each rank writes its part while training continues, and again while the disk is
        full.
        """
        ...

    def load(self, checkpoint: Path) -> None:
        """Load the optimizer, ``updates``, and adapters from the checkpoint to resume from.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        ...


class FrozenModel(Protocol):
    """A model that is not trained, as reference or teacher, with the parallelism of the backend that made it. All ranks
    call each method together."""

    vocabulary: int
    """Number of token ids."""

    def run(self, microbatches: Sequence[Microbatch]) -> list[Output]:
        """Return the outputs of forward passes, without gradient; see :meth:`Backend.run`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call: ``seconds_frozen``."""
        ...


@runtime_checkable
class LoadsFrozenModels(Protocol):
    """A backend that also runs models that are not trained. A job that needs one is refused with any other backend."""

    def load_frozen(self, source: Path) -> FrozenModel:
        """Return the model of a Hugging Face directory, with the dtype and the parallelism of the backend.

        Raises:
            ModelError: the directory has no causal language model.
        """
        ...


@runtime_checkable
class PacksRows(Protocol):
    """A backend that may compute the rows of a microbatch without padding."""

    packs: bool
    """Whether it does. Then microbatches are filled by the tokens of their rows, not by padded positions."""


class Critic(Protocol):
    """A model with one output, the value of the state before each token, and its optimizer, with the parallelism of the
    backend that made it. All ranks call each method together."""

    def run(self, microbatches: Sequence[Microbatch], loss: ValueLoss | None) -> list[Tensor]:
        """Return the value before each target of each microbatch, (B, K) in at least float32, without gradient.

        Args:
            microbatches: of this replica, for one update.
            loss: its gradients are added to the gradients since the last update. None: forward passes only.
        """
        ...

    def update(self, step: int) -> OptimizerUpdate:
        """Apply the gradients to the weights and clear them; see :meth:`Backend.update`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call: ``seconds_critic``."""
        ...

    def save(self) -> dict[str, Tensor]:
        """Return this rank's part of weights, moments and number of updates for a checkpoint, by names that begin with
        ``critic.``; see :meth:`Backend.save`. They are written beside the optimizer of the policy."""
        ...

    def load(self, checkpoint: Path) -> None:
        """Load what :meth:`save` returned from the checkpoint to resume from.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        ...


@runtime_checkable
class TrainsCritic(Protocol):
    """A backend that also trains a critic. A job that needs one is refused with any other backend."""

    def load_critic(self, source: Path, optimizer: Optimizer) -> Critic:
        """Return a critic that starts from a Hugging Face directory, with a new output layer whose values are 0.

        Raises:
            ModelError: the directory has no causal language model that can be trained.
        """
        ...


BackendFactory: TypeAlias = Callable[[Path, Trainer, World], Backend]
"""(source, spec.trainer, world) → backend."""
