"""The ranks as a grid of tensor-parallel, context-parallel, data-parallel and pipeline-parallel ranks.

Tensor-parallel ranks are neighbours, then context-parallel ranks follow, then replicas; the ranks of a pipeline stage
follow each other. A replica of the model has one data-parallel rank: its tensor-parallel and context-parallel ranks in
all stages. The ranks of a stage that have the same tensor-parallel rank hold copies of the same parameters. Experts are
the exception: they are divided among expert-parallel ranks, which are neighbouring copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rljob.api.roles import TrainerParallelism
from rljob.trainer.backends.megatron.megatron_library import initialize_rng_tracker, parallel_state
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World


@dataclass(frozen=True)
class ProcessGrid:
    """This rank's place in the grid and its groups."""

    world: World  # with the data-parallel rank and size
    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    stage: int
    stages: int
    chunks: int  # of layers in each stage
    expert_rank: int
    expert_size: int
    tensor_group: dist.ProcessGroup  # the same stage, replica and context-parallel rank
    context_group: dist.ProcessGroup  # the same stage, replica and tensor-parallel rank
    copy_group: dist.ProcessGroup  # the same stage and tensor-parallel rank
    expert_copy_group: dist.ProcessGroup  # those of copy_group with the same expert-parallel rank
    pipeline_group: dist.ProcessGroup  # the same replica, context-parallel and tensor-parallel rank

    @property
    def is_last(self) -> bool:
        """Whether this rank is in the last stage, which has the output layer."""
        return self.stage == self.stages - 1

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same parameters, except experts."""
        return self.world.dp_size * self.context_size

    @property
    def copy(self) -> int:
        """Number of this rank among :attr:`copies`."""
        return self.world.dp_rank * self.context_size + self.context_rank

    def rank_of(self, stage: int, copy: int = 0, tensor_rank: int = 0) -> int:
        """Return the global rank at a place of the grid."""
        return (stage * self.copies + copy) * self.tensor_size + tensor_rank


def make_grid(world: World, parallelism: TrainerParallelism) -> ProcessGrid:
    """Return the grid of all ranks, which take part; several models of a process share one.

    Raises:
        ModelError: the parallel sizes do not divide the number of ranks.
    """
    tensor, stages, context = parallelism.tensor, parallelism.pipeline, parallelism.context
    if world.size % (tensor * stages * context):
        raise ModelError(
            f"spec.trainer.parallelism: tensor {tensor} × pipeline {stages} × context {context} does not divide the "
            f"{world.size} processes; set a divisor"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor,
            stages,
            parallelism.virtual_pipeline if parallelism.virtual_pipeline > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=parallelism.expert,
            create_gloo_process_groups=False,
        )
        initialize_rng_tracker(inference_rng_tracker=True)  # without dropout no random numbers are drawn
    data_group = parallel_state.get_data_parallel_group()
    grid = ProcessGrid(
        world=world.with_data_parallel(data_group.rank(), data_group.size(), data_group),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=context,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=stages,
        chunks=parallelism.virtual_pipeline,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallelism.expert,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        copy_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_copy_group=parallel_state.get_expert_data_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
    )
    assert grid.rank_of(grid.stage, grid.copy, grid.tensor_rank) == world.rank, "the library's order of ranks"
    assert grid.expert_rank == grid.copy % grid.expert_size, "the library's order of expert-parallel ranks"
    return grid
