"""Log-probabilities of targets from a causal language model whose output layer computes them in chunks."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rljob.trainer.backends.base import Output
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
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        layer = model.get_output_embeddings()
        self._layer = layer if type(layer) is torch.nn.Linear else None
        """None: the logits of all positions are computed."""

    def __call__(self, microbatch: Microbatch, entropy: bool = False) -> Output:
        """Return the log-probabilities of the targets, and entropies on request.

        Padding is on the right: the causal mask hides it.
        """
        results_BKE = None
        if self._layer is not None:
            results_BKE = self._in_chunks(self._layer, microbatch, entropy)
            if results_BKE is None:
                log.info("the model changes its logits after the output layer: all logits are computed")
                self._layer = None
        if results_BKE is None:
            targets_BK, temperature_B = microbatch.targets_BK, microbatch.temperature_B
            results_BKE = token_logprobs(self._run(microbatch), targets_BK, temperature_B, entropy=entropy)
        return Output(*results_BKE.unbind(-1))

    def _run(self, microbatch: Microbatch) -> Tensor:
        logits: Tensor = self._model(
            input_ids=microbatch.token_ids_BL, use_cache=False, logits_to_keep=microbatch.keep_K
        ).logits
        return logits

    def _in_chunks(self, layer: torch.nn.Linear, microbatch: Microbatch, entropy: bool) -> Tensor | None:
        """Return log-probabilities and entropies (B, K, E), or None if the model changes the output layer's result."""
        returned: list[tuple[Tensor, int]] = []

        def forward(hidden_BKH: Tensor) -> Tensor:
            targets_BK, temperature_B = microbatch.targets_BK, microbatch.temperature_B
            results_BKE = linear_logprobs(
                hidden_BKH, layer.weight, layer.bias, targets_BK, temperature_B, entropy=entropy
            ).clone()  # FSDP needs outputs that are no views
            returned.append((results_BKE, results_BKE._version))
            return results_BKE

        layer.forward = forward  # type: ignore[method-assign, assignment]
        try:
            logits = self._run(microbatch)
        finally:
            del layer.forward
        unchanged = [logits is results_BKE and logits._version == version for results_BKE, version in returned]
        return logits if unchanged == [True] else None
