"""The probe: fixed sequences whose log-probabilities show that an engine serves the trainer's weights."""

from __future__ import annotations

import numpy as np
import torch

from rljob.protocol.shared_messages import Probe
from rljob.trainer.backends.base import Backend
from rljob.trainer.batch import Row, collate

SEQUENCES, TOKENS = 4, 16
SEED = 20


def probe_tokens(vocabulary: int, length: int = TOKENS) -> list[list[int]]:
    """Return the probe's token ids; they depend only on vocabulary size and length."""
    generator = np.random.default_rng(SEED)
    return generator.integers(0, vocabulary, (SEQUENCES, length)).tolist()


def probe(backend: Backend, device: torch.device, length: int) -> Probe:
    """Return the probe under the current weights, at temperature 1; all ranks take part.

    Args:
        backend: the model.
        device: of the model.
        length: tokens of a sequence.
    """
    token_ids = probe_tokens(backend.vocabulary, length)
    mask_L = np.arange(length) > 0
    rows = [Row(np.asarray(ids), np.zeros(length, np.float32), mask_L, np.zeros(length)) for ids in token_ids]
    (output,) = backend.run([collate(rows, [1.0] * len(rows), device)], None)
    return Probe(token_ids, output.logprobs_BK.float().cpu().tolist())
