"""What would keep a trainer from starting on this machine, found in a moment: no torch, no connection, no file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rljob.api.resolve import IN_STORAGE
from rljob.protocol.environment import ComponentEnvironment
from rljob.trainer import model_directory

DEVICES = Path("/dev")


def check(environment: ComponentEnvironment) -> Iterator[str]:
    """Yield one sentence for everything that is wrong. A model that the initializer has not made yet is left out."""
    spec = environment.job.spec
    for i, model in enumerate(spec.models):
        path = environment.path(model.source)
        if model.name == "policy" and not (model.source.startswith(IN_STORAGE) and not path.exists()):
            yield from (f"spec.models[{i}].source: {problem}" for problem in model_directory.problems(path))
    gpus = count_gpus()
    if spec.weight_sync.transport == "nccl" and not gpus:
        yield "spec.weightSync.transport: nccl needs NVIDIA GPUs and this machine has none; set auto or gloo"
    if gpus and spec.trainer.processes_per_node > gpus:
        yield (
            f"spec.trainer.processesPerNode: {spec.trainer.processes_per_node} processes need a GPU each and this "
            f"machine has {gpus}; lower it"
        )


def count_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(list(DEVICES.glob("nvidia[0-9]*")))
    return devices if visible is None else min(devices, len([name for name in visible.split(",") if name.strip()]))
