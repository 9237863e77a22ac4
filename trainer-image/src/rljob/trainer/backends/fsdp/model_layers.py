"""The repeated layers of a transformers model: the units of sharding and of recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rljob.trainer.errors import ModelError


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that are sharded and recomputed one by one."""
    names = set(model._no_split_modules or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_layers(model: PreTrainedModel, source: Path) -> None:
    """Make each layer keep only its inputs and compute its activations again in the backward pass.

    Raises:
        ModelError: transformers names no layers of the model.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(f"{source}: transformers names no layers of this model; set spec.trainer.recompute to none")
    recompute(layers)


def recompute(
    layers: Iterable[torch.nn.Module], again: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Make each of the modules keep only its inputs; see :func:`recompute_layers`.

    Args:
        layers: the modules.
        again: makes the context of the computation in the backward pass.
    """
    once = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for layer in layers:
        layer.forward = partial(once, layer.forward, context_fn=lambda: (nullcontext(), again()))
