"""Leaves out what vLLM's layerwise reload warns of at every update although it is as it should be."""

from __future__ import annotations

import logging

RELOADING = "vllm.model_executor.model_loader.reload.layerwise"


class Expected(logging.Filter):
    """Drops the warning about layers that no weights are sent for: tables of rotary embeddings, which are computed, and
    an output layer that is the embedding (``tied``). Of any other layer it is let through.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self._tied = tied

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` is logged."""
        layer, _, what = record.getMessage().partition(": ")
        if what != "Failed to load weights":
            return True
        return not (layer.endswith("RotaryEmbedding") or (self._tied and layer == "ParallelLMHead"))


def leave_out_expected(tied: bool) -> None:
    """Have the reload of this process not warn of what is as it should be; ``tied``: the output layer's weights are
    the embedding's."""
    logger = logging.getLogger(RELOADING)
    for known in [known for known in logger.filters if isinstance(known, Expected)]:
        logger.removeFilter(known)
    logger.addFilter(Expected(tied))
