"""Which fields of the trainer each built-in backend supports. :mod:`rljob.api.cel_rules` has the same rules in CEL."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.roles import Trainer

PLANNED = "fsdp"
"""The backend that the memory plan describes (:mod:`rljob.api.memory_plan`)."""
NEEDS_MEGATRON = "needs backend megatron; set it, or remove this field"
NOT_MEGATRON = "is not supported by backend megatron; remove it, or set backend fsdp"
INDIVISIBLE = "does not divide nodes × processesPerNode; every replica of the model needs tensor × pipeline processes"


def backend_problems(trainer: Trainer) -> Iterator[str]:
    """Yield one ``field: sentence`` for each field that the backend does not support."""
    parallelism = trainer.parallelism
    if trainer.backend == "fsdp":
        for name in ("tensor", "pipeline"):
            if (size := getattr(parallelism, name)) > 1:
                yield f"trainer.parallelism.{name}: {size} {NEEDS_MEGATRON}"
    elif trainer.processes % (parallelism.tensor * parallelism.pipeline):
        yield f"trainer.parallelism: tensor {parallelism.tensor} × pipeline {parallelism.pipeline} {INDIVISIBLE}"
    if trainer.backend == "megatron":
        given = {
            "parallelism.replicate": parallelism.replicate > 1,
            "recompute": trainer.recompute != "none",
            "lora": trainer.lora is not None,
            "optimizer.offload": trainer.optimizer.offload,
            "optimizer.decayed": trainer.optimizer.decayed != "all",
        }
        yield from (f"trainer.{field}: {NOT_MEGATRON}" for field, is_given in given.items() if is_given)
