"""Memory of this machine that the roles of a job need. Pure. Called by :mod:`rljob.local.capacity`.

The trainer's: the plan of :mod:`rljob.api.memory_plan`, of all its processes. On a CPU that is all memory, on GPUs the
copies on the host. On a CPU, of models whose memory is not planned: float32 weights, gradients and two AdamW moments
(16 bytes per parameter, sharded over the ranks), a copy of the weights if it computes in bfloat16, and the copy of a
checkpoint that is written while training continues. For every engine on a CPU: its weights, once per data-parallel
replica, and the key-value cache of each worker (of a user's engine: `kvCacheBytes` only).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rljob.api.algorithm_presets import POLICY
from rljob.api.engine_registry import cpu_cache_bytes
from rljob.api.memory_checks import Shapes, longest_sample, plans_policy, settings_of, sizes, unknown_model
from rljob.api.memory_plan import (
    DTYPE_BYTES,
    GRANULE,
    AdapterSettings,
    TrainerSettings,
    largest,
    shared_host_bytes,
    shared_memory,
)
from rljob.api.model_shape import ModelShape
from rljob.api.models import RLJob

TRAINED_BYTES = 16
CHECKPOINT_BYTES = 12
SOME_RANK = 32
"""Rank of the adapters with which a remedy is tried."""


@dataclass(frozen=True)
class Need:
    """Memory that one item needs, in bytes: at least ``size``, at most ``most`` where both are known."""

    size: int
    what: str
    advice: str
    most: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", max(self.size, self.most))


@dataclass(frozen=True)
class Sizes:
    """Models of a job, as far as they are known.

    ``parameters``: model of a pool → its parameters. ``frozen``: parameters of the models in the trainer that are not
    trained. ``critic``: parameters of the critic. ``shapes``: numbers of the models of known kinds.
    """

    parameters: Mapping[str, int]
    frozen: int = 0
    critic: int = 0
    shapes: Shapes = field(default_factory=dict)


def memory_needs(job: RLJob, source: str, models: Sizes, total: int) -> list[Need]:
    """Return the needs of the trainer and of the engines that run on CPU.

    Args:
        job: resolved.
        source: field of the policy.
        models: of the job.
        total: memory of this machine.
    """
    engines = list(_engines(job, models))
    room, spec = total - sum(need.size for need in engines), job.spec
    if spec.trainer.accelerator.kind != "cpu":
        known = plans_policy(spec, models.shapes)
        return [_host_of_gpus(job, source, models.shapes, room), *engines] if known else engines
    if not unknown_model(spec, models.shapes):
        return [_planned(job, source, models.shapes, room), *engines]
    return [*_estimates(job, source, models), *engines]


def _planned(job: RLJob, source: str, shapes: Shapes, room: int) -> Need:
    """Return the need of a trainer on CPU, from its plan."""
    model, settings = shapes[POLICY], settings_of(job.spec, shapes)
    least, most = shared_memory(model, settings)
    what = f"the trainer with {sizes(model, settings)} and microbatches of up to {settings.tokens} tokens"
    return Need(least, what, _smaller_step(job, source, model, settings, room), most)


def _smaller_step(job: RLJob, source: str, model: ModelShape, settings: TrainerSettings, room: int) -> str:
    """Return the field with which a trainer on CPU fits ``room`` bytes."""
    path, longest = longest_sample(job.spec)
    layer = replace(settings, recompute="layer")
    tried = [("", settings)] if settings.recompute == "layer" else [("", settings), ("recompute: layer", layer)]
    for recompute, changed in tried:
        if recompute and shared_memory(model, changed)[1] <= room:
            return f"set spec.trainer.{recompute}"
        if tokens := _fitting_tokens(model, changed, room, longest):
            also = f"set spec.trainer.{recompute} and " if recompute else ""
            return f"{also}lower spec.trainer.microbatchTokens to {tokens}"
    recompute, changed = tried[-1]
    if tokens := _fitting_tokens(model, changed, room):
        also = f"set spec.trainer.{recompute} and " if recompute else ""
        return f"{also}lower {path} and spec.trainer.microbatchTokens to {tokens}"
    return f"choose a smaller model in {source}"


def _fitting_tokens(model: ModelShape, settings: TrainerSettings, room: int, longest: int = 1) -> int:
    """Return the most tokens of a microbatch, fewer than now and at least ``longest``, that fit ``room`` bytes; 0 if
    none do."""

    def tokens(granules: int) -> int:
        return max(longest, GRANULE * granules)

    def fits(granules: int) -> bool:
        return shared_memory(model, replace(settings, tokens=tokens(granules)))[1] <= room

    found = largest(fits, (settings.tokens - 1) // GRANULE)
    return tokens(found) if found and tokens(found) < settings.tokens else 0


def _host_of_gpus(job: RLJob, source: str, shapes: Shapes, room: int) -> Need:
    """Return the need of a trainer on GPUs of this machine's memory."""
    model, settings = shapes[POLICY], settings_of(job.spec, shapes)
    offloads = settings.offload or settings.critic_offload
    optimizer = ", the offloaded optimizer" if offloads else ""
    what = f"the trainer's weights for the engines{optimizer} and a checkpoint of {sizes(model, settings)}"
    return Need(shared_host_bytes(model, settings), what, _smaller_host(job, source, model, settings, room))


def _smaller_host(job: RLJob, source: str, model: ModelShape, settings: TrainerSettings, room: int) -> str:
    """Return the field with which a trainer on GPUs fits ``room`` bytes of the host."""
    on_gpus = replace(settings, offload=False, critic_offload=False)
    optimizers = {"optimizer": settings.offload, "criticOptimizer": settings.critic_offload}
    fields = [f"spec.trainer.{name}.offload: false" for name, offloads in optimizers.items() if offloads]
    if fields and shared_host_bytes(model, on_gpus) <= room:
        return f"set {' and '.join(fields)}, with more GPUs (spec.trainer.processesPerNode) if they are needed"
    adapters = replace(on_gpus, adapters=AdapterSettings(SOME_RANK))
    if settings.adapters is None and shared_host_bytes(model, adapters) <= room:
        return f"train adapters (spec.trainer.lora{''.join(f', {each}' for each in fields)})"
    return f"choose a smaller model in {source}, or use a machine with more memory"


def _estimates(job: RLJob, source: str, models: Sizes) -> Iterator[Need]:
    """Yield the needs of a trainer on CPU whose memory is not planned."""
    trainer, parameters = job.spec.trainer, models.parameters[POLICY]
    assert trainer.dtype is not None, "resolve() sets it"
    each = TRAINED_BYTES + CHECKPOINT_BYTES + (DTYPE_BYTES[trainer.dtype] if trainer.dtype != "float32" else 0)
    what = f"the trainer's weights, gradients, optimizer and checkpoint of {parameters:,} parameters"
    yield Need(each * parameters, what, f"choose a smaller model in {source}")
    if models.frozen:
        what = f"the {models.frozen:,} parameters of the reference and teacher models"
        yield Need(DTYPE_BYTES[trainer.dtype] * models.frozen, what, "choose smaller ones in spec.models")
    if models.critic:
        what = f"the critic's weights, gradients, optimizer and checkpoint of {models.critic:,} parameters"
        yield Need(each * models.critic, what, "choose a smaller model in spec.algorithm.criticModel")


def _engines(job: RLJob, models: Sizes) -> Iterator[Need]:
    """Yield the needs of the engines on CPU."""
    for i, pool in enumerate(job.spec.rollouts):
        if pool.accelerator.kind != "cpu":
            continue
        assert pool.dtype is not None, "resolve() sets it"
        engines, path = pool.replicas.min, f"spec.rollouts[{i}]"
        cache = engines * pool.parallelism.workers * (pool.kv_cache_bytes or cpu_cache_bytes(pool.engine))
        yield Need(cache, f"the key-value caches of pool {pool.name}", f"lower {path}.kvCacheBytes")
        size = engines * pool.parallelism.data * DTYPE_BYTES[pool.dtype] * models.parameters[pool.model]
        yield Need(size, f"the weights in {engines} engines of pool {pool.name}", f"lower {path}.replicas.min")
