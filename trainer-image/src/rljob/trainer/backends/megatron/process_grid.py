"""The ranks as a grid of tensor-parallel, data-parallel and pipeline-parallel ranks.

Tensor-parallel ranks are neighbours; the ranks of a pipeline stage follow each other. A replica of the model has one
data-parallel rank: its tensor-parallel ranks in all stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rljob.api.roles import TrainerParallelism
from rljob.trainer.backends.megatron.megatron_library import parallel_state
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World


@dataclass(frozen=True)
class ProcessGrid:
    """This rank's place in the grid and its groups."""

    world: World  # with the data-parallel rank and size
    tensor_rank: int
    tensor_size: int
    stage: int
    stages: int
    tensor_group: dist.ProcessGroup  # the same stage and replica
    data_group: dist.ProcessGroup  # the same stage and tensor-parallel rank
    pipeline_group: dist.ProcessGroup  # the same replica and tensor-parallel rank

    @property
    def is_last(self) -> bool:
        """Whether this rank is in the last stage, which has the output layer."""
        return self.stage == self.stages - 1

    def rank_of(self, stage: int, data_rank: int = 0, tensor_rank: int = 0) -> int:
        """Return the global rank at a place of the grid."""
        return (stage * self.world.dp_size + data_rank) * self.tensor_size + tensor_rank


def make_grid(world: World, parallelism: TrainerParallelism) -> ProcessGrid:
    """Return the grid of all ranks, which take part; several models of a process share one.

    Raises:
        ModelError: the parallel sizes do not divide the number of ranks.
    """
    tensor, stages = parallelism.tensor, parallelism.pipeline
    if world.size % (tensor * stages):
        raise ModelError(
            f"spec.trainer.parallelism: tensor {tensor} × pipeline {stages} does not divide the {world.size} "
            "processes; set a divisor"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor, stages, create_gloo_process_groups=False)
    data_group = parallel_state.get_data_parallel_group()
    grid = ProcessGrid(
        world=world.with_data_parallel(data_group.rank(), data_group.size(), data_group),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=stages,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=data_group,
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
    )
    assert grid.rank_of(grid.stage, grid.world.dp_rank, grid.tensor_rank) == world.rank, "the library's order of ranks"
    return grid
