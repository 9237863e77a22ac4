"""Dense decoders with a gated MLP and RMS norms, as transformers names their tensors: qwen2, and its relatives.

Source of the names: transformers' ``modeling_qwen2.py``, ``modeling_llama.py`` and ``modeling_qwen3.py``, and
Megatron-Core's ``GPTModel`` with its local layer specification.
"""

from __future__ import annotations

from rljob.api.model_shape import ModelShape
from rljob.trainer.backends.megatron.weight_layout import Table, heads, split, whole

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def conversion_table(model: ModelShape, stage: int, stages: int, chunks: int = 1) -> Table:
    """Return the parameters of a pipeline stage and their sources.

    Args:
        model: numbers of the model.
        stage: pipeline rank.
        stages: pipeline size.
        chunks: groups of layers of a stage; ``stages`` × ``chunks`` divides the number of layers.
    """
    table: Table = {}
    embedding = (model.vocabulary, model.hidden)
    if stage == 0:
        table["embedding.word_embeddings.weight"] = split([EMBEDDING], embedding, 0)
    layers = model.layers // (stages * chunks)
    for chunk in range(chunks):
        first = (chunk * stages + stage) * layers
        for i in range(first, first + layers):
            table |= _layer(model, f"decoder.layers.{i}.", f"model.layers.{i}.")
    if stage == stages - 1:
        table["decoder.final_layernorm.weight"] = whole("model.norm.weight", (model.hidden,))
        if not model.tied:
            table["output_layer.weight"] = split([HEAD], embedding, 0)
        elif stages > 1:  # the last stage keeps a copy of the embedding
            table["output_layer.weight"] = split([EMBEDDING], embedding, 0, exported=False)
    return table


def _layer(model: ModelShape, ours: str, theirs: str) -> Table:
    """Return the parameters of a layer; ``ours`` and ``theirs`` are the prefixes of the names."""
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
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
        f"{ours}mlp.linear_fc1.weight": split(
            [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"], (model.intermediate, model.hidden), 0
        ),
        f"{ours}mlp.linear_fc2.weight": split([f"{mlp}down_proj.weight"], (model.hidden, model.intermediate), 1),
    }
    if model.biases:
        names = [f"{attention}{kind}_proj.bias" for kind in "qkv"]
        table[f"{ours}self_attention.linear_qkv.bias"] = heads(names, groups, ())
    if model.norms_heads:
        for kind in "qk":
            norm = whole(f"{attention}{kind}_norm.weight", (model.head_size,))
            table[f"{ours}self_attention.{kind}_layernorm.weight"] = norm
    return table
