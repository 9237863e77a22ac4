"""Decoders with a gated MLP or gated experts and RMS norms, as transformers names their tensors: qwen2, and relatives.

Source of the names: transformers' ``modeling_qwen2.py``, ``modeling_llama.py``, ``modeling_qwen3.py`` and the files of
Qwen3-MoE, and Megatron-Core's ``GPTModel`` with its local layer specification.
"""

from __future__ import annotations

from dataclasses import replace

from rljob.api.model_shape import ModelShape
from rljob.trainer.backends.megatron.weight_layout import Table, heads, split, whole

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUE_HEAD = frozenset((HEAD, "lm_head.bias"))
"""Names of the parameters of an output layer of values."""


def conversion_table(
    model: ModelShape, stage: int = 0, stages: int = 1, chunks: int = 1, expert_ranks: int = 1
) -> Table:
    """Return the parameters of a pipeline stage and their sources.

    Args:
        model: numbers of the model.
        stage: pipeline rank.
        stages: pipeline size.
        chunks: groups of layers of a stage; ``stages`` × ``chunks`` divides the number of layers.
        expert_ranks: expert-parallel size; it divides the number of experts.
    """
    table: Table = {}
    embedding = (model.vocabulary, model.hidden)
    if stage == 0:
        table["embedding.word_embeddings.weight"] = split([EMBEDDING], embedding, 0)
    layers = model.layers // (stages * chunks)
    for chunk in range(chunks):
        first = (chunk * stages + stage) * layers
        for i in range(first, first + layers):
            table |= _layer(model, f"decoder.layers.{i}.", f"model.layers.{i}.", expert_ranks)
    if stage == stages - 1:
        table["decoder.final_layernorm.weight"] = whole("model.norm.weight", (model.hidden,))
        if model.values:
            table["output_layer.weight"] = whole(HEAD, (1, model.hidden))
            table["output_layer.bias"] = whole("lm_head.bias", (1,))
        elif not model.tied:
            table["output_layer.weight"] = split([HEAD], embedding, 0)
        elif stages > 1:  # the last stage keeps a copy of the embedding
            table["output_layer.weight"] = split([EMBEDDING], embedding, 0, exported=False)
    return table


def _layer(model: ModelShape, ours: str, theirs: str, expert_ranks: int) -> Table:
    """Return the parameters of a layer; ``ours`` and ``theirs`` are the prefixes of the names."""
    attention = f"{theirs}self_attn."
    groups = (model.key_value_heads, model.heads // model.key_value_heads, model.head_size)
    table = {
        f"{ours}input_layernorm.weight": whole(f"{theirs}input_layernorm.weight", (model.hidden,)),
        f"{ours}self_attention.linear_qkv.weight": heads(
            [f"{attention}{kind}_proj.weight" for kind in "qkv"], groups, (model.hidden,)
        ),
        f"{ours}self_attention.linear_proj.weight": split(
            [f"{attention}o_proj.weight"], (model.hidden, model.query), 1
        ),
        f"{ours}pre_mlp_layernorm.weight": whole(f"{theirs}post_attention_layernorm.weight", (model.hidden,)),
    }
    if model.experts:
        table |= _experts(model, f"{ours}mlp.", f"{theirs}mlp.", expert_ranks)
    else:
        table |= _mlp(model, f"{ours}mlp.", f"{theirs}mlp.")
    if model.biases:
        names = [f"{attention}{kind}_proj.bias" for kind in "qkv"]
        table[f"{ours}self_attention.linear_qkv.bias"] = heads(names, groups, ())
    if model.norms_heads:
        for kind in "qk":
            norm = whole(f"{attention}{kind}_norm.weight", (model.head_size,))
            table[f"{ours}self_attention.{kind}_layernorm.weight"] = norm
    return table


def _mlp(model: ModelShape, ours: str, theirs: str, expert_rank: int | None = None) -> Table:
    """Return the parameters of an MLP, or of an expert of an expert-parallel rank."""
    inputs, outputs = (model.intermediate, model.hidden), (model.hidden, model.intermediate)
    sources = {
        f"{ours}linear_fc1.weight": split([f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"], inputs, 0),
        f"{ours}linear_fc2.weight": split([f"{theirs}down_proj.weight"], outputs, 1),
    }
    return {name: replace(source, expert_rank=expert_rank) for name, source in sources.items()}


def _experts(model: ModelShape, ours: str, theirs: str, ranks: int) -> Table:
    """Return the parameters of the router and of the experts of all expert-parallel ranks."""
    table = {f"{ours}router.weight": whole(f"{theirs}gate.weight", (model.experts, model.hidden))}
    for expert in range(model.experts):
        rank = expert * ranks // model.experts
        table |= _mlp(model, f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.{expert}.", rank)
    return table
