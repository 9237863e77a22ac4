"""What the Megatron backend can train: models, settings and parallel layouts. Anything else is refused by name.

This module imports neither torch nor Megatron-Core: it also runs before a trainer starts.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob.api.model_shape import ModelShape, read_shape
from rljob.api.roles import Trainer

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
"""model_type of the models that the backend can train."""
ROTARY_SCALINGS = ("default", "linear", "llama3")
"""rope_type of rotary embeddings that have other frequencies, and nothing else besides."""
REPLACING = ("transformer_engine", "apex")
"""Packages that Megatron-Core uses if it finds them: its optimizer then has other state, which would not be resumed."""


def library_problems() -> Iterator[str]:
    """Yield a sentence if Megatron-Core is not installed, or would use other packages than in the tests."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        yield "spec.trainer.backend: megatron needs Megatron-Core; install rljob-trainer[megatron], or set fsdp"
    for package in REPLACING:
        if importlib.util.find_spec(package) is not None:
            yield (
                f"spec.trainer.backend: megatron does not work beside {package}, which would replace its optimizer; "
                f"use an image without {package}, or set fsdp"
            )


def problems(source: Path, settings: Trainer) -> Iterator[str]:
    """Yield a sentence for each reason why a model cannot be trained with the settings.

    Args:
        source: Hugging Face directory.
        settings: spec.trainer of a valid manifest.
    """
    try:
        config = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # rljob.trainer.model_directory reports it
    found = list(_model_problems(config))
    yield from found
    if found:
        return
    if (shape := read_shape(config)) is None:
        yield (
            f"spec.trainer.backend: megatron needs all sizes of a model: {source / 'config.json'} lacks one; "
            "save the model again with transformers, or set fsdp"
        )
        return
    yield from _layout_problems(shape, settings)


def _model_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each property of a config.json that the backend does not compute."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        yield f"spec.trainer.backend: megatron trains models of type {', '.join(FAMILIES)}, not {kind}; set fsdp"
        return
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # transformers takes them in this order
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in ROTARY_SCALINGS:
        yield f"spec.trainer.backend: megatron does not support {scaling} for rope_type of config.json; set fsdp"
    expected = {
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "quantization_config": (config.get("quantization_config"), None),
        "attention_bias": (config.get("attention_bias", False), False),  # of qwen2 it has another meaning: no field
        "mlp_bias": (config.get("mlp_bias", False), False),
        "decoder_sparse_step": (config.get("decoder_sparse_step", 1), 1),
        "mlp_only_layers": (config.get("mlp_only_layers") or [], []),
        "partial_rotary_factor": (config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1)), 1),
    }
    for name, (value, supported) in expected.items():
        if value != supported:
            shown = value if isinstance(value, str | int) else "a value"
            yield f"spec.trainer.backend: megatron does not support {shown} for {name} of config.json; set fsdp"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        yield (
            f"spec.trainer.backend: megatron needs a num_key_value_heads of config.json that divides the {heads} "
            f"attention heads, not {groups}; set fsdp"
        )
    if config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob"):  # the router would have no gradient
        yield (
            "spec.trainer.backend: megatron does not support norm_topk_prob of config.json with one expert for each "
            "token; set fsdp"
        )


def _layout_problems(model: ModelShape, settings: Trainer) -> Iterator[str]:
    """Yield a sentence for each parallel size that does not divide what it splits."""
    parallelism = settings.parallelism
    tensor, pipeline, groups = parallelism.tensor, parallelism.pipeline, parallelism.virtual_pipeline
    for number, what in (
        (model.key_value_heads, "heads of key and value"),
        (model.heads, "attention heads"),
        (model.intermediate, "elements of an expert" if model.experts else "elements of the MLP"),
    ):
        if number % tensor:
            yield (
                f"spec.trainer.parallelism.tensor: {tensor} does not divide the {number} {what} of the model; "
                "set a divisor"
            )
            return
    if model.active_experts > model.experts:
        yield (
            f"spec.trainer.backend: megatron cannot choose {model.active_experts} (num_experts_per_tok of config.json) "
            f"of {model.experts} experts; correct config.json"
        )
    sizes = f"pipeline: {pipeline}" if groups == 1 else f"virtualPipeline: pipeline {pipeline} × {groups}"
    if model.layers % (pipeline * groups):
        yield (
            f"spec.trainer.parallelism.{sizes} does not divide the {model.layers} layers of the model; set a divisor"
        )
    if parallelism.expert > 1 and not model.experts:
        yield "spec.trainer.parallelism.expert: the model has no experts; remove it"
    elif model.experts % parallelism.expert:
        yield (
            f"spec.trainer.parallelism.expert: {parallelism.expert} does not divide the {model.experts} experts of a "
            "layer; set a divisor"
        )
