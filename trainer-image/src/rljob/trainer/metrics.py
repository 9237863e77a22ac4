"""Figures of one step, summed over microbatches and ranks.

"Mismatch" compares the trainer's log-probability l_old of each token, at the weights the batch was taken with, to the
engine's l_mu when the token was sampled: with one update per batch and no staleness they differ by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rljob.trainer.losses import MAX_LOG_RATIO
from rljob.trainer.world import World

SUMS = ("loss", "tokens", "clipped", "abs", "k1", "k3", "weight", "weight_squared", "logprob")


@dataclass
class TokenStatistics:
    """Sums over tokens seen by this rank."""

    device: torch.device
    sums: Tensor = field(init=False)
    largest: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.largest = torch.zeros((), device=self.device)

    @torch.no_grad()
    def add(self, loss: Tensor, clipped_BK: Tensor, old_BK: Tensor, behavior_BK: Tensor, mask_BK: Tensor) -> None:
        """Count one microbatch.

        Args:
            loss: its share of the loss.
            clipped_BK: whether a clip holds the token's objective.
            old_BK: l_old.
            behavior_BK: l_mu.
            mask_BK: where the model wrote.
        """
        old_N, clipped_N = old_BK[mask_BK].double(), clipped_BK[mask_BK].double()
        log_ratio_N = old_N - behavior_BK[mask_BK].double()
        ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        tokens = torch.tensor(float(len(old_N)), dtype=torch.float64, device=self.device)
        self.sums += torch.stack(
            [
                loss.double(),
                tokens,
                clipped_N.sum(),
                log_ratio_N.abs().sum(),
                -log_ratio_N.sum(),
                (ratio_N - 1 - log_ratio_N).sum(),
                ratio_N.sum(),
                ratio_N.square().sum(),
                old_N.sum(),
            ]
        )
        if len(old_N):
            self.largest = torch.maximum(self.largest, log_ratio_N.abs().max().float())

    def largest_mismatch(self, world: World) -> float:
        """Return the largest |l_old − l_mu| so far on any rank; all ranks take part."""
        return float(world.max(self.largest.clone()))

    def figures(self, world: World, minibatches: int) -> dict[str, float]:
        """Return the figures over all ranks; all take part.

        ``kl_k1`` and ``kl_k3`` estimate KL(engine ‖ trainer); ``ess`` is the effective share of the tokens under
        weights exp(l_old − l_mu), (Σw)²/(n·Σw²); ``entropy`` is the mean of −l_old.
        """
        largest = self.largest_mismatch(world)
        total = dict(zip(SUMS, world.sum(self.sums.clone()).tolist(), strict=True))
        n = max(1.0, total["tokens"])
        return {
            "loss": total["loss"] / minibatches,
            "tokens": total["tokens"],
            "clip_fraction": total["clipped"] / n,
            "mismatch_mean": total["abs"] / n,
            "mismatch_max": largest,
            "kl_k1": total["k1"] / n,
            "kl_k3": total["k3"] / n,
            "ess": total["weight"] ** 2 / (n * total["weight_squared"]) if total["tokens"] else 1.0,
            "entropy": -total["logprob"] / n,
        }
