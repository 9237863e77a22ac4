"""A model of Megatron-Core that is not trained, on the grid of the policy: forward passes only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rljob.api.roles import Trainer
from rljob.trainer.backends.base import Output
from rljob.trainer.backends.megatron.megatron_network import MegatronNetwork
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.batch import Microbatch


class FrozenMegatronModel:
    """See :class:`rljob.trainer.backends.base.FrozenModel`. Each rank reads and keeps its part of the parameters.

    Args:
        source: Hugging Face directory.
        settings: of the job.
        grid: the ranks.

    Raises:
        ModelError: the directory has no model that can be computed, or not in this layout.
    """

    def __init__(self, source: Path, settings: Trainer, grid: ProcessGrid) -> None:
        self._network = MegatronNetwork(source, settings, grid, trained=False)
        self.vocabulary = self._network.vocabulary
        self._network.read(source, self._assign)

    def run(self, microbatches: Sequence[Microbatch]) -> list[Output]:
        """Return the outputs of forward passes, without gradient."""
        return [Output(results_BK1.squeeze(-1)) for results_BK1 in self._network.run(microbatches, None)]

    def metrics(self) -> dict[str, float]:
        """Return the seconds in forward passes since the last call."""
        return {"seconds_frozen": sum(self._network.metrics().values())}

    def _assign(self, name: str, content: Tensor) -> None:
        with torch.no_grad():
            self._network.parameters[name].copy_(content)
