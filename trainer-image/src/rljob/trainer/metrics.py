"""Metrics of one step, summed over microbatches and replicas. ``METRICS`` lists them; the coordinator adds metrics from
the ledger (rewards, lengths, staleness).

l is the log-probability of a token at its sample's temperature: l_old is the trainer's under the weights before the
batch, l_mu the engine's when the token was sampled. With one update per batch and no staleness they differ only by
rounding.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rljob.trainer.algorithms.objectives.base import MAX_LOG_RATIO, Objective
from rljob.trainer.batch import Microbatch
from rljob.trainer.process_group import World

METRICS: dict[str, str] = {
    "loss": "the minimised value: mean over the step's optimizer updates",
    "grad_norm": "norm of the gradient before clipping: mean over the updates",
    "learning_rate": "of the step's updates",
    "clip_fraction": "share of the tokens whose objective a clip held; these carry no gradient",
    "clip_fraction_low": "those held at 1 − clipLow",
    "clip_fraction_high": "those held at 1 + clipHigh, or by dualClip",
    "ratio_mean": "probability ratio in the loss (its denominator is algorithm.ratio's): mean over tokens",
    "ratio_max": "its largest value, at most e^20",
    "logprob_diff_mean": "|l_old − l_mu| in nats: mean over tokens",
    "logprob_diff_max": "its largest value",
    "kl_k1": "KL(engine ‖ trainer) in nats a token, estimated by the mean of l_mu − l_old",
    "kl_k3": "the same, estimated by the mean of r − 1 − ln r with r = exp(l_old − l_mu)",
    "ess": "effective share of the tokens under weights r: (Σr)² / (n·Σr²); 1 is on policy",
    "entropy": "mean of −l_old in nats a token",
    "tokens": "tokens trained on: those the model wrote",
    "padding_fraction": "share of the positions computed in forward passes that held no token of a sample",
    "advantage_abs": "mean of |advantage| over samples",
    "zero_advantage_fraction": "share of the samples with an advantage below 1e-6: nothing is learned from them",
    "seconds": "of the whole step, the pull included",
    "seconds_pull": "until rank 0 had the samples' tokens",
    "seconds_forward": "in forward passes, on rank 0",
    "seconds_backward": "in backward passes, on rank 0",
    "seconds_optimizer": "in gradient clipping and the optimizer, on rank 0",
    "tokens_per_second": "tokens / seconds",
    "memory_peak_bytes": "largest so far on any rank: of the GPU's memory, or of the process on CPU",
    "first_step_logprob_error": "largest |l_old − l_mu|; only of the run's first step, where it must be rounding",
}
"""Name of each metric in StepDone → its meaning and unit; a share is of 1."""

NO_ADVANTAGE = 1e-6  # equal rewards give advantages of 0 except for rounding

SUMS = (
    *("loss", "tokens", "clipped_low", "clipped_high", "ratio", "abs", "k1", "k3", "weight", "weight_squared"),
    *("logprob", "positions", "padding"),
)


@dataclass
class TokenStatistics:
    """Sums over tokens of this replica, and the largest |l_old − l_mu| and ratio."""

    device: torch.device
    sums: Tensor = field(init=False)
    largest: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.largest = torch.zeros(2, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(self, loss: Tensor, objective: Objective, old_BK: Tensor, tokens: Microbatch, padding: int) -> None:
        """Count one microbatch.

        Args:
            loss: the microbatch's share of the loss.
            objective: objective of its tokens.
            old_BK: l_old.
            tokens: the microbatch, with l_mu.
            padding: number of positions without a token of a sample.
        """
        mask_BK, positions = tokens.mask_BK, tokens.token_ids_BL.numel()
        old_N, ratio_N = old_BK[mask_BK].double(), objective.ratio_BK[mask_BK].double()
        clipped_N = objective.clipped_BK[mask_BK]
        mismatch_N = old_N - tokens.behavior_BK[mask_BK].double()
        weight_N = mismatch_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        self.sums += torch.stack(
            [
                loss.double(),
                old_N.new_tensor(len(old_N)),
                (clipped_N & (ratio_N < 1)).sum().double(),
                (clipped_N & (ratio_N > 1)).sum().double(),
                ratio_N.sum(),
                mismatch_N.abs().sum(),
                -mismatch_N.sum(),
                (weight_N - 1 - mismatch_N).sum(),
                weight_N.sum(),
                weight_N.square().sum(),
                old_N.sum(),
                old_N.new_tensor(positions),
                old_N.new_tensor(padding),
            ]
        )
        if len(old_N):
            self.largest = torch.maximum(self.largest, torch.stack([mismatch_N.abs().max(), ratio_N.max()]))

    def largest_mismatch(self, world: World) -> float:
        """Return the largest |l_old − l_mu| so far on any replica; all ranks take part."""
        return float(world.max_over_data(self.largest.clone())[0])

    def metrics(self, world: World, minibatches: int) -> dict[str, float]:
        """Return the metrics over all replicas, see ``METRICS``; all ranks take part."""
        logprob_diff_max, ratio_max = world.max_over_data(self.largest.clone()).tolist()
        total = dict(zip(SUMS, world.sum_over_data(self.sums.clone()).tolist(), strict=True))
        n = max(1.0, total["tokens"])
        return {
            "loss": total["loss"] / minibatches,
            "clip_fraction": (total["clipped_low"] + total["clipped_high"]) / n,
            "clip_fraction_low": total["clipped_low"] / n,
            "clip_fraction_high": total["clipped_high"] / n,
            "ratio_mean": total["ratio"] / n,
            "ratio_max": ratio_max,
            "logprob_diff_mean": total["abs"] / n,
            "logprob_diff_max": logprob_diff_max,
            "kl_k1": total["k1"] / n,
            "kl_k3": total["k3"] / n,
            "ess": total["weight"] ** 2 / (n * total["weight_squared"]) if total["tokens"] else 1.0,
            "entropy": -total["logprob"] / n,
            "tokens": total["tokens"],
            "padding_fraction": total["padding"] / total["positions"],
        }


class Stopwatch:
    """Seconds of the parts of a step by name. On a GPU, events in its stream measure the time without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time inside to ``name``."""
        if self._on_gpu:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self._pairs.append((name, first, last))
        else:
            started = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, after waiting for the GPU."""
        for name, first, last in self._pairs:
            last.synchronize()
            self._add(name, first.elapsed_time(last) / 1000)
        self._pairs.clear()
        taken, self._seconds = self._seconds, {}
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def advantage_metrics(advantages_N: Tensor) -> dict[str, float]:
    """Return the metrics of the advantages of a batch's samples, see ``METRICS``."""
    return {
        "advantage_abs": float(advantages_N.abs().mean()),
        "zero_advantage_fraction": float((advantages_N.abs() < NO_ADVANTAGE).double().mean()),
    }


def memory_peak(world: World) -> float:
    """Return the peak memory of any rank so far, in bytes; all ranks take part."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(world.device)
    return float(world.max(torch.tensor(float(peak), dtype=torch.float64, device=world.device)))
