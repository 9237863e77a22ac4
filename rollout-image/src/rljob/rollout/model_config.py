"""Reads a model's config.json without its libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def text_config(model: Path) -> Mapping[str, Any]:
    """Return the configuration of a model, of one with several modalities that of its text; empty if it cannot be
    read."""
    try:
        configuration = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    text = configuration.get("text_config", configuration) if isinstance(configuration, dict) else None
    return text if isinstance(text, dict) else {}


def longest_sequence(model: Path) -> int | None:
    """Return the positions of a model; None if config.json has none, or scales them (RoPE)."""
    text = text_config(model)
    stretched = (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("factor")
    positions = text.get("max_position_embeddings")
    return positions if isinstance(positions, int) and stretched is None else None


def head_size(model: Path) -> int | None:
    """Return the size of an attention head; None if config.json does not have it, or the attention is latent (MLA)."""
    text = text_config(model)
    size, hidden, heads = text.get("head_dim"), text.get("hidden_size"), text.get("num_attention_heads")
    if "kv_lora_rank" in text:
        return None
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return size if isinstance(size, int) else None
