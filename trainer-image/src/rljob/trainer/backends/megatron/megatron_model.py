"""The model of one pipeline stage: Megatron-Core's GPTModel with the numbers of a Hugging Face configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import silu
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rljob.api.model_shape import ModelShape
from rljob.trainer.backends.fsdp.model_layers import recompute
from rljob.trainer.backends.megatron.cpu_shims import megatron_on
from rljob.trainer.backends.megatron.megatron_library import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
    set_tensor_model_parallel_attributes,
)
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.backends.megatron.sdpa_attention import SdpaAttention
from rljob.trainer.backends.megatron.sequence_norm import SequenceNorm
from rljob.trainer.backends.megatron.weight_layout import Table, padded


def build_stage(
    config: PretrainedConfig,
    shape: ModelShape,
    table: Table,
    grid: ProcessGrid,
    dtype: torch.dtype,
    recomputes: bool = False,
    head: Callable[[int, int], Module] | None = None,
) -> list[GPTModel]:
    """Return this rank's parts of the model, one for each group of layers; their weights are not initialized.

    Args:
        config: of the model.
        shape: its numbers.
        table: parameters of this stage; it says which are split over tensor-parallel ranks.
        grid: the ranks.
        dtype: of the parameters.
        recomputes: whether the backward pass computes each layer again from its input. The library's own recomputation
            keeps the state of random numbers, which a model without dropout does not need.
        head: makes an output layer of values, from the numbers of its inputs and outputs.
    """
    settings = _settings(config, shape, grid, dtype)
    layer = get_gpt_layer_local_spec(
        num_experts=shape.experts or None, qk_layernorm=shape.norms_heads, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaAttention
    if shape.norms_heads:
        attention.q_layernorm = attention.k_layernorm = SequenceNorm
    chunks = []
    for chunk in range(grid.chunks):
        model = GPTModel(
            settings,
            TransformerBlockSubmodules([layer] * (shape.layers // (grid.stages * grid.chunks)), SequenceNorm),
            vocab_size=padded(shape.vocabulary, grid.tensor_size),
            max_sequence_length=config.max_position_embeddings,
            pre_process=grid.stage == 0 and chunk == 0,
            post_process=grid.is_last and chunk == grid.chunks - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=config.rope_parameters["rope_theta"],
            vp_stage=chunk if grid.chunks > 1 else None,
        )
        _scale_rotations(model, config)
        if head is not None and model.post_process:
            model.output_layer = head(shape.hidden, 1)
        chunks.append(model.to(device=grid.world.device, dtype=dtype))
        if recomputes:
            recompute(model.decoder.layers, lambda: megatron_on(grid.world.device))
    for name, parameter in named_parameters(chunks, shape, grid).items():
        # The library marks weights only when it initializes them; without marks norms of gradients are wrong.
        if table[name].split and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, table[name].dim, 1)
    return chunks


def _scale_rotations(model: GPTModel, config: PretrainedConfig) -> None:
    """Set the frequencies of rotary embeddings with a scaling; the library's own scaling has constants of one model."""
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        rotary = model.rotary_pos_emb
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, rotary.inv_freq.device)


def named_parameters(chunks: Sequence[GPTModel], shape: ModelShape, grid: ProcessGrid) -> dict[str, Tensor]:
    """Return the parameters of this rank. Layers and experts in their names have their numbers in the whole model."""
    first_expert = grid.expert_rank * (shape.experts // grid.expert_size)
    found: dict[str, Tensor] = {}
    for chunk, model in enumerate(chunks):
        first_layer = (chunk * grid.stages + grid.stage) * len(model.decoder.layers)
        for name, parameter in model.named_parameters():
            name = _renumbered(name, "decoder.layers.", first_layer)
            found[_renumbered(name, "local_experts.", first_expert)] = parameter
    return found


def _renumbered(name: str, before: str, first: int) -> str:
    """Return a name in which the number after ``before`` is larger by ``first``."""
    return re.sub(rf"(?<={re.escape(before)})\d+", lambda number: str(int(number[0]) + first), name)


def _settings(config: PretrainedConfig, shape: ModelShape, grid: ProcessGrid, dtype: torch.dtype) -> TransformerConfig:
    options: dict[str, Any] = {}
    if grid.stages > 1:
        options = {"pipeline_dtype": dtype, "variable_seq_lengths": True}
        options["moe_token_dispatcher_type"] = "alltoall"  # which variable lengths need, also without experts
    if shape.experts:
        options |= _expert_settings(config, shape, grid)
    if grid.chunks > 1:
        options["virtual_pipeline_model_parallel_size"] = grid.chunks
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # with batches activations are wrong
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        kv_channels=shape.head_size,
        tensor_model_parallel_size=grid.tensor_size,
        sequence_parallel=grid.tensor_size > 1,
        pipeline_model_parallel_size=grid.stages,
        context_parallel_size=grid.context_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=shape.norms_heads,
        add_bias_linear=False,
        add_qkv_bias=shape.biases,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,  # the trained policy must be the sampled policy
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # all weights are read from files
        calculate_per_token_loss=True,  # gradients are sums: neither the library nor its buffers scale them
        **options,
    )


def _expert_settings(config: PretrainedConfig, shape: ModelShape, grid: ProcessGrid) -> dict[str, Any]:
    """Return the settings of a model with experts. Each expert is split like any layer: with another tensor-parallel
    size of experts the library's gradients are wrong."""
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.intermediate,
        "moe_router_topk": shape.active_experts,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # the loss is that of the algorithm alone
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": grid.expert_size,
        "expert_tensor_parallel_size": grid.tensor_size,
    }


class KeptPositions:
    """Makes the output layer compute logits only of the positions whose logits are needed.

    Args:
        model: the stage; without an output layer nothing changes.
        grid: the ranks.
    """

    def __init__(self, model: GPTModel, grid: ProcessGrid) -> None:
        self.keep: Tensor | None = None
        self._grid = grid
        if model.post_process:
            layer = model.output_layer
            layer.register_forward_pre_hook(self._select)
            if grid.tensor_size > 1:  # positions are gathered before they are selected
                layer.sequence_parallel, layer.allreduce_dgrad = False, True

    def _select(self, module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.keep is not None
        hidden_SBH, *rest = arguments
        if self._grid.tensor_size > 1:
            hidden_SBH = gather_from_sequence_parallel_region(
                hidden_SBH, tensor_parallel_output_grad=False, group=self._grid.tensor_group
            )
        return (hidden_SBH.index_select(0, self.keep), *rest)
