"""The padded tokens of a microbatch, and the check that a step fits the memory of the GPU, when the trainer starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from rljob.api.memory_checks import microbatch_tokens, trainer_problems, unknown_memory
from rljob.api.model_shape import shape_of
from rljob.api.models import RLJobSpec
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)


def microbatch_budget(spec: RLJobSpec, sources: Mapping[str, Path], world: World) -> int:
    """Return the padded tokens of a microbatch, the same on all ranks: they need the same number of microbatches.

    Args:
        spec: of the resolved job.
        sources: directories of the weights to start from, and of the models that are not trained, by name in `models`.
        world: the ranks.

    Raises:
        ModelError: the trainer cannot fit the memory of the smallest GPU; raised on all ranks.
    """
    found = {name: shape_of(source) for name, source in sources.items()}
    models = {name: shape for name, shape in found.items() if shape is not None}
    device_bytes = min(world.gather(memory_of(world.device)))
    if device_bytes:
        for problem in trainer_problems(spec, models, device_bytes):
            raise ModelError(problem)
    tokens = microbatch_tokens(spec, models, device_bytes)
    if spec.trainer.microbatch_tokens is None:
        why = unknown_memory(spec, models, device_bytes) or "from the memory of the GPUs"
        log.info("microbatches of %d tokens (%s)", tokens, why)
    return tokens


def memory_of(device: torch.device) -> int:
    """Return the total memory of a GPU in bytes; 0 for a CPU, whose memory is shared."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
