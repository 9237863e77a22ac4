"""The files in which the ranks write the tensors of a checkpoint: each rank its own tensors, in a file of its own.

A file holds whole tensors, so a checkpoint does not depend on the number of ranks, and every program that reads Hugging
Face directories can read it. Rank 0 writes the index that names the file of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rljob.protocol.checkpoint_files import index_name, part_name
from rljob.protocol.sync_path import sync_path
from rljob.trainer.tensor_file import write_tensors


@dataclass(frozen=True)
class PartPlan:
    """Which rank writes which tensors into which file.

    ``file``: name of the file if there is one part. ``ranks``: rank → part. ``tensors``: tensor → part. ``size``: bytes
    of all tensors.
    """

    file: str
    ranks: dict[int, str]
    tensors: dict[str, str]
    size: int

    def index(self) -> dict[str, bytes]:
        """Return name → content of the index; empty if there is one part."""
        if len(self.ranks) == 1:
            return {}
        parts = {name: Path(part).name for name, part in sorted(self.tensors.items())}
        content = {"metadata": {"total_size": self.size}, "weight_map": parts}
        return {index_name(self.file): json.dumps(content, indent=2).encode()}


def plan_parts(file: str, sizes: Sequence[Mapping[str, int]]) -> PartPlan:
    """Return which rank writes which tensors.

    Args:
        file: name of the file if one rank writes.
        sizes: by rank: tensor → bytes. The first rank that has a tensor writes it. Without any tensor rank 0 writes an
            empty file.
    """
    first = {name: rank for rank in reversed(range(len(sizes))) for name in sizes[rank]}
    writers = sorted(set(first.values())) or [0]
    ranks = {rank: part_name(file, number, len(writers)) for number, rank in enumerate(writers, 1)}
    size = sum(sizes[rank][name] for name, rank in first.items())
    return PartPlan(file, ranks, {name: ranks[rank] for name, rank in first.items()}, size)


def write_part(directory: Path, plan: PartPlan, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write the part of a rank, durable on return; return its name → digest; empty if the rank writes none.

    Raises:
        OSError: the file cannot be written.
    """
    name = plan.ranks.get(rank)
    if name is None:
        return {}
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = write_tensors(path, {key: tensor for key, tensor in tensors.items() if plan.tensors[key] == name})
    sync_path(path)
    return {name: digest}
