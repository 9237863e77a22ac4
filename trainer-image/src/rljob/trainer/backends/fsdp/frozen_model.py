"""A model that is not trained, sharded like the policy: forward passes only, in the type of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from rljob.api.roles import Trainer
from rljob.trainer.backends.base import Output
from rljob.trainer.backends.fsdp.output_layer import TargetLogprobs
from rljob.trainer.backends.fsdp.packing import choose_layout
from rljob.trainer.backends.fsdp.read_weights import meta_model, read_weights
from rljob.trainer.backends.fsdp.sharding import free_whole_parameters, shard
from rljob.trainer.batch import Microbatch
from rljob.trainer.metrics import Stopwatch
from rljob.trainer.process_group import World


class FrozenFsdpModel:
    """See :class:`rljob.trainer.backends.base.FrozenModel`. Each rank reads and keeps its rows of the parameters; a
    layer is whole on a rank only during its forward pass.

    Args:
        source: Hugging Face directory.
        settings: of the job; ``dtype`` is that of parameters and forward passes, ``packing`` the layout of the policy.
        mesh: of the backend.
        world: the ranks.

    Raises:
        ModelError: the directory has no causal language model, or one that cannot compute packed rows.
    """

    def __init__(self, source: Path, settings: Trainer, mesh: DeviceMesh, world: World) -> None:
        dtype: torch.dtype = getattr(torch, str(settings.dtype))
        self.model, conversions = meta_model(source)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        self.vocabulary: int = self.model.config.get_text_config().vocab_size
        if mesh.size() > 1 or dtype != torch.float32:  # as the policy, so that equal weights give equal bits
            shard(self.model, mesh, dtype, True)
        read_weights(self.model, conversions, source, world)
        self._logprobs = TargetLogprobs(self.model, choose_layout(self.model, settings, world, dtype, source))
        self._watch = Stopwatch(world.device)

    def run(self, microbatches: Sequence[Microbatch]) -> list[Output]:
        """Return the outputs of forward passes, without gradient."""
        with torch.no_grad(), self._watch.time("seconds_frozen"):
            outputs = [self._logprobs(microbatch) for microbatch in microbatches]
        free_whole_parameters(self.model)
        return outputs

    def metrics(self) -> dict[str, float]:
        """Return the seconds in forward passes since the last call."""
        return self._watch.take()
