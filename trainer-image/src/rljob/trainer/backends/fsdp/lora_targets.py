"""Names of the linear layers that get adapters (``spec.trainer.lora.targets``), checked without importing torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rljob.api.model_shape import shape_of
from rljob.api.roles import Lora


def problems(source: Path, lora: Lora) -> Iterator[str]:
    """Yield a sentence for each target whose last part no linear layer of the model in ``source`` has. Of a model whose
    numbers are not known nothing is checked: the backend does, once it has the model."""
    shape = shape_of(source)
    if shape is None:
        return
    known = shape.linear_layers.keys()
    for i, target in enumerate(lora.targets or ()):
        if target.rpartition(".")[2] not in known:
            yield unknown_target(i, source, target, known)


def unknown_target(index: int, source: Path, target: str, known: Collection[str]) -> str:
    """Return the sentence on a target; ``known``: last parts of the names of the layers."""
    choice = ", ".join(sorted(known))
    return f"spec.trainer.lora.targets[{index}]: {source} has no layer {target}; choose from {choice}"
