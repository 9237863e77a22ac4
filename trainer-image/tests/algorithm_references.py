"""Losses of algorithms in NumPy, token by token, written from the formulas of docs/algorithms.md.

All functions accept complex log-probabilities: the imaginary part of f(x + ih) / h is the derivative of f to the last
bit (complex step), which finite differences in float64 are not. ``fixed`` are the same log-probabilities as real
numbers, for terms without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rljob.api.algorithm import Algorithm

STEP = 1e-30


@dataclass(frozen=True)
class Tokens:
    """A minibatch: lists of samples, of which each is a list of its model's tokens."""

    now: list[list[float]]
    old: list[list[float]]
    engine: list[list[float]]
    advantages: list[list[float]]
    turns: list[list[int]]
    rewards: list[float]
    limits: list[int]
    reference: list[list[float]] = field(default_factory=list)
    keys: list[list[float]] = field(default_factory=list)

    def without(self, removed: int) -> Tokens:
        """Return the minibatch without one sample."""
        kept = [n for n in range(len(self.now)) if n != removed]
        return replace(self, **{name: [values[n] for n in kept] for name, values in vars(self).items() if values})


def clamp(x: Any, low: float, high: float) -> Any:
    return low if x.real < low else high if x.real > high else x


def smaller(a: Any, b: Any) -> Any:
    return a if np.real(a) <= np.real(b) else b


def ppo(ratio: Any, advantage: float, s: Algorithm) -> Any:
    value = smaller(ratio * advantage, clamp(ratio, 1 - s.clip_low, 1 + s.clip_high) * advantage)
    if s.dual_clip and advantage < 0 and value.real < s.dual_clip * advantage:
        return s.dual_clip * advantage
    return value


def selected(s: Algorithm, tokens: Tokens) -> list[tuple[int, int]]:
    """Return sample and place of the tokens that the objective selects."""
    places = [(n, t) for n, own in enumerate(tokens.old) for t in range(len(own))]
    advantage = np.mean([tokens.advantages[n][t] for n, t in places])
    logprob = np.mean([tokens.old[n][t] for n, t in places])
    covariance = {(n, t): (tokens.advantages[n][t] - advantage) * (tokens.old[n][t] - logprob) for n, t in places}
    count = max(1, int(s.covariance_share * len(places)))
    if s.objective == "kl_cov":
        return sorted(places, key=lambda p: (-covariance[p], tokens.keys[p[0]][p[1]]))[:count]

    def clipped(n: int, t: int) -> bool:
        ratio = np.exp(tokens.old[n][t] - tokens.engine[n][t]) if s.ratio == "behavior" else 1.0
        sign = np.sign(tokens.advantages[n][t])
        return bool((sign > 0 and ratio > 1 + s.clip_high) or (sign < 0 and ratio < 1 - s.clip_low))

    inside = [p for p in places if s.covariance_low < covariance[p] < s.covariance_high and not clipped(*p)]
    return sorted(inside, key=lambda p: tokens.keys[p[0]][p[1]])[:count]


def objective(s: Algorithm, tokens: Tokens, n: int, t: int, now: Any) -> Any:
    """Return the objective of token t of sample n; ``now`` is its log-probability, complex."""
    a, fixed = tokens.advantages[n][t], tokens.now[n]
    denominators = tokens.engine[n] if s.ratio == "behavior" else tokens.old[n]
    ratio = np.exp(clamp(now - denominators[t], -20, 20))
    same_turn = [k for k in range(len(fixed)) if tokens.turns[n][k] == tokens.turns[n][t]]
    if s.objective == "ppo_clip":
        return ppo(ratio, a, s)
    if s.objective == "raft_pp":
        return ppo(ratio, a, s) if tokens.rewards[n] > 0 else 0 * now
    if s.objective in ("gspo", "segment_clip"):
        places = same_turn if s.objective == "segment_clip" else range(len(fixed))
        mean = sum(fixed[k] - denominators[k] for k in places) / len(places)
        return ppo(np.exp(clamp(mean, -20, 20)) * np.exp(now - fixed[t]), a, s)
    if s.objective == "gpg":
        return a * now
    if s.objective == "geo_mean":

        def bounded(log_ratio: Any, sign: float) -> Any:
            return smaller(log_ratio, s.clip_high) if sign > 0 else -smaller(-log_ratio, s.clip_low)

        each = [bounded(fixed[k] - denominators[k], tokens.advantages[n][k]) for k in range(len(fixed))]
        own = bounded(now - denominators[t], a)
        return np.exp(sum(each) / len(each)) * np.exp(own - own.real) * a
    if s.objective == "cispo":
        return clamp(ratio.real, 1 - s.clip_low, 1 + s.clip_high) * a * now
    if s.objective == "tis":
        return min(ratio.real, 1.0) * a * now
    if s.objective == "topr":
        whole = np.exp(clamp(sum(fixed[k] - denominators[k] for k in range(len(fixed))), -20, 20))
        return (1.0 if tokens.rewards[n] > 0 else min(whole, 1.0)) * a * now
    if s.objective == "sapo":
        tau = s.gate_positive if a > 0 else s.gate_negative
        return 1 / (1 + np.exp(-tau * (ratio - 1))) * 4 / tau * a
    if s.objective == "vespo":
        w = np.exp(clamp(sum(fixed[k] - denominators[k] for k in range(len(fixed))), -20, 20))
        k, decay = s.kernel_power_negative, s.kernel_decay_negative
        if a > 0:
            k, decay = s.kernel_power_positive, s.kernel_decay_positive
        return np.exp(decay) * w**k * np.exp(-decay * w) * a * now
    if s.objective == "clip_cov":
        return 0 * now if (n, t) in selected(s, tokens) else ppo(ratio, a, s)
    if s.objective == "kl_cov":
        log_ratio = clamp(now - denominators[t], -20, 20)
        distance = np.sign(np.real(log_ratio)) * log_ratio
        return ratio * a - (s.covariance_penalty * distance if (n, t) in selected(s, tokens) else 0)
    assert s.objective == "kimi"
    return a * now - s.log_ratio_penalty / 2 * clamp(now - denominators[t], -20, 20) ** 2


def penalty(s: Algorithm, now: Any, fixed: float, reference: float) -> Any:
    """Return β·KL of a token in the loss."""
    if s.kl_estimator == "k2":
        return s.kl_coefficient * (now - reference) ** 2 / 2
    k3 = np.exp(reference - now) - (reference - now) - 1
    return s.kl_coefficient * (np.exp(now - fixed) * k3 if s.kl_estimator == "k3_unbiased" else k3)


def weight(s: Algorithm, tokens: Tokens, n: int, t: int) -> float:
    """Return the weight of a token for the mismatch between engine and trainer."""
    log_rho = [old - engine for old, engine in zip(tokens.old[n], tokens.engine[n], strict=True)]
    geometric = np.exp(sum(log_rho) / len(log_rho))
    if s.mask_geometric_below is not None and geometric < s.mask_geometric_below:
        return 0.0
    if s.mask_geometric_above is not None and geometric > s.mask_geometric_above:
        return 0.0
    if s.veto_below is not None and min(np.exp(log_rho)) < s.veto_below:
        return 0.0
    gap = abs(np.exp(tokens.old[n][t]) - np.exp(tokens.engine[n][t]))
    if s.mask_probability_gap is not None and gap > s.mask_probability_gap:
        return 0.0
    drift = [engine - now for engine, now in zip(tokens.engine[n], tokens.now[n], strict=True)]
    if s.mask_negative_kl is not None and tokens.advantages[n][t] < 0 and np.mean(drift) > s.mask_negative_kl:
        return 0.0
    if s.correction == "none":
        return 1.0
    turn = [x for x, k in zip(log_rho, tokens.turns[n], strict=True) if k == tokens.turns[n][t]]
    levels = {"token": log_rho[t], "segment": sum(turn), "sequence": sum(log_rho), "geometric": np.mean(log_rho)}
    rho = np.exp(clamp(levels[s.correction_level], -20, 20))
    if s.correction == "tis":
        return min(rho, s.correction_cap)
    return rho if s.correction_floor <= rho <= s.correction_cap else 0.0


def share(s: Algorithm, tokens: Tokens, n: int) -> float:
    """Return the weight of the tokens of sample n in the loss."""
    samples, length = len(tokens.now), len(tokens.now[n])
    return {
        "token_mean": 1 / sum(map(len, tokens.now)),
        "seq_mean_token_sum": 1 / samples,
        "seq_mean_token_mean": 1 / (samples * length),
        "seq_mean_token_sum_norm": 1 / (samples * tokens.limits[n]),
    }[s.aggregation]


def loss_and_gradient(s: Algorithm, tokens: Tokens) -> tuple[float, list[list[float]]]:
    """Return the loss of a minibatch and its derivative by each log-probability."""
    loss, gradient = 0.0, []
    positive = [n for n, reward in enumerate(tokens.rewards) if reward > 0]
    for n, sample in enumerate(tokens.now):
        gradient.append([])
        for t, logprob in enumerate(sample):
            factor = -share(s, tokens, n) * weight(s, tokens, n, t)
            now = complex(logprob, STEP)
            value = objective(s, tokens, n, t, now)
            if s.kl_coefficient and s.kl_in == "loss":
                value = value - penalty(s, now, logprob, tokens.reference[n][t])
            loss += factor * value.real
            gradient[-1].append(factor * complex(value).imag / STEP)
            if s.positive_coefficient and n in positive:
                each = -s.positive_coefficient / sum(len(tokens.now[k]) for k in positive)
                loss += each * logprob
                gradient[-1][-1] += each
    scale = 1.0 if s.loss_scale is None else s.loss_scale
    return scale * loss, [[scale * each for each in own] for own in gradient]
