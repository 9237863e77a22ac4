"""Whole tensors with Hugging Face names from the parts of all ranks, and parts from files, one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rljob.trainer.backends.expert_tensors import by_expert
from rljob.trainer.backends.fsdp.gather_weights import assign_tensors
from rljob.trainer.backends.fsdp.read_weights import StoredTensor, open_tensors
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.backends.megatron.weight_layout import ParameterSource, Table
from rljob.trainer.errors import ModelError

Assign = Callable[[str, Tensor], None]
"""(name of a parameter of this rank, its content) → None."""


class ParameterExchange:
    """Moves the parameters of this rank from and to whole tensors.

    Args:
        grid: the ranks.
        tables: of all pipeline stages.
        shapes: of this rank's parameters, by name.
        copies: name → the tensor that it must equal, where a file may have both: a tied head.
        added: names of tensors that are not the model's own: no file is read for them.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        tables: list[Table],
        shapes: Mapping[str, torch.Size],
        copies: Mapping[str, str],
        added: Collection[str] = (),
    ) -> None:
        self._grid, self._tables, self._shapes, self._copies, self._added = grid, tables, shapes, copies, added
        assert self._own.keys() == shapes.keys(), self._own.keys() ^ shapes.keys()

    @property
    def _own(self) -> Table:
        """The parameters of this rank."""
        table = self._tables[self._grid.stage]
        return {name: source for name, source in table.items() if self._holds(source)}

    def _holds(self, source: ParameterSource) -> bool:
        return source.expert_rank in (None, self._grid.expert_rank)

    def whole_tensors(
        self, part: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor on rank 0, and its name with an empty tensor on other ranks; all ranks take part.

        Args:
            part: name of a parameter of this rank → its content in ``dtype``; all replicas call it.
            dtype: type of the tensors.
            device: of the tensors.
        """
        grid, nothing = self._grid, torch.empty(0, dtype=dtype, device=device)
        for stage, table in enumerate(self._tables):
            for name, source in table.items():
                if not source.exported:
                    continue
                found: dict[str, Tensor] = {}
                sender = grid.rank_of(stage, source.expert_rank or 0)
                if stage == grid.stage and self._holds(source):
                    content = part(name)
                    if grid.copy == (source.expert_rank or 0):
                        found = self._merge(source, content, 0)
                for full, shape in source.shapes.items():
                    tensor = found.get(full, nothing)
                    if sender != 0 and full in found:
                        dist.send(tensor, 0)
                    elif sender != 0 and grid.world.rank == 0:
                        tensor = torch.empty(shape, dtype=dtype, device=device)
                        dist.recv(tensor, sender)
                    yield full, tensor if grid.world.rank == 0 else nothing

    def own_tensors(self, parts: Mapping[str, Callable[[str], Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, tensor on the CPU) of the tensors that this rank writes; all ranks take part.

        Args:
            parts: kind → (name of a parameter of this rank → its content); all replicas call it.
        """
        grid = self._grid
        exported = {name: source for name, source in self._own.items() if source.exported}
        writers = self._writers(exported)
        for name, source in exported.items():
            copy, tensor_rank = writers[name]
            for kind, part in parts.items():
                content = part(name)
                if grid.copy == copy:
                    for full, tensor in self._merge(source, content, tensor_rank).items():
                        yield kind, full, tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _writers(self, exported: Table) -> dict[str, tuple[int, int]]:
        """Return the copy and the tensor-parallel rank that writes each parameter. Experts are written by the copies
        that hold them."""
        grid, found = self._grid, {}
        for experts, apart in ((False, 1), (True, grid.expert_size)):
            chosen = {name: source for name, source in exported.items() if (source.expert_rank is not None) == experts}
            sizes = {name: sum(map(math.prod, source.shapes.values())) for name, source in chosen.items()}
            for name, writer in assign_tensors(sizes, grid.copies // apart * grid.tensor_size).items():
                number, tensor_rank = divmod(writer, grid.tensor_size)
                found[name] = (number * apart + (grid.expert_rank if experts else 0), tensor_rank)
        return found

    def _merge(self, source: ParameterSource, part: Tensor, tensor_rank: int) -> dict[str, Tensor]:
        """Return the whole tensors on one of this replica's tensor-parallel ranks, nothing on the others."""
        grid = self._grid
        here = grid.tensor_rank == tensor_rank
        if not source.split or grid.tensor_size == 1:
            return source.merge([part]) if here else {}
        part = part.contiguous()
        gathered = [torch.empty_like(part) for _ in range(grid.tensor_size)] if here else None
        target = grid.rank_of(grid.stage, grid.copy, tensor_rank)
        dist.gather(part, gathered, target, group=grid.tensor_group)
        return source.merge(gathered) if gathered is not None else {}

    def read(self, tensors: Callable[[str], object], name: str) -> Tensor:
        """Return the content of a parameter of this rank, float32 on the CPU, from whole tensors.

        Args:
            tensors: Hugging Face name → what returns the elements of an index.
            name: of the parameter.
        """
        content = torch.empty(self._shapes[name], dtype=torch.float32)
        self._tables[self._grid.stage][name].read(tensors, self._grid.tensor_rank, self._grid.tensor_size, content)
        return content

    def read_files(self, source: Path, assign: Assign) -> None:
        """Read the parameters of this rank from the weights of a Hugging Face directory; all ranks take part.

        Raises:
            ModelError: the weights do not fit the model or cannot be read; raised on all ranks.
        """
        problem: ModelError | None = None
        try:
            with ExitStack() as files, torch.no_grad():
                stored = by_expert(open_tensors(source, files))
                self._check(source, stored)
                for name, entry in self._own.items():
                    if entry.shapes.keys() <= set(self._added):
                        continue
                    assign(name, self.read(lambda full: stored[full].content, name))
        except ModelError as error:
            problem = error
        except (OSError, SafetensorError) as error:
            problem = ModelError(f"{source}: the weights cannot be read ({error}); copy them again")
        self._grid.world.raise_first_error(problem)

    def _check(self, source: Path, stored: Mapping[str, StoredTensor]) -> None:
        """Refuse weights that are not those of the model."""
        entries = [entry for table in self._tables for entry in table.values()]
        found_in = (item for entry in entries for item in entry.shapes.items())
        shapes = {name: shape for name, shape in found_in if name not in self._added}
        found = {
            "missing keys": shapes.keys() - stored.keys(),
            "unexpected keys": stored.keys() - shapes.keys() - self._copies.keys() - set(self._added),
            "mismatched keys": {name for name in shapes.keys() & stored.keys() if stored[name].shape != shapes[name]},
        }
        for problem, names in found.items():
            if names:
                shown = ", ".join(sorted(names)[:3])
                raise ModelError(f"{source}: {problem} ({shown}); the weights do not fit config.json")
        for copy, original in self._copies.items():
            if copy in stored and not self._equal(stored[copy], stored[original], original):
                raise ModelError(
                    f"{source}: {original} and {copy} differ where config.json says that they are one tensor; "
                    "set tie_word_embeddings to false in config.json"
                )

    def _equal(self, copy: StoredTensor, original: StoredTensor, name: str) -> bool:
        """Return whether two tensors have the same shape, and the same elements in the parts of this rank."""
        if copy.shape != original.shape:
            return False
        rank, ranks = self._grid.tensor_rank, self._grid.tensor_size
        pieces = [piece for entry in self._own.values() for piece in entry.pieces(rank, ranks)]
        return all(
            torch.equal(copy.content[piece.index], original.content[piece.index])
            for piece in pieces
            if piece.name == name and piece.stop > piece.start
        )
