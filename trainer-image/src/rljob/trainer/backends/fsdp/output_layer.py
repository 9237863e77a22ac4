"""Log-probabilities of targets from a causal language model whose output layer computes them in chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rljob.trainer.backends.base import Output
from rljob.trainer.backends.fsdp.packed_rows import ModelInputs, padded
from rljob.trainer.batch import Microbatch
from rljob.trainer.logprobs import linear_logprobs, token_logprobs

log = logging.getLogger(__name__)


class TargetLogprobs:
    """Runs a model on microbatches.

    The output layer returns log-probabilities of the targets, and entropies, instead of logits while the model runs. It
    runs inside the forward pass of the model, because only there FSDP has gathered its weights. A model that changes
    the logits afterwards, for example by soft-capping, returns another tensor: then all logits are computed.

    Args:
        model: the model, sharded or not.
        inputs: layout of its inputs.
    """

    def __init__(self, model: PreTrainedModel, inputs: Callable[[Microbatch], ModelInputs] = padded) -> None:
        self._model, self._inputs = model, inputs
        layer = model.get_output_embeddings()
        self._layer = layer if type(layer) is torch.nn.Linear else None
        """None: the logits of all positions are computed."""

    def __call__(self, microbatch: Microbatch, entropy: bool = False) -> Output:
        """Return the log-probabilities of the targets, and entropies on request."""
        inputs = self._inputs(microbatch)
        results = None
        if self._layer is not None:
            results = self._in_chunks(self._layer, inputs, entropy)
            if results is None:
                log.info("the model changes its logits after the output layer: all logits are computed")
                self._layer = None
        if results is None:
            logits = self._run(inputs).view(*inputs.targets.shape, -1)
            results = token_logprobs(logits, inputs.targets, inputs.temperature, entropy=entropy)
        return Output(*inputs.placed(results).unbind(-1))

    def values(self, microbatch: Microbatch) -> Tensor:
        """Return what an output layer of one value gives for the targets, (B, K), with zeros where a row has padding
        if rows are packed."""
        inputs = self._inputs(microbatch)
        return inputs.placed(self._run(inputs).view(*inputs.targets.shape, -1)).squeeze(-1)

    def _run(self, inputs: ModelInputs) -> Tensor:
        logits: Tensor = self._model(**inputs.arguments, use_cache=False).logits
        return logits

    def _in_chunks(self, layer: torch.nn.Linear, inputs: ModelInputs, entropy: bool) -> Tensor | None:
        """Return log-probabilities and entropies of the targets, or None if the model changes the output layer's
        result."""
        returned: list[tuple[Tensor, int]] = []

        def forward(hidden: Tensor) -> Tensor:
            results = linear_logprobs(
                hidden.view(*inputs.targets.shape, -1),
                layer.weight,
                layer.bias,
                inputs.targets,
                inputs.temperature,
                entropy=entropy,
            ).clone()  # FSDP needs outputs that are no views
            returned.append((results, results._version))
            return results

        layer.forward = forward  # type: ignore[method-assign, assignment]
        try:
            logits = self._run(inputs)
        finally:
            del layer.forward
        unchanged = [logits is results and logits._version == version for results, version in returned]
        return logits if unchanged == [True] else None
