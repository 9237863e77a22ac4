"""Numbers of a causal language model, from its config.json, without torch and without its weights.

Known are decoders with a gated MLP, or gated experts in every layer, and RMS norms, whose numbers follow from the
fields below; for any other model :func:`shape_of` returns None, and nothing is planned from its memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QWEN3_HEAD_SIZE = 128
"""head_dim of transformers' Qwen3Config if config.json has none; other kinds divide the features among the heads."""
KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""model_type of the known models."""


@dataclass(frozen=True)
class ModelShape:
    """A model.

    ``tied``: the head is the embedding. ``biases``: of query, key and value. ``norms_heads``: RMS norms of the heads of
    query and key. ``values``: the head has one output with a bias, as that of a critic. ``experts``: MLPs of a layer,
    each of the size ``intermediate``, of which a token uses ``active_experts``; 0: a layer has one MLP.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    tied: bool = False
    biases: bool = False
    norms_heads: bool = False
    values: bool = False
    experts: int = 0
    active_experts: int = 0

    @property
    def query(self) -> int:
        """Size of all heads of the query."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Size of all heads of the key, and of the value."""
        return self.key_value_heads * self.head_size

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer of a decoder layer, without those of experts."""
        attention = {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
        }
        if self.experts:
            return attention
        return attention | {
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def block_parameters(self) -> int:
        """Parameters of one decoder layer."""
        attention = 2 * self.hidden * (self.query + self.key)
        biases = self.query + 2 * self.key if self.biases else 0
        norms = 2 * self.hidden + (2 * self.head_size if self.norms_heads else 0)
        return attention + biases + norms + self.expert_parameters + self.mlp_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the MLP of a layer, or of the router of its experts."""
        return self.hidden * self.experts if self.experts else 3 * self.hidden * self.intermediate

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm and head."""
        if self.values:
            return self.embedding_parameters + 2 * self.hidden + 1
        return (1 if self.tied else 2) * self.embedding_parameters + self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest tensor: nearly always the embedding."""
        return self.hidden * max(self.vocabulary, self.intermediate, self.query)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.block_parameters + self.root_parameters


def shape_of(directory: Path) -> ModelShape | None:
    """Return the numbers of the model in a Hugging Face directory; None if it has no config.json of a known kind."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return read_shape(config) if isinstance(config, dict) else None


def read_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the numbers in a config.json; None if its kind is not known or a number is missing."""
    kind = config.get("model_type")
    experts = kind == "qwen3_moe"
    mlp = "moe_intermediate_size" if experts else "intermediate_size"
    names = ["vocab_size", "hidden_size", mlp, "num_hidden_layers", "num_attention_heads"]
    numbers = [config.get(name) for name in names]
    if experts:  # transformers writes the first name, models of the Hub have the second
        numbers += [config.get("num_local_experts", config.get("num_experts")), config.get("num_experts_per_tok")]
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            return None
    if kind not in KINDS or not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    vocabulary, hidden, intermediate, layers, heads, *of_experts = (int(number or 0) for number in numbers)
    size = config.get("head_dim") or (QWEN3_HEAD_SIZE if kind == "qwen3" else hidden // heads)
    key_value_heads = config.get("num_key_value_heads") or (heads if kind == "llama" else None)
    if not isinstance(size, int) or not isinstance(key_value_heads, int):
        return None
    return ModelShape(
        vocabulary=vocabulary,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=size,
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=kind == "qwen2" or bool(config.get("attention_bias", False)),
        norms_heads=kind in ("qwen3", "qwen3_moe"),
        experts=of_experts[0] if of_experts else 0,
        active_experts=of_experts[1] if of_experts else 0,
    )
