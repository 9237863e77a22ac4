"""The probe: a few fixed sequences whose log-probabilities prove that an engine serves the trainer's weights."""

from __future__ import annotations

import numpy as np
import torch

from rljob.protocol.messages import Probe
from rljob.trainer.batch import Row, collate
from rljob.trainer.fsdp import FsdpBackend

SEQUENCES, TOKENS = 4, 16
SEED = 20


def probe_tokens(vocabulary: int, length: int = TOKENS) -> list[list[int]]:
    """Return the probe's token ids: the same ones for the same vocabulary size."""
    generator = np.random.default_rng(SEED)
    return generator.integers(0, vocabulary, (SEQUENCES, length)).tolist()


@torch.no_grad()
def probe(backend: FsdpBackend, device: torch.device, length: int) -> Probe:
    """Return the probe under the weights held now, at temperature 1; all ranks take part.

    Args:
        backend: the model.
        device: where it is.
        length: tokens of a sequence.
    """
    token_ids = probe_tokens(backend.vocabulary, length)
    mask_L = np.arange(length) > 0
    rows = [Row(np.asarray(ids), np.zeros(length, np.float32), mask_L) for ids in token_ids]
    logprobs_BK = backend.logprobs(collate(rows, [1.0] * len(rows), device))
    return Probe(token_ids, logprobs_BK.float().cpu().tolist())
