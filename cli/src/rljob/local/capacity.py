"""Checks before loading whether a job fits the memory and disk of this machine, from the size of its model.

What the roles need is in :mod:`rljob.local.memory_needs`; the memory of GPUs is checked by
:mod:`rljob.api.memory_checks`. A checkpoint is weights and moments in float32, in memory as on disk.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob.api.algorithm_presets import POLICY
from rljob.api.megatron_memory import describe_estimate
from rljob.api.memory_checks import (
    Shapes,
    describe_plan,
    engine_problems,
    format_gib,
    frozen_names,
    trainer_problems,
)
from rljob.api.model_address import is_remote
from rljob.api.model_shape import ModelShape, shape_of
from rljob.api.models import RLJob
from rljob.api.resolve import in_storage
from rljob.local.errors import CliError
from rljob.local.gpu_assignment import memory_by_role
from rljob.local.memory_needs import CHECKPOINT_BYTES, Need, Sizes, memory_needs
from rljob.protocol.checkpoint_files import WEIGHTS_PATTERN, read_header
from rljob.protocol.gpus import Gpu
from rljob.protocol.model_cache import find_model

MIN_DISK_BYTES = 32 << 20
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MEMINFO = Path("/proc/meminfo")


def check(job: RLJob, storage: Path, gpus: Sequence[Gpu] = ()) -> list[str]:
    """Return warnings on scarce memory.

    Args:
        job: resolved, with absolute paths.
        storage: the run directory; it need not exist yet.
        gpus: of this machine.

    Raises:
        CliError: with exit code 2: memory, of the machine or of its GPUs, or disk is too small.
    """
    i, source = next((i, model.source) for i, model in enumerate(job.spec.models) if model.name == "policy")
    model = _model_directory(source, storage)
    parameters = count_parameters(model) if model is not None else 0  # unknown before the first download
    critic_model = job.spec.algorithm.critic_model
    critic = 0 if critic_model is None else _parameters_of([critic_model], job, storage)
    _check_disk(job, storage, parameters + critic)
    models, (total, available) = _shapes(job, storage), _memory()
    problems = list(_gpu_problems(job, models, gpus, total))
    parameters_of = {POLICY: parameters} | {
        pool.model: _parameters_of([pool.model], job, storage) for pool in job.spec.frozen_pools
    }
    frozen = _parameters_of(frozen_names(job.spec), job, storage)
    needs = memory_needs(job, f"spec.models[{i}].source", Sizes(parameters_of, frozen, critic, models), total)
    needed, most = sum(need.size for need in needs), sum(need.most for need in needs)
    biggest = max(needs, key=lambda need: need.size, default=Need(0, "nothing", ""))
    if needed > total:
        share = f"{format_gib(biggest.size)} of it for {biggest.what}"
        problems.append(
            f"the job needs {format_gib(needed)} of memory at least, {share}, and this machine has "
            f"{format_gib(total)}; {biggest.advice}"
        )
    if problems:
        raise CliError("\n".join(problems), 2)
    if most > available:
        share = f"{format_gib(biggest.most)} of it for {biggest.what}"
        bound = "at least" if most == needed else "at most"
        return [
            f"the job needs {format_gib(most)} of memory {bound}, {share}, and {format_gib(available)} are free now; "
            f"{biggest.advice}, or end other programs"
        ]
    return []


def memory_plan(job: RLJob, storage: Path, gpus: Sequence[Gpu]) -> list[str]:
    """Return the memory of a resolved job's trainer as text, planned or with Megatron-Core estimated; empty if the
    model has no config.json here."""
    models = _shapes(job, storage)
    return [*describe_plan(job.spec, models, memory_by_role(job, gpus)[0]), *describe_estimate(job.spec, models)]


def _parameters_of(names: Sequence[str], job: RLJob, storage: Path) -> int:
    """Return the parameters of several models, as far as their files exist here."""
    paths = [_model_directory(model.source, storage) for model in job.spec.models if model.name in names]
    return sum(count_parameters(path) for path in paths if path is not None)


def _shapes(job: RLJob, storage: Path) -> dict[str, ModelShape]:
    """Return the numbers of the models whose config.json exists here, by name."""
    paths = {model.name: _model_directory(model.source, storage) for model in job.spec.models}
    found = {name: shape_of(path) for name, path in paths.items() if path is not None}
    return {name: shape for name, shape in found.items() if shape is not None}


def _model_directory(source: str, storage: Path) -> Path | None:
    """Return the directory of a model; None before the first download of a remote model."""
    return find_model(source, storage) if is_remote(source) else Path(in_storage(source, storage))


def _gpu_problems(job: RLJob, models: Shapes, gpus: Sequence[Gpu], host_bytes: int) -> Iterator[str]:
    """Yield a sentence for each role that cannot fit the memory of its GPUs, as far as that is known."""
    of_trainer, of_engines = memory_by_role(job, gpus)
    if of_trainer:
        yield from trainer_problems(job.spec, models, of_trainer, host_bytes)
    if of_engines:
        yield from engine_problems(job.spec, models, of_engines)


def count_parameters(model: Path) -> int:
    """Return the number of parameters in the safetensors files of a model's directory; 0 if it is unknown."""
    count = 0
    for path in model.glob(WEIGHTS_PATTERN):
        try:
            count += sum(math.prod(tensor["shape"]) for tensor in read_header(path).values())
        except (OSError, ValueError, KeyError, TypeError):
            return 0  # the check of the trainer reports the error
    return count


def _check_disk(job: RLJob, storage: Path, parameters: int) -> None:
    nearest = next(path for path in (storage, *storage.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    kept = storage / "checkpoints"
    existing = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()) if kept.is_dir() else 0
    written = math.ceil(job.spec.training.steps / job.spec.checkpoints.every_steps)
    count = min(job.spec.checkpoints.keep + 1, written)  # a new one is written before the oldest is removed
    needed = count * CHECKPOINT_BYTES * parameters - existing
    if free < MIN_DISK_BYTES:
        raise CliError(
            f"the disk of {storage} is full ({format_gib(free)} free); make room, or choose another --run-dir", 2
        )
    if needed > free:
        raise CliError(
            f"{count} checkpoints of {format_gib(CHECKPOINT_BYTES * parameters)} do not fit the disk of {storage} "
            f"with its {format_gib(free)} free; lower spec.checkpoints.keep, make room, or choose another --run-dir",
            2,
        )


def _memory() -> tuple[int, int]:
    """Return the total and the available memory of this machine or container, in bytes."""
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    meminfo = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines}
    limits = [int(text) for path in CGROUP_LIMITS if path.exists() and (text := path.read_text().strip()).isdecimal()]
    total = min([meminfo["MemTotal"], *limits])
    return total, min(total, meminfo["MemAvailable"])
