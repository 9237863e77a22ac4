"""What follows for a job from the memory plan of its trainer: the tokens of a microbatch, and refusals.

Called by the command line before a run, and by the trainer when it starts, where the memory of the device is known. A
job is refused if the plan exceeds the whole memory of a device; the derived number of tokens leaves a part unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from rljob.api.algorithm_presets import POLICY, frozen_models
from rljob.api.backend_checks import PLANNED
from rljob.api.gpu_names import shares_gpu
from rljob.api.memory_plan import (
    DTYPE_BYTES,
    GRANULE,
    USABLE,
    AdapterSettings,
    Packing,
    TrainerSettings,
    fewest_ranks,
    most_tokens,
    plan_memory,
)
from rljob.api.memory_remedies import fields_that_help, ranks_that_help
from rljob.api.model_shape import ModelShape
from rljob.api.models import RLJobSpec
from rljob.api.roles import Lora, Trainer

Shapes: TypeAlias = Mapping[str, ModelShape]
"""Name of an entry of `models` → its numbers. Models whose numbers are not known are left out."""
UNKNOWN_TOKENS = 4096
"""Tokens of a microbatch on a GPU that an engine shares, or for a model or a backend whose memory is not known."""


def longest_sample(spec: RLJobSpec) -> tuple[str, int]:
    """Return the field and the number of tokens of the longest sample that the trainer may get."""
    lengths = [
        (f"spec.rollouts[{i}].maxModelLength", pool.max_model_length)
        for i, pool in enumerate(spec.rollouts)
        if not pool.frozen
    ]
    return max(lengths, key=lambda entry: entry[1])


def largest_microbatch(spec: RLJobSpec, tokens: int) -> int:
    """Return the padded tokens of the largest microbatch with a budget of ``tokens``: at least the longest sample, and
    at most a batch of samples of this length."""
    longest, training = longest_sample(spec)[1], spec.training
    return max(longest, min(tokens, training.prompts_per_step * training.samples_per_prompt * longest))


def settings_of(spec: RLJobSpec, models: Shapes, tokens: int | None = None) -> TrainerSettings:
    """Return what the memory of a resolved job's trainer depends on.

    Args:
        spec: of the resolved job.
        models: known ones.
        tokens: of the largest microbatch. Default: :func:`largest_microbatch` with `microbatchTokens`.
    """
    trainer = spec.trainer
    assert trainer.dtype is not None, "resolve() sets it"
    critic, optimizer = models.get(spec.algorithm.critic_model or ""), trainer.critic_optimizer
    shared = UNKNOWN_TOKENS if shares_gpu(spec) else 0
    return TrainerSettings(
        ranks=trainer.processes // trainer.parallelism.replicate,
        dtype=trainer.dtype,
        tokens=tokens or largest_microbatch(spec, trainer.microbatch_tokens or shared),
        recompute=trainer.recompute,
        packing=_packing(trainer),
        adapters=_adapters(trainer.lora),
        copies=trainer.parallelism.replicate,
        offload=trainer.optimizer.offload and trainer.accelerator.kind == "nvidia",
        frozen=tuple(models[name] for name in frozen_names(spec) if name in models),
        critic=replace(critic, values=True, tied=False) if critic is not None else None,
        critic_offload=bool(optimizer and optimizer.offload) and trainer.accelerator.kind == "nvidia",
    )


def _packing(trainer: Trainer) -> Packing:
    kernel = trainer.accelerator.kind == "nvidia" and trainer.dtype == "bfloat16"
    if trainer.packing == "none" or (trainer.packing == "auto" and not kernel):
        return "none"
    return "kernel" if kernel else "rows"


def frozen_names(spec: RLJobSpec) -> list[str]:
    """Return the names of the models that the trainer holds besides the trained policy, each once."""
    return list(dict.fromkeys(frozen_models(spec.algorithm).values()))


def _adapters(lora: Lora | None) -> AdapterSettings | None:
    if lora is None:
        return None
    return AdapterSettings(lora.rank, None if lora.targets is None else tuple(lora.targets))


def unknown_memory(spec: RLJobSpec, models: Shapes, device_bytes: int) -> str:
    """Return why the tokens of a microbatch cannot follow from the memory of a GPU; empty if they can.

    Args:
        spec: of a resolved job.
        models: known ones.
        device_bytes: memory of a GPU; 0: not known.
    """
    if reason := unknown_model(spec, models):
        return reason
    if shares_gpu(spec):
        return "trainer and engine share the memory of a GPU that their templates name"
    return "" if device_bytes else "the memory of the device is not known"


def unknown_model(spec: RLJobSpec, models: Shapes) -> str:
    """Return why the memory of the trainer is not planned; empty if it is. Arguments as in :func:`unknown_memory`."""
    if spec.trainer.backend != PLANNED:
        return f"the memory that {spec.trainer.backend} needs is not known"
    critic = [] if spec.algorithm.critic_model is None else [spec.algorithm.critic_model]
    for name in (POLICY, *frozen_names(spec), *critic):
        if name not in models or models[name].experts:
            return f"the memory that the model {name} needs is not known"
    return ""


def plans_policy(spec: RLJobSpec, models: Shapes) -> bool:
    """Return whether the memory of the policy is planned. Arguments as in :func:`unknown_memory`."""
    return spec.trainer.backend == PLANNED and POLICY in models and not models[POLICY].experts


def microbatch_tokens(spec: RLJobSpec, models: Shapes, device_bytes: int) -> int:
    """Return the tokens of a microbatch: `microbatchTokens`, or what fits the memory of a GPU, or
    :data:`UNKNOWN_TOKENS`; arguments as in :func:`unknown_memory`."""
    if spec.trainer.microbatch_tokens is not None:
        return spec.trainer.microbatch_tokens
    if unknown_memory(spec, models, device_bytes):
        return UNKNOWN_TOKENS
    return max(GRANULE, most_tokens(models[POLICY], settings_of(spec, models), device_bytes))


def trainer_problems(spec: RLJobSpec, models: Shapes, device_bytes: int, host_bytes: int = 0) -> Iterator[str]:
    """Yield a sentence if the trainer of a resolved job cannot fit the memory of its GPUs.

    Args:
        spec: of the resolved job.
        models: known ones; without the policy nothing is checked.
        device_bytes: memory of one GPU.
        host_bytes: memory of the trainer's machine, for the remedy; 0: not known.
    """
    if not plans_policy(spec, models):
        return
    model, settings = models[POLICY], settings_of(spec, models)
    plan = plan_memory(model, settings)
    if plan.device <= device_bytes:
        return
    most = most_tokens(model, settings, device_bytes)
    field, longest = longest_sample(spec)
    phase, peak = max(plan.phases.items(), key=lambda entry: entry[1].device)
    gpus = f"each of {spec.trainer.processes} GPUs has" if spec.trainer.processes > 1 else "the GPU has"
    sentence = f"{format_gib(peak.device)} on a GPU, and {gpus} {format_gib(device_bytes)}"
    fields = fields_that_help(model, settings, device_bytes, host_bytes)
    less = f", or set {fields}" if fields else ""
    if phase != "step" or not most:
        remedy = _remedy(model, settings_of(spec, models, longest), fields, device_bytes, host_bytes)
        yield (
            f"spec.trainer.processesPerNode: the phase {phase} of {sizes(model, settings)} needs {sentence}; {remedy}"
        )
    elif settings.tokens == longest:
        yield (
            f"{field}: training on a sample of {longest} tokens needs {sentence}, where {most} tokens fit; lower it, "
            f"raise spec.trainer.processesPerNode{less}"
        )
    else:
        lower = "lower it" if shares_gpu(spec) else "lower it, or remove it"
        yield (
            f"spec.trainer.microbatchTokens: a microbatch of {settings.tokens} tokens needs {sentence}, where {most} "
            f"tokens fit; {lower if spec.trainer.microbatch_tokens else f'set at most {most}'}{less}"
        )


def _remedy(model: ModelShape, settings: TrainerSettings, fields: str, device_bytes: int, host_bytes: int) -> str:
    """Return what a trainer needs whose state, or smallest microbatch, does not fit: more ranks, fields, or both.

    Args:
        model: the policy.
        settings: with the longest sample as microbatch.
        fields: with which the same ranks fit; empty if there are none.
        device_bytes: memory of one GPU.
        host_bytes: memory of the trainer's machine; 0: not known.
    """
    ways = []
    if (ranks := fewest_ranks(model, settings, device_bytes)) is not None:
        ways.append(f"use at least {ranks * settings.copies} processes")
        ways += ["fewer copies (spec.trainer.parallelism.replicate)"] if settings.copies > 1 else []
    if fields:
        ways.append(f"set {fields}")
    elif (both := ranks_that_help(model, settings, device_bytes, host_bytes)) and (ranks is None or both[1] < ranks):
        ways.append(f"set {both[0]} and use at least {both[1] * settings.copies} processes")
    return ", or ".join(ways or ["choose a smaller model"])


def engine_problems(spec: RLJobSpec, models: Shapes, device_bytes: int) -> Iterator[str]:
    """Yield a sentence for each pool of a resolved job whose weights and KV cache cannot fit the memory of its GPUs.

    Args:
        spec: of the resolved job.
        models: known ones; pools of others are not checked.
        device_bytes: memory of one GPU.
    """
    for i, pool in enumerate(spec.rollouts):
        assert pool.dtype is not None, "resolve() sets it"
        model = models.get(pool.model)
        if pool.accelerator.kind != "nvidia" or model is None:
            continue
        shards = pool.parallelism.tensor * pool.parallelism.pipeline
        weights = DTYPE_BYTES[pool.dtype] * model.parameters // shards
        cache = pool.kv_cache_bytes or 0
        if weights > device_bytes:
            yield (
                f"spec.rollouts[{i}].dtype: the {pool.dtype} weights of {model.parameters:,} parameters need "
                f"{format_gib(weights)} on a GPU of {format_gib(device_bytes)}; "
                f"{'set bfloat16' if pool.dtype == 'float32' else 'choose a smaller model'}"
            )
        elif weights + cache > device_bytes:
            yield (
                f"spec.rollouts[{i}].kvCacheBytes: {format_gib(cache)} and {format_gib(weights)} of weights do not fit "
                f"a GPU of {format_gib(device_bytes)}; lower it"
            )


def sizes(model: ModelShape, settings: TrainerSettings) -> str:
    """Return the numbers of parameters that a trainer holds, as text."""
    frozen = sum(shape.parameters for shape in settings.frozen)
    critic = f", {settings.critic.parameters:,} of a critic" if settings.critic is not None else ""
    other = f" and {frozen:,} that are not trained" if frozen else ""
    return f"{model.parameters:,} parameters{critic}{other}"


def describe_plan(spec: RLJobSpec, models: Shapes, device_bytes: int) -> list[str]:
    """Return the memory plan of a resolved job's trainer as lines of text; empty if the policy is not known.

    Args:
        spec: of the resolved job.
        models: known ones.
        device_bytes: memory of one GPU; 0: not known.
    """
    if not plans_policy(spec, models):
        return []
    model = models[POLICY]
    on_gpu = spec.trainer.accelerator.kind == "nvidia"
    tokens = microbatch_tokens(spec, models, device_bytes) if on_gpu else (spec.trainer.microbatch_tokens or 0)
    settings = settings_of(spec, models, largest_microbatch(spec, tokens))
    ranks = f"{settings.ranks} rank{'' if settings.ranks == 1 else 's'}"
    if (copies := spec.trainer.parallelism.replicate) > 1:
        ranks = f"{copies} copies of {ranks}"
    usable = f"; {USABLE:.0%} of {format_gib(device_bytes)} can be used" if on_gpu and device_bytes else ""
    if on_gpu and spec.trainer.microbatch_tokens is None and (why := unknown_memory(spec, models, device_bytes)):
        usable = f" ({why})"
    lines = [
        f"memory of the trainer's first process: {sizes(model, settings)}, {ranks}, {settings.dtype}, "
        f"microbatches of {tokens} tokens and samples of up to {longest_sample(spec)[1]}{usable}"
    ]
    for phase, peak in plan_memory(model, settings).phases.items():
        parts = f"GPU {format_gib(peak.device)}, host {format_gib(peak.host)}"
        lines.append(f"  {phase}: {parts if on_gpu else format_gib(peak.device + peak.host)}")
    return lines


def format_gib(size: int) -> str:
    """Return a size in GiB, or in MiB if it is small."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
