"""Checks before loading whether a job fits the memory and disk of this machine, from the size of its model.

Memory of a job on CPU: the trainer's float32 weights, gradients and two AdamW moments (16 bytes per parameter, sharded
over its ranks), and a copy of the weights if it computes in bfloat16; for every engine its weights and its key-value
cache (of a user's engine: `kvCacheBytes` only). On disk a checkpoint is weights and moments in float32.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from rljob.api.engine_registry import cpu_cache_bytes
from rljob.api.models import RLJob
from rljob.api.resolve import in_storage
from rljob.local import commands
from rljob.local.errors import CliError
from rljob.protocol.checkpoint_files import WEIGHTS_PATTERN, read_header

BYTES = {"float32": 4, "bfloat16": 2}
TRAINED_BYTES = 16
CHECKPOINT_BYTES = 12
MIN_DISK_BYTES = 32 << 20
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Need:
    """Memory that one item needs, in bytes."""

    size: int
    what: str
    advice: str


def check(job: RLJob, storage: Path) -> list[str]:
    """Return warnings on scarce memory.

    Args:
        job: resolved, with absolute paths.
        storage: the run directory; it need not exist yet.

    Raises:
        CliError: with exit code 2: memory or disk is too small.
    """
    i, source = next((i, model.source) for i, model in enumerate(job.spec.models) if model.name == "policy")
    parameters = count_parameters(Path(in_storage(source, storage)))
    _check_disk(job, storage, parameters)
    if commands.GPU.exists():
        return []  # the memory of the GPUs is the limit, and frameworks divide it
    needs = _needs(job, f"spec.models[{i}].source", parameters)
    total, available = _memory()
    needed, biggest = sum(need.size for need in needs), max(needs, key=lambda need: need.size)
    share = f"{_format_bytes(biggest.size)} of it for {biggest.what}"
    sentence = f"the job needs {_format_bytes(needed)} of memory at least, {share}"
    if needed > total:
        raise CliError(f"{sentence}, and this machine has {_format_bytes(total)}; {biggest.advice}", 2)
    if needed > available:
        return [f"{sentence}, and {_format_bytes(available)} are free now; {biggest.advice}, or end other programs"]
    return []


def count_parameters(model: Path) -> int:
    """Return the number of parameters in the safetensors files of a model's directory; 0 if it is unknown."""
    count = 0
    for path in model.glob(WEIGHTS_PATTERN):
        try:
            count += sum(math.prod(tensor["shape"]) for tensor in read_header(path).values())
        except (OSError, ValueError, KeyError, TypeError):
            return 0  # the check of the trainer reports the error
    return count


def _needs(job: RLJob, source: str, parameters: int) -> list[Need]:
    trainer = job.spec.trainer
    each = TRAINED_BYTES + (BYTES[trainer.dtype] if trainer.dtype != "float32" else 0)
    needs = [
        Need(
            each * parameters,
            f"the trainer's weights, gradients and optimizer of {parameters:,} parameters",
            f"choose a smaller model in {source}",
        )
    ]
    for i, pool in enumerate(job.spec.rollouts):
        engines, path = pool.replicas.min, f"spec.rollouts[{i}]"
        cache = engines * (pool.kv_cache_bytes or cpu_cache_bytes(pool.engine))
        needs.append(Need(cache, f"the key-value caches of pool {pool.name}", f"lower {path}.kvCacheBytes"))
        size = engines * BYTES[pool.dtype] * parameters
        needs.append(Need(size, f"the weights in {engines} engines of pool {pool.name}", f"lower {path}.replicas.min"))
    return needs


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
            f"the disk of {storage} is full ({_format_bytes(free)} free); make room, or choose another --run-dir", 2
        )
    if needed > free:
        raise CliError(
            f"{count} checkpoints of {_format_bytes(CHECKPOINT_BYTES * parameters)} do not fit the disk of {storage} "
            f"with its {_format_bytes(free)} free; lower spec.checkpoints.keep, make room, or choose another --run-dir",
            2,
        )


def _memory() -> tuple[int, int]:
    """Return the total and the available memory of this machine or container, in bytes."""
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    meminfo = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines}
    limits = [int(text) for path in CGROUP_LIMITS if path.exists() and (text := path.read_text().strip()).isdecimal()]
    total = min([meminfo["MemTotal"], *limits])
    return total, min(total, meminfo["MemAvailable"])


def _format_bytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
