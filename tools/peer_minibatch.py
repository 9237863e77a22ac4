"""A minibatch of random samples as verl and TRL have it, and the trainer's own loss of it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.testing.random_samples import random_samples
from rljob.trainer.algorithms.needs import load_function
from rljob.trainer.algorithms.token_selection import Selection, SelectionInputs, selection_of
from rljob.trainer.backends.base import Output
from rljob.trainer.batch import Microbatch, MicrobatchInputs
from rljob.trainer.metrics import TokenStatistics
from rljob.trainer.policy_loss import PolicyLoss
from rljob.trainer.process_group import World

WORLD = World(0, 1, torch.device("cpu"), cast("Any", None), dp_rank=0, dp_size=1)
MAX_TOKENS = 32

Result = tuple[Tensor, Tensor]
"""Loss, and its gradient by the log-probabilities (B, T)."""


class Arrays:
    """A minibatch as verl and TRL have it: (B, T), padded on the right, one advantage for each sample.

    Args:
        seed: of the samples.
    """

    def __init__(self, seed: int) -> None:
        self.samples = random_samples(seed)
        self.mask_BT = self._rows("logprobs_T") != 0
        self.old_BT, self.behavior_BT = self._rows("old_T"), self._rows("behavior_T")
        self.reference_BT = self._rows("reference_T")
        generator = np.random.default_rng(seed)
        self.advantages_B = torch.from_numpy(generator.normal(size=len(self.samples)))
        self.keys_BT = torch.from_numpy(generator.random(self.mask_BT.shape))

    def _rows(self, name: str) -> Tensor:
        rows_BT = torch.zeros(len(self.samples), MAX_TOKENS, dtype=torch.float64)
        for b, sample in enumerate(self.samples):
            values_T = getattr(sample, name)
            rows_BT[b, : len(values_T)] = torch.from_numpy(np.asarray(values_T, np.float64))
        return rows_BT

    def logprobs(self) -> Tensor:
        """Return the log-probabilities as a new leaf."""
        return self._rows("logprobs_T").requires_grad_()

    def selected(self, selection: Selection, algorithm: Algorithm) -> Tensor:
        """Return which tokens are selected, with the current log-probabilities for those before the batch: as verl."""
        mask_BT, now_BT = self.mask_BT, self._rows("logprobs_T")
        samples = torch.arange(len(self.samples)).unsqueeze(-1).expand(mask_BT.shape)

        def flat(values_BT: Tensor) -> Any:
            return values_BT[mask_BT].numpy()

        inputs = SelectionInputs(
            samples_T=flat(samples),
            samples=len(samples),
            advantages_T=flat(self.advantages_B[samples]),
            logprobs_T=flat(now_BT),
            log_ratio_T=flat(now_BT - self.old_BT),
            keys_T=flat(self.keys_BT),
            world=WORLD,
            algorithm=algorithm,
        )
        found = selection(inputs)
        return torch.zeros_like(mask_BT).masked_scatter(mask_BT, torch.from_numpy(found))


def ours(algorithm: Algorithm, arrays: Arrays) -> Result:
    """Return the result of the trainer's loss."""
    lengths = np.array([len(sample.logprobs_T) for sample in arrays.samples])
    weights_B = torch.from_numpy(
        load_function(algorithm, "aggregation")(lengths, np.full(len(lengths), MAX_TOKENS)).astype(np.float64)
    )
    mask_BT, none = arrays.mask_BT, torch.zeros(0)
    tokens = Microbatch(mask_BT.long(), none, none, mask_BT, arrays.behavior_BT, none, 1, [])
    rewards_B = torch.tensor([sample.reward for sample in arrays.samples])
    inputs = MicrobatchInputs(
        range(len(lengths)),
        tokens,
        mask_BT.numel(),
        0,
        weights_B,
        rewards_B,
        torch.zeros_like(mask_BT.long()),
        1,
        rewards_B < -1e9,
    )
    inputs.advantages_BK = arrays.advantages_B.unsqueeze(-1).expand(mask_BT.shape).where(mask_BT, 0.0)
    selection = selection_of(load_function(algorithm, "objective"))
    inputs.selected_BK = None if selection is None else arrays.selected(selection, algorithm)
    logprobs_BT = arrays.logprobs()
    frozen = {"reference": [arrays.reference_BT]} if algorithm.kl_coefficient else {}
    loss = PolicyLoss([inputs], [arrays.old_BT], frozen, False, algorithm, TokenStatistics(torch.device("cpu")))
    share = loss(0, Output(logprobs_BT))
    if loss.error is not None:
        raise loss.error
    return backward(share, logprobs_BT)


def backward(loss: Tensor, logprobs_BT: Tensor) -> Result:
    """Return a loss and its gradient by the log-probabilities."""
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad
