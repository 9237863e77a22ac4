"""Log-probabilities of targets from a causal language model whose output layer computes them in chunks."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rljob.trainer.batch import Microbatch
from rljob.trainer.logprobs import linear_logprobs, token_logprobs

log = logging.getLogger(__name__)


class TargetLogprobs:
    """Runs a model on microbatches.

    The output layer returns log-probabilities of the targets instead of logits while the model runs. It runs inside the
    forward pass of the model, because only there FSDP has gathered its weights. A model that changes the logits
    afterwards, for example by soft-capping, returns another tensor: then all logits are computed.

    Args:
        model: the model, sharded or not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        layer = model.get_output_embeddings()
        self._layer = layer if type(layer) is torch.nn.Linear else None
        """None: the logits of all positions are computed."""

    def __call__(self, microbatch: Microbatch) -> Tensor:
        """Return the log-probabilities (B, K) of the targets. Padding is on the right: the causal mask hides it."""
        if self._layer is not None:
            logprobs_BK = self._in_chunks(self._layer, microbatch)
            if logprobs_BK is not None:
                return logprobs_BK
            log.info("the model changes its logits after the output layer: the logits of all positions are computed")
            self._layer = None
        return token_logprobs(self._run(microbatch), microbatch.targets_BK, microbatch.temperature_B)

    def _run(self, microbatch: Microbatch) -> Tensor:
        logits: Tensor = self._model(
            input_ids=microbatch.token_ids_BL, use_cache=False, logits_to_keep=microbatch.keep_K
        ).logits
        return logits

    def _in_chunks(self, layer: torch.nn.Linear, microbatch: Microbatch) -> Tensor | None:
        """Return the log-probabilities, or None if the model changes what its output layer returns."""
        returned: list[tuple[Tensor, int]] = []

        def forward(hidden_BKH: Tensor) -> Tensor:
            logprobs_BK = linear_logprobs(
                hidden_BKH, layer.weight, layer.bias, microbatch.targets_BK, microbatch.temperature_B
            )
            logprobs_BK1 = torch.unsqueeze_copy(logprobs_BK, -1)  # FSDP needs outputs that are no views
            returned.append((logprobs_BK1, logprobs_BK1._version))
            return logprobs_BK1

        layer.forward = forward  # type: ignore[method-assign, assignment]
        try:
            logits = self._run(microbatch)
        finally:
            del layer.forward
        unchanged = [logits is logprobs_BK1 and logits._version == version for logprobs_BK1, version in returned]
        return logits.squeeze(-1) if unchanged == [True] else None
