"""Sizes of parallelism in which an engine can split a model, from its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rljob.rollout.model_config import text_config

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Fields whose number the workers of every engine share."""
VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it divides it (DEFAULT_VOCAB_PADDING_SIZE). SGLang pads it so
that any number of workers can share it."""
LARGEST_NAMED = 64
"""Largest size that a message names as possible."""


def tensor_problems(engine: str, model: Path, tensor: int, fields: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if ``tensor`` workers cannot share the layers of the model; nothing for numbers that are not
    known.

    Args:
        engine: name of the engine.
        model: directory of the model.
        tensor: number of workers.
        fields: of config.json whose number ``tensor`` must divide; ``vocab_size`` after it is padded.
    """
    numbers = _numbers(model)
    if field := _undivided(numbers, tensor, fields):
        possible = [size for size in range(1, LARGEST_NAMED + 1) if not _undivided(numbers, size, fields)]
        yield (
            f"parallelism.tensor: {engine} cannot split {model} among {tensor} workers, because {field} in "
            f"config.json is {numbers[field]}; set one of {', '.join(map(str, possible))}"
        )


def pipeline_problems(model: Path, pipeline: int) -> Iterator[str]:
    """Yield a sentence if the model has fewer layers than groups of workers; nothing if their number is not known."""
    layers = _numbers(model).get("num_hidden_layers")
    if layers is not None and pipeline > layers:
        yield f"parallelism.pipeline: {pipeline} is more than the {layers} layers of {model}; lower it"


def _numbers(model: Path) -> Mapping[str, int]:
    config = text_config(model)
    numbers = {name: value for name, value in config.items() if isinstance(value, int) and value > 0}
    if "kv_lora_rank" in config:
        numbers.pop("num_key_value_heads", None)  # latent attention: its cache is not split
    return numbers


def _undivided(numbers: Mapping[str, int], tensor: int, fields: Sequence[str]) -> str:
    """Return the field of config.json whose number ``tensor`` workers cannot share; empty if there is none."""
    for field in fields:
        number = numbers.get(field)
        if number is None:
            continue
        if field == "vocab_size":
            number += -number % VOCABULARY_PADDING
        copied = field == "num_key_value_heads" and tensor % number == 0  # more workers than heads: each has one
        if number % tensor and not copied:
            return field
    return ""
