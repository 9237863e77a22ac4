"""Checks before a trainer starts on this machine: fast, without importing torch, connecting or writing files.

Modules of a user are imported, with whatever they import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rljob.api.extensions import BACKENDS, load
from rljob.api.models import RLJobSpec
from rljob.api.resolve import IN_STORAGE
from rljob.protocol.environment import ComponentEnvironment
from rljob.trainer import model_directory
from rljob.trainer.algorithms.needs import FUNCTIONS, needs_of

DEVICES = Path("/dev")


def check(environment: ComponentEnvironment) -> Iterator[str]:
    """Yield a sentence for each problem. A model that the initializer has not made yet is not checked, nor is the model
    of a user's backend, because only the backend knows which models it can load."""
    spec = environment.job.spec
    yield from reference_problems(spec)
    for i, model in enumerate(spec.models if spec.trainer.backend in BACKENDS else ()):
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


def reference_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield a sentence for each reference of the algorithm and the backend to user code that cannot be used.

    Built-in names are not imported, because their import takes seconds.
    """
    references = [(f"spec.algorithm.{name}", table, getattr(spec.algorithm, name)) for name, table in FUNCTIONS.items()]
    for field, registry, value in [*references, ("spec.trainer.backend", BACKENDS, spec.trainer.backend)]:
        if value is None or value in registry:
            continue
        try:
            found = load(registry, value, field)
        except ValueError as error:
            yield str(error)
            continue
        if not callable(found):
            yield f"{field}: {value} is not callable; name a function or a class"
        elif missing := needs_of(found).unsupported():
            yield f"{field}: {value} needs {', '.join(missing)}, which no backend computes yet"


def count_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(list(DEVICES.glob("nvidia[0-9]*")))
    return devices if visible is None else min(devices, len([name for name in visible.split(",") if name.strip()]))
