"""Estimated peak memory of a rank of the Megatron backend, as a pure function of numbers of the model and the layout.

It adds up what Megatron-Core keeps; nothing of it was compared with the bytes that a GPU allocates. So it is shown, and
no job is refused because of it. What CUDA, NCCL and the allocator take besides the tensors is not part of it.

Symbols: t tensor-parallel, p pipeline-parallel, c context-parallel, e expert-parallel ranks; b bytes of the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob.api.algorithm_presets import POLICY
from rljob.api.memory_checks import Shapes, format_gib, frozen_names, largest_microbatch, microbatch_tokens
from rljob.api.memory_plan import CHUNK_BYTES, DTYPE_BYTES, FLOAT32, Dtype, Recompute, layer_bytes
from rljob.api.model_shape import ModelShape
from rljob.api.models import RLJobSpec
from rljob.api.roles import TrainerParallelism


@dataclass(frozen=True)
class MegatronLayout:
    """What the memory of a rank depends on besides the model.

    ``processes``: all ranks. ``tokens``: padded tokens of the largest microbatch, before context-parallel ranks divide
    it. ``frozen``: models that are not trained.
    """

    parallelism: TrainerParallelism
    processes: int
    dtype: Dtype
    tokens: int
    recompute: Recompute = "none"
    frozen: tuple[ModelShape, ...] = ()

    @classmethod
    def of(cls, spec: RLJobSpec, models: Shapes) -> MegatronLayout:
        """Return the layout of a resolved job. ``models``: known ones, by name; others are not counted."""
        trainer = spec.trainer
        assert trainer.dtype is not None, "resolve() sets it"
        tokens = largest_microbatch(spec, microbatch_tokens(spec, models, 0))
        frozen = tuple(models[name] for name in frozen_names(spec) if name in models)
        return cls(trainer.parallelism, trainer.processes, trainer.dtype, tokens, trainer.recompute, frozen)

    @property
    def copies(self) -> int:
        """Ranks that hold the same parameters, except experts."""
        return self.processes // (self.parallelism.tensor * self.parallelism.pipeline)

    @property
    def own_tokens(self) -> int:
        """Tokens of a microbatch that a rank keeps between the layers."""
        return -(-self.tokens // (self.parallelism.tensor * self.parallelism.context))


@dataclass(frozen=True)
class MegatronPeak:
    """Bytes of a rank on the device: weights, gradients and the optimizer's shard; kept by forward passes; of the
    output layer; of models that are not trained; weights, gradients and the optimizer's shard of a critic."""

    state: int
    activations: int
    output: int
    frozen: int
    critic: int = 0

    @property
    def device(self) -> int:
        """All of them."""
        return self.state + self.activations + self.output + self.frozen + self.critic


def estimate(model: ModelShape, layout: MegatronLayout) -> MegatronPeak:
    """Return the peak of the rank that has most: of the first or the last pipeline stage."""
    size, parallelism = DTYPE_BYTES[layout.dtype], layout.parallelism
    dense, experts = stage_parameters(model, parallelism)
    # With float32 the weights of the model are those of the optimizer.
    masters = (3 if layout.dtype != "float32" else 2) * FLOAT32
    state = (size + FLOAT32) * (dense + experts)
    state += masters * dense // layout.copies + masters * experts * parallelism.expert // layout.copies
    frozen = sum(size * sum(stage_parameters(shape, parallelism)) for shape in layout.frozen)
    return MegatronPeak(state, _activations(model, layout), _output(model, layout), frozen)


def estimate_of(spec: RLJobSpec, models: Shapes) -> MegatronPeak | None:
    """Return the peak of a rank of a resolved job's trainer; None with another backend, or for an unknown policy.

    Args:
        spec: of the resolved job.
        models: known ones, by name.
    """
    if spec.trainer.backend != "megatron" or POLICY not in models:
        return None
    layout = MegatronLayout.of(spec, models)
    peak, critic = estimate(models[POLICY], layout), models.get(spec.algorithm.critic_model or "")
    if critic is None:
        return peak
    return replace(peak, critic=estimate(replace(critic, values=True, tied=False), layout).state)


def describe_estimate(spec: RLJobSpec, models: Shapes) -> list[str]:
    """Return the estimate of a resolved job as lines of text, empty if there is none; see :func:`estimate_of`."""
    peak = estimate_of(spec, models)
    if peak is None:
        return []
    layout, where = MegatronLayout.of(spec, models), "GPU " if spec.trainer.accelerator.kind == "nvidia" else ""
    parts = {
        "weights, gradients and optimizer": peak.state,
        "forward passes": peak.activations,
        "output layer": peak.output,
        "models that are not trained": peak.frozen,
        "critic": peak.critic,
    }
    processes = f"{layout.processes} process{'' if layout.processes == 1 else 'es'}"
    return [
        f"memory of each process of the trainer, by an estimate: {models[POLICY].parameters:,} parameters, "
        f"{processes}, {layout.dtype}, microbatches of up to {layout.tokens} tokens: {where}{format_gib(peak.device)}",
        *(f"  {what}: {format_gib(size)}" for what, size in parts.items() if size),
    ]


def stage_parameters(model: ModelShape, parallelism: TrainerParallelism) -> tuple[int, int]:
    """Return the parameters of a rank outside of experts, and in them, of the stage that has most."""
    tensor, layers = parallelism.tensor, model.layers // parallelism.pipeline
    norms = 2 * model.hidden + (2 * model.head_size if model.norms_heads else 0)
    whole = norms + (model.mlp_parameters if model.experts else 0)
    split = model.block_parameters - model.expert_parameters - whole
    ends = 1 if model.tied or parallelism.pipeline > 1 else 2  # embedding and head; a stage has one of them
    dense = layers * (whole + split // tensor) + ends * model.embedding_parameters // tensor + model.hidden
    return dense, layers * model.expert_parameters // (tensor * parallelism.expert)


def _activations(model: ModelShape, layout: MegatronLayout) -> int:
    """Return what forward passes keep on the first stage, which starts most microbatches before its first backward
    pass, and what one layer needs in its backward pass."""
    size, parallelism, tokens = DTYPE_BYTES[layout.dtype], layout.parallelism, layout.own_tokens
    stages, groups = parallelism.pipeline, parallelism.virtual_pipeline
    layers = model.layers // (stages * groups)
    passes = stages if groups == 1 else 2 * (stages - 1) + (groups - 1) * stages + 1
    kept = size * model.hidden if layout.recompute == "layer" else _layer(model, layout.dtype)
    working = _layer(model, layout.dtype) + (size + FLOAT32) * (3 * model.intermediate + 2 * model.hidden)
    # Keys and values of all context-parallel ranks, as they were gathered and in the order of the row.
    gathered = 2 * 2 * size * model.key * layout.tokens // parallelism.tensor if parallelism.context > 1 else 0
    of_layers = 1 if layout.recompute == "layer" else passes * layers
    return (passes * layers * kept + working) * tokens + gathered * of_layers


def _layer(model: ModelShape, dtype: Dtype) -> int:
    """Return the bytes per token that a layer keeps. Each token visits the experts that it uses."""
    kept = layer_bytes(model, dtype)
    if not model.experts:
        return kept
    of_expert = DTYPE_BYTES[dtype] * (4 * model.intermediate + 2 * model.hidden)
    of_mlp = DTYPE_BYTES[dtype] * 4 * model.intermediate  # counted once in layer_bytes
    return kept - of_mlp + model.active_experts * of_expert + FLOAT32 * model.experts


def _output(model: ModelShape, layout: MegatronLayout) -> int:
    """Return the bytes of the logits of all targets of a microbatch, of their gradient, and of a chunk in float32."""
    size, tensor = DTYPE_BYTES[layout.dtype], layout.parallelism.tensor
    tokens = -(-layout.tokens // layout.parallelism.context)
    return 2 * size * tokens * model.vocabulary // tensor + 2 * CHUNK_BYTES
