"""Tensors of experts: one for each expert, as in files of transformers and checkpoints of Megatron-Core, or one for
each layer, as in models of transformers and checkpoints of the FSDP2 backend.

Both backends read both. Shapes: E experts, I elements of an expert, H features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rljob.trainer.backends.fsdp.read_weights import StoredTensor

OF_LAYER = re.compile(r"(?P<layer>.+\.experts)\.(?P<kind>gate_up|down)_proj")
"""Name of the tensor of a layer; gate and up follow each other in (E, 2 I, H)."""
KINDS = {"gate_up": ("gate", "up"), "down": ("down",)}


def name_of(layer: str, expert: int, kind: str) -> str:
    """Return the name of a tensor of one expert."""
    return f"{layer}.{expert}.{kind}_proj.weight"


def by_expert(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of files with one tensor for each expert; nothing is read yet."""
    found = {}
    for name, tensor in stored.items():
        matched = OF_LAYER.fullmatch(name)
        if matched is None:
            found[name] = tensor
            continue
        kinds = KINDS[matched["kind"]]
        experts, rows, inputs = tensor.shape
        size = rows // len(kinds)
        for expert in range(experts):
            for number, kind in enumerate(kinds):
                content = _ExpertRows(tensor.content, expert, number * size, size)
                found[name_of(matched["layer"], expert, kind)] = StoredTensor(content, (size, inputs))
    return found


@dataclass(frozen=True)
class _ExpertRows:
    """The rows ``first`` to ``first + size`` of an expert in the tensor of a layer."""

    content: Any
    expert: int
    first: int
    size: int

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows, *rest = index
        start, stop, _ = rows.indices(self.size)
        part = (slice(self.expert, self.expert + 1), slice(self.first + start, self.first + stop), *rest)
        found: Tensor = self.content[part]
        return found.squeeze(0)


def of_layer(name: str, experts: range, read: Callable[[str], Tensor]) -> Tensor:
    """Return the rows of some experts of the tensor of a layer, from the tensors of the experts.

    Args:
        name: of the tensor of the layer.
        experts: their numbers; at least one.
        read: name of a tensor of an expert → its content.
    """
    matched = OF_LAYER.fullmatch(name)
    assert matched is not None, "has_experts()"
    kinds = KINDS[matched["kind"]]
    return torch.stack([torch.cat([read(name_of(matched["layer"], e, kind)) for kind in kinds]) for e in experts])
