"""How a parameter of Megatron-Core is made of tensors with Hugging Face names.

The part of a parameter that a tensor-parallel rank holds is a concatenation of pieces of those tensors. The same
description reads weights and moments, one piece at a time, and puts the parts of all ranks together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``stop`` of the dimension ``dim`` of the tensor ``name``."""

    name: str
    dim: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the piece in its tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.stop),)


@dataclass(frozen=True)
class ParameterSource:
    """The tensors that make one parameter.

    ``shapes``: name → shape of the whole tensor. ``pieces``: (tensor-parallel rank, ranks) → the pieces of this rank's
    part, in their order along their dimension. ``split``: ranks hold different parts; otherwise each holds the whole.
    ``exported``: False for a second copy of a tensor, in another pipeline stage. ``expert_rank``: the expert-parallel
    rank that holds it; None: all.
    """

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Callable[[int, int], list[Piece]]
    split: bool = True
    exported: bool = True
    expert_rank: int | None = None

    @property
    def dim(self) -> int:
        """The dimension along which pieces are concatenated."""
        return self.pieces(0, 1)[0].dim

    def read(self, tensors: Callable[[str], Any], rank: int, ranks: int, into: Tensor) -> None:
        """Fill this rank's part from whole tensors, of which only the pieces are read; padding becomes 0.

        Args:
            tensors: name → what returns the elements of an index: a tensor, or a slice of a safetensors file.
            rank: tensor-parallel rank.
            ranks: tensor-parallel size.
            into: the part.
        """
        offset = 0
        for piece in self.pieces(rank, ranks):
            length = piece.stop - piece.start
            if length:
                into.narrow(piece.dim, offset, length).copy_(tensors(piece.name)[piece.index])
            offset += length
        into.narrow(self.dim, offset, into.shape[self.dim] - offset).zero_()

    def merge(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors of the parts of all tensor-parallel ranks, or of the one part of all."""
        whole = {name: parts[0].new_empty(shape) for name, shape in self.shapes.items()}
        for rank, part in enumerate(parts):
            offset = 0
            for piece in self.pieces(rank, len(parts)):
                length = piece.stop - piece.start
                whole[piece.name][piece.index].copy_(part.narrow(piece.dim, offset, length))
                offset += length
        return whole


Table: TypeAlias = dict[str, ParameterSource]
"""Name of a parameter → its source, in the order of the stage. Numbers in names are those of the whole model."""


def whole(name: str, shape: tuple[int, ...]) -> ParameterSource:
    """Return the source of a parameter that all tensor-parallel ranks hold whole."""
    return ParameterSource({name: shape}, lambda rank, ranks: [Piece(name, 0, 0, shape[0])], split=False)


def split(names: Sequence[str], shape: tuple[int, ...], dim: int, exported: bool = True) -> ParameterSource:
    """Return the source of tensors of one shape of which each rank holds a range; the last range may be shorter.

    Args:
        names: of the tensors; their ranges follow each other.
        shape: of each whole tensor.
        dim: the dimension that is split.
        exported: see :class:`ParameterSource`.
    """

    def pieces(rank: int, ranks: int) -> list[Piece]:
        start, stop = share(shape[dim], rank, ranks)
        return [Piece(name, dim, start, stop) for name in names]

    return ParameterSource(dict.fromkeys(names, shape), pieces, exported=exported)


def heads(names: Sequence[str], sizes: tuple[int, int, int], rest: tuple[int, ...]) -> ParameterSource:
    """Return the source of query, key and value in one parameter: group by group, each with its heads of the query.

    Args:
        names: of the tensors of query, key and value.
        sizes: number of groups, heads of the query in a group, elements of a head.
        rest: dimensions after the first one: the inputs of a weight; none for a bias.
    """
    (query, key, value), (groups, queries, size) = names, sizes

    def pieces(rank: int, ranks: int) -> list[Piece]:
        found = []
        for group in range(*share(groups, rank, ranks)):
            for name, rows in ((query, queries * size), (key, size), (value, size)):
                found.append(Piece(name, 0, group * rows, (group + 1) * rows))
        return found

    rows = {query: groups * queries * size, key: groups * size, value: groups * size}
    return ParameterSource({name: (number, *rest) for name, number in rows.items()}, pieces)


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of ``size`` elements that a rank holds: equal ranges, except that the last ones may be short."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def padded(size: int, ranks: int) -> int:
    """Return the size of a dimension that is split evenly after padding."""
    return -(-size // ranks) * ranks
