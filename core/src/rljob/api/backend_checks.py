"""Which fields of the trainer each built-in backend supports: the checks in Python, and their rules in CEL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rljob.api.roles import Trainer

PLANNED = "fsdp"
"""The backend that the memory plan describes (:mod:`rljob.api.memory_plan`)."""
NEEDS_MEGATRON = "needs backend megatron; set it, or remove this field"
NOT_MEGATRON = "is not supported by backend megatron; remove it, or set backend fsdp"
INDIVISIBLE = "does not divide nodes × processesPerNode; every replica of the model needs tensor × pipeline processes"


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


UNSUPPORTED = (
    UnsupportedField(
        "fsdp",
        "parallelism.tensor",
        lambda trainer: trainer.parallelism.tensor > 1,
        "self.parallelism.tensor == 1",
        NEEDS_MEGATRON,
    ),
    UnsupportedField(
        "fsdp",
        "parallelism.pipeline",
        lambda trainer: trainer.parallelism.pipeline > 1,
        "self.parallelism.pipeline == 1",
        NEEDS_MEGATRON,
    ),
    UnsupportedField(
        "megatron",
        "parallelism.replicate",
        lambda trainer: trainer.parallelism.replicate > 1,
        "self.parallelism.replicate == 1",
        NOT_MEGATRON,
    ),
    UnsupportedField(
        "megatron",
        "packing",
        lambda trainer: trainer.packing == "varlen",
        "self.packing != 'varlen'",
        NOT_MEGATRON,
    ),
    UnsupportedField(
        "megatron",
        "recompute",
        lambda trainer: trainer.recompute != "none",
        "self.recompute == 'none'",
        NOT_MEGATRON,
    ),
    UnsupportedField("megatron", "lora", lambda trainer: trainer.lora is not None, "!has(self.lora)", NOT_MEGATRON),
    UnsupportedField(
        "megatron",
        "optimizer.offload",
        lambda trainer: trainer.optimizer.offload,
        "!self.optimizer.offload",
        NOT_MEGATRON,
    ),
    UnsupportedField(
        "megatron",
        "optimizer.decayed",
        lambda trainer: trainer.optimizer.decayed != "all",
        "self.optimizer.decayed == 'all'",
        NOT_MEGATRON,
    ),
)


def backend_problems(trainer: Trainer) -> Iterator[str]:
    """Yield one ``field: sentence`` for each field that the backend does not support."""
    parallelism = trainer.parallelism
    if trainer.backend != "fsdp" and trainer.processes % (parallelism.tensor * parallelism.pipeline):
        yield f"trainer.parallelism: tensor {parallelism.tensor} × pipeline {parallelism.pipeline} {INDIVISIBLE}"
    for entry in UNSUPPORTED:
        if trainer.backend == entry.backend and entry.is_set(trainer):
            yield f"trainer.{entry.field}: {entry.message}"
