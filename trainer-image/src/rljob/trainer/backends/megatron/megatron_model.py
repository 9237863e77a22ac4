"""The model of one pipeline stage: Megatron-Core's GPTModel with the numbers of a Hugging Face configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PretrainedConfig

from rljob.api.model_shape import ModelShape
from rljob.trainer.backends.megatron.megatron_library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    TransformerConfig,
    get_gpt_layer_local_spec,
    set_tensor_model_parallel_attributes,
)
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.backends.megatron.sdpa_attention import SdpaAttention
from rljob.trainer.backends.megatron.weight_layout import Table, padded


def build_stage(
    config: PretrainedConfig, shape: ModelShape, table: Table, grid: ProcessGrid, dtype: torch.dtype
) -> DistributedDataParallel:
    """Return this rank's part of the model, with buffers for its gradients; its weights are not initialized.

    Args:
        config: of the model.
        shape: its numbers.
        table: parameters of this stage; it says which are split over tensor-parallel ranks.
        grid: the ranks.
        dtype: of the parameters.
    """
    settings = _settings(config, shape, grid, dtype)
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.norms_heads, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    model = GPTModel(
        settings,
        spec,
        vocab_size=padded(shape.vocabulary, grid.tensor_size),
        max_sequence_length=config.max_position_embeddings,
        pre_process=grid.stage == 0,
        post_process=grid.is_last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
    ).to(device=grid.world.device, dtype=dtype)
    for name, parameter in model.named_parameters():
        # The library marks weights only when it initializes them; without marks norms of gradients are wrong.
        if table[name].split and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, table[name].dim, 1)
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(settings, buffers, model)


def _settings(config: PretrainedConfig, shape: ModelShape, grid: ProcessGrid, dtype: torch.dtype) -> TransformerConfig:
    options: dict[str, Any] = {}
    if grid.stages > 1:
        options = {"pipeline_dtype": dtype, "variable_seq_lengths": True}
        options["moe_token_dispatcher_type"] = "alltoall"  # which variable lengths need, also without experts
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        kv_channels=shape.head_size,
        tensor_model_parallel_size=grid.tensor_size,
        pipeline_model_parallel_size=grid.stages,
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


class KeptPositions:
    """Makes the output layer compute logits only of the positions whose logits are needed.

    Args:
        model: the stage; without an output layer nothing changes.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.keep_K: Tensor | None = None
        if hasattr(model.module, "output_layer"):
            model.module.output_layer.register_forward_pre_hook(self._select)

    def _select(self, module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.keep_K is not None
        hidden_LBH, *rest = arguments
        return (hidden_LBH.index_select(0, self.keep_K), *rest)
