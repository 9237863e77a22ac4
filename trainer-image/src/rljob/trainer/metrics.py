"""Metrics of one step, summed over microbatches and replicas. ``METRICS`` lists them; the coordinator adds metrics from
the ledger (rewards, lengths, staleness).

Samples whose advantage is 0 are not computed unless the algorithm needs them. All metrics of tokens and positions are
over the trained samples.

l is the log-probability of a token at its sample's temperature: l_old is the trainer's under the weights before the
batch, l_mu the engine's when the token was sampled. With one update per batch and no staleness they differ only by
rounding. algorithm.correction gives tokens a weight for this mismatch. Metrics of l_old are over the tokens whose l_old
is known: if nothing of the algorithm needs it, those of the first minibatch, because l_old of the others would cost a
forward pass.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.trainer.algorithms.objectives.base import MAX_LOG_RATIO, Objective
from rljob.trainer.batch import MicrobatchInputs
from rljob.trainer.process_group import World

METRICS: dict[str, str] = {
    "loss": "the minimised value: mean over the step's optimizer updates",
    "grad_norm": "norm of the gradient before clipping: mean over the updates that were applied",
    "updates_skipped": "updates that were not applied because the gradient was not finite",
    "learning_rate": "of the step's updates",
    "clip_fraction": "share of the tokens whose objective a clip held, or that `clip_cov` leaves out",
    "clip_fraction_low": "those with a ratio below 1",
    "clip_fraction_high": "those with a ratio above 1, held by a clip or by dualClip",
    "ratio_mean": "probability ratio in the loss (its denominator is algorithm.ratio's): mean over tokens",
    "ratio_max": "its largest value, at most e^20",
    "ratio_distance": "|ratio − 1|: mean over tokens; 0 where clips have no effect",
    "logprob_diff_mean": "|l_old − l_mu| in nats: mean over tokens",
    "logprob_diff_max": "its largest value",
    "kl_k1": "KL(engine ‖ trainer) in nats a token, estimated by the mean of l_mu − l_old",
    "kl_k3": "the same, estimated by the mean of r − 1 − ln r with r = exp(l_old − l_mu)",
    "ess": "effective share of the tokens under weights r: (Σr)² / (n·Σr²); 1 is on policy",
    "correction_mean": "weight of a token for the mismatch: mean over tokens; 1 without a correction",
    "masked_fraction": "share of the tokens whose weight for the mismatch is 0",
    "entropy": "entropy of the policy in nats: mean over tokens; only if the algorithm needs it",
    "reference_kl_k1": "KL(policy‖reference) in nats a token: mean of l − l_ref; only with a reference model",
    "reference_kl_k3": "the same, estimated by the mean of r − 1 − ln r with r = exp(l_ref − l)",
    "kl_coefficient": "β of the step; only with a KL term",
    "teacher_kl_k1": "KL(policy‖teacher) in nats a token: mean of l − l_teacher over tokens that have a teacher; "
    "of several teachers l_teacher is the mean with their weights",
    "teacher_kl_k3": "the same, estimated by the mean of r − 1 − ln r with r = exp(l_teacher − l)",
    "value_loss": "loss of the critic: mean over the step's updates; only with a critic, as the next six",
    "value_mean": "value of a token before the batch: mean over tokens",
    "value_clip_fraction": "share of the tokens at which a clip raised the critic's loss",
    "explained_variance": "1 − variance of (target − value before the batch) / variance of the target, over tokens",
    "critic_grad_norm": "norm of the critic's gradient before clipping: mean over the updates that were applied",
    "critic_learning_rate": "of the critic in the step's updates",
    "critic_updates_skipped": "updates of the critic that were not applied because the gradient was not finite",
    "training_log_ppl": "mean of −l_old in nats: log of the perplexity of the sampled tokens under the trainer",
    "tokens": "tokens trained on: those that the model wrote in the trained samples",
    "samples": "samples of the batch",
    "samples_trained": "trained samples: those whose advantage is not 0, or all if the algorithm needs them",
    "padding_fraction": "share of the positions computed in forward passes that held no token of a sample",
    "lockstep": "positions of the slowest rank × ranks / tokens: cost of padding and of unequal ranks; 1 is ideal",
    "advantage_abs": "mean of |advantage| over samples",
    "zero_advantage_fraction": "share of the samples with an advantage below 1e-6: nothing is learned from them",
    "seconds": "of the whole step, the pull included",
    "seconds_pull": "until rank 0 had the samples' tokens",
    "seconds_forward": "in forward passes, on rank 0",
    "seconds_frozen": "in forward passes of the reference and the teachers, on rank 0; only with such a model",
    "seconds_critic": "in passes and the optimizer of the critic, on rank 0; only with a critic",
    "seconds_backward": "in backward passes, on rank 0",
    "seconds_optimizer": "in gradient clipping and the optimizer, on rank 0",
    "tokens_per_second": "tokens / seconds",
    "memory_peak_bytes": "largest so far on any rank: of the GPU's memory, or of the process on CPU",
    "first_step_logprob_error": "largest |l_old − l_mu| of the run's first step; in float32 it must be rounding",
}
"""Name of each metric in StepDone → its meaning and unit; a share is of 1."""

BY_TASK = (
    *("clip_fraction", "clip_fraction_low", "clip_fraction_high", "ratio_mean", "ratio_max", "logprob_diff_mean"),
    *("logprob_diff_max", "kl_k1", "kl_k3", "ess", "correction_mean", "masked_fraction", "entropy", "tokens"),
    *("samples", "samples_trained"),
)
"""Metrics that a batch of several tasks has for each task too, as NAME/TASK."""
NO_ADVANTAGE = 1e-6  # equal rewards give advantages of 0 except for rounding

SUMS = (
    *("loss", "tokens", "clipped", "clipped_low", "clipped_high", "ratio", "distance"),
    *("correction", "masked", "entropy"),
    *("tokens_old", "abs", "k1", "k3", "weight", "weight_squared", "logprob", "tokens_current", "abs_current"),
)


@dataclass(frozen=True)
class Mismatch:
    """|l_old − l_mu| of tokens of the current version, in nats."""

    tokens: int
    mean: float
    largest: float


@dataclass
class TokenStatistics:
    """Sums over tokens of this replica, and largest values: |l_old − l_mu|, ratio, |l_old − l_mu| of current tokens.

    Counting a microbatch copies nothing between host and device and does not wait for the device.
    """

    device: torch.device
    tasks: tuple[str, ...] = ()  # names, if there are several
    sums: Tensor = field(init=False)  # of all tokens, then of those of each task
    largest: Tensor = field(init=False)
    has_entropy: bool = False
    kl: dict[str, Tensor] = field(default_factory=dict)  # kind of a model → sums of k1, k3 and tokens
    positions: int = 0
    padding: int = 0

    def __post_init__(self) -> None:
        self.sums = torch.zeros(1 + len(self.tasks), len(SUMS), dtype=torch.float64, device=self.device)
        self.largest = torch.zeros(1 + len(self.tasks), 3, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        objective: Objective,
        old_BK: Tensor | None,
        weights_BK: Tensor | None,
        entropy_BK: Tensor | None,
        inputs: MicrobatchInputs,
    ) -> None:
        """Count one microbatch.

        Args:
            loss: the microbatch's share of the loss.
            objective: objective of its tokens.
            old_BK: l_old, or None.
            weights_BK: weights for the mismatch, 0 outside the mask; None: 1.
            entropy_BK: entropies, 0 outside the mask, or None.
            inputs: the microbatch, with l_mu.
        """
        tokens, mask_BK = inputs.tokens, inputs.tokens.mask_BK
        self.positions += inputs.positions
        self.padding += inputs.padding
        ratio_BK = objective.ratio_BK.double().where(mask_BK, 0.0)
        clipped_BK = objective.clipped_BK & mask_BK
        count_B = mask_BK.sum(-1, dtype=torch.float64)
        zero_B = torch.zeros_like(count_B)
        sums = [zero_B, count_B, clipped_BK.sum(-1)]
        sums += [(clipped_BK & (ratio_BK < 1)).sum(-1), (clipped_BK & (ratio_BK > 1)).sum(-1)]
        sums += [ratio_BK.sum(-1), (ratio_BK - 1).abs().where(mask_BK, 0.0).sum(-1)]
        if weights_BK is None:
            sums += [count_B, zero_B]
        else:
            sums += [weights_BK.sum(-1, dtype=torch.float64), (mask_BK & (weights_BK == 0)).sum(-1)]
        sums.append(zero_B if entropy_BK is None else entropy_BK.sum(-1, dtype=torch.float64))
        self.has_entropy = entropy_BK is not None
        largest_B = largest_current_B = zero_B
        if old_BK is None:
            sums += [zero_B] * (len(SUMS) - len(sums))
        else:
            mismatch_BK = (old_BK.double() - tokens.behavior_BK.double()).where(mask_BK, 0.0)
            weight_BK = mismatch_BK.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().where(mask_BK, 0.0)
            sums += [count_B, mismatch_BK.abs().sum(-1), -mismatch_BK.sum(-1)]
            sums.append((weight_BK - 1 - mismatch_BK).where(mask_BK, 0.0).sum(-1))
            sums += [weight_BK.sum(-1), weight_BK.square().sum(-1), old_BK.double().where(mask_BK, 0.0).sum(-1)]
            current_BK = mask_BK & inputs.current_B.unsqueeze(-1)
            error_BK = mismatch_BK.abs().where(current_BK, 0.0)
            sums += [current_BK.sum(-1), error_BK.sum(-1)]
            largest_B, largest_current_B = mismatch_BK.abs().amax(-1), error_BK.amax(-1).nan_to_num(nan=math.inf)
        sums_BS = torch.stack([value.double() for value in sums], -1)
        largest_B3 = torch.stack([largest_B, ratio_BK.amax(-1), largest_current_B], -1)
        self.sums[0, 0] += loss.double()
        self.sums[0] += sums_BS.sum(0)
        self.largest[0] = torch.maximum(self.largest[0], largest_B3.amax(0))
        if self.tasks:
            assert inputs.tasks_B is not None, "of a batch with several tasks"
            self.sums.index_add_(0, 1 + inputs.tasks_B, sums_BS)
            places_B3 = (1 + inputs.tasks_B).unsqueeze(-1).expand_as(largest_B3)
            self.largest.scatter_reduce_(0, places_B3, largest_B3, "amax")

    @torch.no_grad()
    def add_kl(self, role: str, log_ratio_BK: Tensor, mask_BK: Tensor) -> None:
        """Count one microbatch of a model that is not trained.

        Args:
            role: kind of the model.
            log_ratio_BK: log-probabilities under the policy minus those under the model.
            mask_BK: True at tokens that count.
        """
        k1_BK = log_ratio_BK.double().where(mask_BK, 0.0)
        bounded_BK = -k1_BK.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        sums = torch.stack([k1_BK.sum(), (torch.expm1(bounded_BK) - bounded_BK).sum(), mask_BK.sum()])
        self.kl[role] = self.kl.get(role, torch.zeros_like(sums)) + sums

    def current_mismatch(self, world: World) -> Mismatch:
        """Return the mismatch over all replicas, so far; all ranks take part."""
        tokens, total = world.sum_over_data(self.sums[0, -2:].clone()).tolist()
        largest = float(world.max_over_data(self.largest[0].clone())[2])
        return Mismatch(int(tokens), total / max(1.0, tokens), largest)

    def metrics(self, world: World, minibatches: int) -> dict[str, float]:
        """Return the metrics over all replicas, see ``METRICS``; all ranks take part."""
        largest = world.max_over_data(self.largest.clone()).tolist()
        sums = world.sum_over_data(self.sums.clone()).tolist()
        places = self.sums.new_tensor([self.positions, self.padding])
        positions, padding = world.sum_over_data(places).tolist()
        whole, *of_tasks = (self._of(*each) for each in zip(sums, largest, strict=True))
        kl = {role: world.sum_over_data(sums.clone()).tolist() for role, sums in self.kl.items()}
        whole |= {"loss": sums[0][0] / minibatches, "padding_fraction": padding / positions}
        for role, (k1, k3, tokens) in kl.items():
            whole |= {f"{role}_kl_k1": k1 / max(1.0, tokens), f"{role}_kl_k3": k3 / max(1.0, tokens)}
        for task, metrics in zip(self.tasks, of_tasks, strict=True):
            whole |= {f"{name}/{task}": metrics[name] for name in BY_TASK if name in metrics}
        return whole

    def _of(self, sums: list[float], largest: list[float]) -> dict[str, float]:
        """Return the metrics of some tokens from their sums and largest values over all replicas."""
        total = dict(zip(SUMS, sums, strict=True))
        n, n_old = max(1.0, total["tokens"]), max(1.0, total["tokens_old"])
        metrics = {
            "clip_fraction": total["clipped"] / n,
            "clip_fraction_low": total["clipped_low"] / n,
            "clip_fraction_high": total["clipped_high"] / n,
            "ratio_mean": total["ratio"] / n,
            "ratio_max": largest[1],
            "ratio_distance": total["distance"] / n,
            "logprob_diff_mean": total["abs"] / n_old,
            "logprob_diff_max": largest[0],
            "kl_k1": total["k1"] / n_old,
            "kl_k3": total["k3"] / n_old,
            "ess": total["weight"] ** 2 / (n_old * total["weight_squared"]) if total["tokens_old"] else 1.0,
            "correction_mean": total["correction"] / n,
            "masked_fraction": total["masked"] / n,
            "training_log_ppl": -total["logprob"] / n_old,
            "tokens": total["tokens"],
        }
        return metrics | ({"entropy": total["entropy"] / n} if self.has_entropy else {})


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


def sample_metrics(task_N: Sequence[str], trained_N: NDArray[np.bool_], tasks: Sequence[str]) -> dict[str, float]:
    """Return the numbers of samples of a batch and of those that are trained, see ``METRICS``; also of each of
    ``tasks``."""
    chosen = {"": np.ones(len(trained_N), np.bool_)} | {f"/{task}": np.equal(task_N, task) for task in tasks}
    metrics = {f"samples{name}": float(own_N.sum()) for name, own_N in chosen.items()}
    return metrics | {f"samples_trained{name}": float((own_N & trained_N).sum()) for name, own_N in chosen.items()}


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
