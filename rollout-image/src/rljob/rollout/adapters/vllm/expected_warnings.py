"""Warnings of vLLM that are expected here; see :func:`rljob.rollout.log_filter.drop_records`."""

from __future__ import annotations

import logging

RELOADING = "vllm.model_executor.model_loader.reload.layerwise"
WARM_UP = "vllm.renderers.base"


def is_warm_up_warning(record: logging.LogRecord) -> bool:
    """Return whether ``record`` reports that the warm-up of the chat template failed, which is expected without a
    tokenizer."""
    return "warmup failed" in record.msg


def is_reload_warning(record: logging.LogRecord, tied: bool) -> bool:
    """Return whether ``record`` warns of a layer for which the trainer sends no weights.

    These layers are rotary embeddings, whose tables are computed, and an output layer tied to the embedding.

    Args:
        record: of the layerwise reload.
        tied: the output layer's weights are the embedding's.
    """
    layer, _, text = record.getMessage().partition(": ")
    if text != "Failed to load weights":
        return False
    return layer.endswith("RotaryEmbedding") or (tied and layer == "ParallelLMHead")
