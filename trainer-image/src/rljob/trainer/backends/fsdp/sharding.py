"""Sharding of a transformers model with FSDP2: the mesh of the ranks, and layers that are whole only while they run."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from rljob.trainer.backends.fsdp.model_layers import decoder_layers
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World


def make_mesh(world: World, copies: int) -> DeviceMesh:
    """Return the mesh of the ranks: (ranks,), or (copies of the model, ranks of a copy).

    Raises:
        ModelError: copies would have different numbers of ranks.
    """
    if copies == 1:
        return init_device_mesh(world.device.type, (world.dp_size,))
    if world.dp_size % copies:
        raise ModelError(
            f"spec.trainer.parallelism.replicate: {copies} does not divide the {world.dp_size} processes; set a divisor"
        )
    shape = (copies, world.dp_size // copies)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("copies", "ranks"))


def shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype, reshard: bool) -> FSDPModule:
    """Shard each layer, and the rest of the model, over the ranks.

    Args:
        model: on the meta device.
        mesh: the ranks.
        dtype: of forward and backward passes.
        reshard: whether a layer frees its whole parameters after its forward pass. The rest of the model keeps them,
            because the backward pass starts with it.
    """
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def free_whole_parameters(model: PreTrainedModel) -> None:
    """Free the whole parameters that forward passes without a backward pass have left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
