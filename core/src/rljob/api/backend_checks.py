"""Which fields of the trainer each built-in backend supports: the checks in Python, and their rules in CEL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pydantic.alias_generators import to_camel

from rljob.api.roles import Optimizer, Trainer

PLANNED = "fsdp"
"""The backend that the memory plan describes (:mod:`rljob.api.memory_plan`)."""
NEEDS_MEGATRON = "needs backend megatron; set it, or remove this field"
NOT_MEGATRON = "is not supported by backend megatron; remove it, or set backend fsdp"
INDIVISIBLE = (
    "does not divide nodes × processesPerNode: every replica of the model needs tensor × pipeline × context processes; "
    "set divisors"
)
INDIVISIBLE_EXPERTS = (
    "does not divide the processes with the same part of the layers, nodes × processesPerNode / (tensor × pipeline); "
    "set a divisor"
)
NO_STAGES = "groups of layers need several pipeline stages; set pipeline above 1, or remove virtualPipeline"
PACKED_PARTS = "parts of packed samples are not computed; set packing: none, or context: 1"


@dataclass(frozen=True)
class UnsupportedField:
    """A field of `trainer` that a backend does not support.

    Args:
        backend: the built-in backend.
        field: path below `trainer`.
        is_set: whether a trainer has another value than the default.
        unset: the same condition in CEL, negated; ``self`` is the trainer.
        message: what is wrong, and the remedy.
    """

    backend: str
    field: str
    is_set: Callable[[Trainer], bool]
    unset: str
    message: str


_PARALLELISMS = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")


def _sizes_of_megatron() -> Iterator[UnsupportedField]:
    for name in _PARALLELISMS:
        field = f"parallelism.{to_camel(name)}"
        yield UnsupportedField("fsdp", field, partial(_divides, name), f"self.{field} == 1", NEEDS_MEGATRON)


def _divides(name: str, trainer: Trainer) -> bool:
    """Return whether a size of the parallelism is above 1."""
    return bool(getattr(trainer.parallelism, name) > 1)


def _settings_of_optimizers() -> Iterator[UnsupportedField]:
    for field in ("optimizer", "criticOptimizer"):
        absent = "" if field == "optimizer" else f"!has(self.{field}) || "
        yield UnsupportedField(
            "megatron",
            f"{field}.offload",
            partial(_optimizer_has, field, lambda optimizer: optimizer.offload),
            f"{absent}!self.{field}.offload",
            NOT_MEGATRON,
        )
        yield UnsupportedField(
            "megatron",
            f"{field}.decayed",
            partial(_optimizer_has, field, lambda optimizer: optimizer.decayed != "all"),
            f"{absent}self.{field}.decayed == 'all'",
            NOT_MEGATRON,
        )


def _optimizer_has(field: str, is_set: Callable[[Optimizer], bool], trainer: Trainer) -> bool:
    optimizer = trainer.optimizer if field == "optimizer" else trainer.critic_optimizer
    return optimizer is not None and is_set(optimizer)


UNSUPPORTED = (
    *_sizes_of_megatron(),
    UnsupportedField(
        "megatron",
        "parallelism.replicate",
        lambda trainer: trainer.parallelism.replicate > 1,
        "self.parallelism.replicate == 1",
        NOT_MEGATRON,
    ),
    UnsupportedField("megatron", "lora", lambda trainer: trainer.lora is not None, "!has(self.lora)", NOT_MEGATRON),
    *_settings_of_optimizers(),
)


def backend_problems(trainer: Trainer) -> Iterator[str]:
    """Yield one ``field: sentence`` for each field that the backend does not support."""
    parallelism = trainer.parallelism
    stage = parallelism.tensor * parallelism.pipeline
    if trainer.backend != "fsdp":
        sizes = f"tensor {parallelism.tensor} × pipeline {parallelism.pipeline} × context {parallelism.context}"
        if trainer.processes % (stage * parallelism.context):
            yield f"trainer.parallelism: {sizes} {INDIVISIBLE}"
        elif trainer.processes // stage % parallelism.expert:
            yield f"trainer.parallelism.expert: {parallelism.expert} {INDIVISIBLE_EXPERTS}"
        if parallelism.virtual_pipeline > 1 and parallelism.pipeline == 1:
            yield f"trainer.parallelism.virtualPipeline: {NO_STAGES}"
    if trainer.backend == "megatron" and parallelism.context > 1 and trainer.packing == "varlen":
        yield f"trainer.packing: {PACKED_PARTS}"
    for entry in UNSUPPORTED:
        if trainer.backend == entry.backend and entry.is_set(trainer):
            yield f"trainer.{entry.field}: {entry.message}"
