"""Sizes of tensor and pipeline parallelism in which vLLM can split a model, from its config.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rljob.api.roles import EngineParallelism
from rljob.rollout.model_config import text_config

VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it divides it (DEFAULT_VOCAB_PADDING_SIZE)."""
LARGEST_NAMED = 64
"""Largest size that a message names as possible."""


def split_problems(model: Path, sizes: EngineParallelism) -> Iterator[str]:
    """Yield a sentence for each size in which vLLM cannot split the model; nothing for numbers that are not known."""
    config = text_config(model)
    numbers = {name: value for name, value in config.items() if isinstance(value, int) and value > 0}
    if "kv_lora_rank" in config:
        numbers.pop("num_key_value_heads", None)  # latent attention: its cache is not split
    if field := _undivided(numbers, sizes.tensor):
        possible = [size for size in range(1, LARGEST_NAMED + 1) if not _undivided(numbers, size)]
        yield (
            f"parallelism.tensor: vLLM cannot split {model} among {sizes.tensor} workers, because {field} in "
            f"config.json is {numbers[field]}; set one of {', '.join(map(str, possible))}"
        )
    layers = numbers.get("num_hidden_layers")
    if layers is not None and sizes.pipeline > layers:
        yield f"parallelism.pipeline: {sizes.pipeline} is more than the {layers} layers of {model}; lower it"


def _undivided(numbers: dict[str, int], tensor: int) -> str:
    """Return the field of config.json whose number ``tensor`` workers cannot share; empty if there is none."""
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        number = numbers.get(field)
        if number is None:
            continue
        if field == "vocab_size":
            number += -number % VOCABULARY_PADDING
        copied = field == "num_key_value_heads" and tensor % number == 0  # more workers than heads: each has one
        if number % tensor and not copied:
            return field
    return ""
