"""Decides whether rows of a microbatch are packed, and checks that the attention of the model can compute them.

The check compares a forward pass of packed rows with one of padded rows, on the device and with the weights of the run:
a model whose layers mix the rows in any way, for example by linear attention, is noticed before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rljob.api.roles import Trainer
from rljob.trainer.backends.fsdp.output_layer import TargetLogprobs
from rljob.trainer.backends.fsdp.packed_rows import ModelInputs, packed, padded
from rljob.trainer.backends.fsdp.row_attention import PACKED, PADDED, has_kernel, packed_attention
from rljob.trainer.backends.fsdp.sharding import free_whole_parameters
from rljob.trainer.batch import Microbatch, Row, collate
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)

CHECKED = "rljob_checked"
"""Name in transformers of the attention during the check."""
CHANGES = ("softcap", "s_aux", "position_bias")
"""Arguments with which a model changes its attention; packed rows do not support them."""
LAYERS = {"full_attention", "sliding_attention"}
LENGTHS = (5, 2, 9, 3)
"""Rows of the check."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest mean difference of log-probabilities, or of values."""


def choose_layout(
    model: PreTrainedModel, settings: Trainer, world: World, dtype: torch.dtype, source: Path, values: bool = False
) -> Callable[[Microbatch], ModelInputs]:
    """Return the layout of the model's inputs, and set the model's attention to it. All ranks take part.

    Args:
        model: with weights, sharded or not.
        settings: of the job.
        world: the ranks.
        dtype: of forward passes.
        source: directory of the model, for messages.
        values: whether the output layer gives a value instead of logits.

    Raises:
        ModelError: the job asks for packed rows, and the attention of the model cannot compute them.
    """
    if settings.packing == "none" or (settings.packing == "auto" and not _has_kernel(model, world.device, dtype)):
        return padded
    problem = next(filter(None, world.gather(_problem(model, world.device, dtype, values))), "")
    if not problem:
        model.config._attn_implementation = PACKED
        return packed
    if settings.packing == "varlen":
        kind = model.config.model_type
        raise ModelError(f"spec.trainer.packing: {source} ({kind}) cannot train packed rows: {problem}; set none")
    log.info("rows of microbatches are padded: %s", problem)
    return padded


def _has_kernel(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> bool:
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return has_kernel(device, dtype, size)


def _problem(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, values: bool) -> str:
    """Return why the model cannot compute packed rows; empty if it can."""
    config = model.config.get_text_config()
    if others := set(getattr(config, "layer_types", None) or ()) - LAYERS:
        return f"it has layers with {', '.join(sorted(others))}"
    if not model._supports_attention_backend:
        return "transformers cannot replace its attention"
    microbatch = _rows(config.vocab_size, device)
    attention = _CheckedAttention()

    def outputs(layout: Callable[[Microbatch], ModelInputs]) -> Tensor:
        run = TargetLogprobs(model, layout)
        return run.values(microbatch) if values else run(microbatch).logprobs_BK

    ALL_ATTENTION_FUNCTIONS.register(CHECKED, attention)
    with torch.no_grad():
        expected_BK = outputs(padded)
        model.config._attn_implementation = CHECKED
        try:
            found_BK = outputs(packed)
        finally:
            model.config._attn_implementation = PADDED
    free_whole_parameters(model)
    if attention.problem:
        return attention.problem
    if attention.calls != config.num_hidden_layers:
        return f"{config.num_hidden_layers - attention.calls} of its layers have another kind of attention"
    difference = float((found_BK - expected_BK).where(microbatch.mask_BK, 0.0).abs().sum() / microbatch.mask_BK.sum())
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    kind = "values" if values else "log-probabilities"
    return "" if difference <= tolerance else f"its {kind} differ from those of padded rows by {difference:.2g}"


def _rows(vocabulary: int, device: torch.device) -> Microbatch:
    """Return rows of random tokens."""
    generator = np.random.default_rng(0)
    rows = []
    for length in LENGTHS:
        ids = generator.integers(0, vocabulary, length)
        rows.append(Row(ids, np.zeros(length, np.float32), np.arange(length) > 0, np.zeros(length)))
    return collate(rows, [1.0] * len(rows), device)


class _CheckedAttention:
    """The attention of packed rows, which notes what it cannot compute. It raises nothing: an exception inside a
    forward pass would leave the layers of FSDP in disorder."""

    def __init__(self) -> None:
        self.calls = 0
        self.problem = ""

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        changes = [name for name in CHANGES if others.get(name) is not None]
        if changes:
            self.problem = f"its attention needs {changes[0]}"
        elif mask is not None or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
            self.problem = "its attention is not causal"
        elif others.get("cu_seq_lens_q") is None:
            self.problem = "its attention does not get the bounds of rows"
        else:
            return packed_attention(module, query, key, value, mask, **others)
        return sdpa_attention_forward(module, query, key, value, mask)
