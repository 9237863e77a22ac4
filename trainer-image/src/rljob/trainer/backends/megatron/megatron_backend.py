"""The Megatron backend: Megatron-Core with its parallelisms and its distributed optimizer.

Parameters are in the job's dtype; float32 weights and moments are distributed over the ranks that hold the same
parameters. Weights and moments are read and saved as whole tensors with Hugging Face names, like those of the FSDP2
backend, so a checkpoint does not depend on the layout or on the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rljob.api.roles import Optimizer, Trainer
from rljob.trainer.backends.base import Loss, OptimizerUpdate, Output, SavedState
from rljob.trainer.backends.megatron.frozen_network import FrozenMegatronModel
from rljob.trainer.backends.megatron.megatron_network import MegatronNetwork
from rljob.trainer.backends.megatron.process_grid import make_grid
from rljob.trainer.backends.megatron.stage_inputs import packed_rows
from rljob.trainer.backends.megatron.trained_network import TrainedNetwork
from rljob.trainer.backends.megatron.value_network import MegatronValues
from rljob.trainer.backends.trained_critic import TrainedCritic
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_state
from rljob.trainer.process_group import World


class MegatronBackend:
    """See :class:`rljob.trainer.backends.base.Backend`.

    Args:
        source: Hugging Face directory of the weights to start from.
        settings: the job's trainer.
        world: the ranks.

    Raises:
        ModelError: the directory has no model that can be trained, or not in this layout.
    """

    def __init__(self, source: Path, settings: Trainer, world: World) -> None:
        self._settings = settings
        self._grid = make_grid(world, settings.parallelism)
        self.world = self._grid.world
        self._network = MegatronNetwork(source, settings, self._grid)
        self._trained = TrainedNetwork(self._network, settings.optimizer)
        self._trained.read(source)
        self.dtype: torch.dtype = self._network.dtype
        self.vocabulary = self._network.vocabulary
        self.packs = self._network.layout is packed_rows

    def run(self, microbatches: Sequence[Microbatch], loss: Loss | None, entropy: bool = False) -> list[Output]:
        """Run the microbatches through the stages; see :class:`Backend`."""
        of_tensors = None if loss is None else (lambda i, results_BKE: loss(i, _output(results_BKE, entropy)))
        return [_output(results_BKE, entropy) for results_BKE in self._network.run(microbatches, of_tensors, entropy)]

    def update(self, step: int) -> OptimizerUpdate:
        """Exchange the gradients between replicas and stages, clip them, apply AdamW; see :class:`Backend`."""
        return self._trained.update(step)

    @property
    def updates(self) -> int:
        """Optimizer updates since the start of the run."""
        return self._trained.updates

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call."""
        return self._trained.metrics()

    def named_tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter as a whole tensor on rank 0; see :class:`Backend`. Other ranks get empty tensors."""
        part = partial(self._trained.weight, dtype=dtype)
        return self._network.exchange.whole_tensors(part, dtype, self.world.device)

    def save(self) -> SavedState:
        """Return this rank's part of the weights, and of AdamW's moments, named ``exp_avg.NAME`` and
        ``exp_avg_sq.NAME``, as the FSDP2 backend does."""
        return self._trained.save()

    def load(self, checkpoint: Path) -> None:
        """Load the moments and the number of updates of a checkpoint."""
        self._trained.restore(checkpoint, read_state(checkpoint).updates)

    def load_frozen(self, source: Path) -> FrozenMegatronModel:
        """Return a model that is not trained, in this layout; see :class:`LoadsFrozenModels`."""
        return FrozenMegatronModel(source, self._settings_of_others(), self._grid)

    def load_critic(self, source: Path, optimizer: Optimizer) -> TrainedCritic[MegatronValues]:
        """Return a critic in this layout; see :class:`TrainsCritic`."""
        return TrainedCritic(MegatronValues(source, self._settings_of_others(), optimizer, self._grid))

    def _settings_of_others(self) -> Trainer:
        """Return the settings of models beside this one, which get their inputs in its layout."""
        return self._settings.model_copy(update={"packing": "varlen" if self.packs else "none"})


def _output(results_BKE: Tensor, entropy: bool) -> Output:
    return Output(results_BKE[..., 0], results_BKE[..., 1] if entropy else None)
