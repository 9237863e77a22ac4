"""Compares losses, gradients and advantages with verl's and TRL's own functions, in float64.

The functions are cut out of the released files of both projects, which are fetched from the package registry and not
stored in the repository, and executed. Ours is the trainer's own loss (`PolicyLoss`). verl adds 1e-8 to numbers of
tokens: its functions are executed without that number, where all cases have one tolerance, and also as released
(`as_released`).

python -m tools.algorithm_peers   prints one JSON object: the largest differences of each case; exit code 1 if
                                  one exceeds its tolerance
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljob.api.extensions import KL_ESTIMATORS, load
from rljob.testing.check_advantage import estimate
from rljob.testing.random_samples import ReferenceSample, random_samples, resolved
from rljob.trainer.algorithms.stabilizers import whiten
from rljob.trainer.batch import Microbatch, MicrobatchInputs
from rljob.trainer.critic_step import CriticLoss, ValueStatistics
from tools.peer_functions import RELEASES, SeededDraws, fetch, functions, importance_ratio
from tools.peer_minibatch import MAX_TOKENS, WORLD, Arrays, Result, backward, ours

TOLERANCE = 1e-12
EPSILON = 2e-8
KNOWN = {
    "verl vanilla seq-mean-token-mean": EPSILON,
    "verl gspo": EPSILON,
    "verl geo_mean": 2 * EPSILON,  # in the ratio and in the advantage
    "verl sapo": EPSILON,
    "verl advantages reinforce_pp": EPSILON,
    "verl advantages reinforce_pp_baseline": EPSILON,
    "verl critic gae, whitened": EPSILON,
}
"""Case → its tolerance with the functions as released, where verl adds 1e-8 to a number of tokens."""
SEEDS, KL = 3, 0.3


class Config(SimpleNamespace):
    """A configuration of verl, which is read by attribute and by ``get``."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return getattr(self, name, default)


def verl_losses(verl: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Callable[[Arrays], Result]]]:
    """Yield name, our ``spec.algorithm`` and verl's result of each case."""
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    fields = {"clipLow": 0.2, "clipHigh": 0.28, "correction": "none"}
    config = Config(
        **clips, loss_scale_factor=None, global_batch_info={}, tau_pos=1.0, tau_neg=1.05, policy_loss=Config(
            clip_cov_ratio=0.1, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=0.1, ppo_kl_coef=0.7,
        ),
    )  # fmt: skip

    def case(function: str, mode: str, estimator: str = "") -> Callable[[Arrays], Result]:
        def result(arrays: Arrays) -> Result:
            logprobs_BT = arrays.logprobs()
            advantages_BT = arrays.advantages_B.unsqueeze(-1).expand(arrays.mask_BT.shape)
            verl["torch"] = SeededDraws(arrays.keys_BT)
            loss = verl[f"compute_policy_loss_{function}"](
                old_log_prob=arrays.old_BT, log_prob=logprobs_BT, advantages=advantages_BT,
                response_mask=arrays.mask_BT.double(), loss_agg_mode=mode, config=config,
            )[0]  # fmt: skip
            if estimator:  # as verl's actor adds it
                kl_BT = verl["kl_penalty"](logprobs_BT, arrays.reference_BT, estimator)
                loss = loss + KL * verl["agg_loss"](kl_BT, arrays.mask_BT.double(), mode)
            return backward(loss, logprobs_BT)

        return result

    for estimator in ("k2", "k3"):
        with_kl = fields | {"klCoefficient": KL, "klEstimator": estimator}
        yield f"vanilla with KL {estimator}", with_kl, case("vanilla", "token-mean", estimator)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        yield f"vanilla {mode}", fields | {"aggregation": mode.replace("-", "_")}, case("vanilla", mode)
    sample_mean = "seq-mean-token-mean"
    by_sample = fields | {"aggregation": "seq_mean_token_mean"}
    yield "gspo", by_sample | {"objective": "gspo", "dualClip": 0}, case("gspo", sample_mean)
    yield "geo_mean", by_sample | {"objective": "geo_mean"}, case("geo_mean", sample_mean)
    covariance = {"correction": "none", "covarianceShare": 0.1}
    drawn = covariance | {"clipHigh": 0.28, "covarianceLow": 0.1, "covarianceHigh": 2.0}
    yield "clip_cov", drawn | {"objective": "clip_cov"}, case("clip_cov", "token-mean")
    penalized = covariance | {"objective": "kl_cov", "covariancePenalty": 0.7}
    yield "kl_cov", penalized, case("kl_cov", "token-mean")
    yield "gpg", {"objective": "gpg", "correction": "none"}, case("gpg", "token-mean")
    if "compute_policy_loss_sapo" in verl:
        sapo = {"objective": "sapo", "aggregation": "seq_mean_token_mean", "correction": "none"}
        yield "sapo", sapo, case("sapo", sample_mean)
    if "compute_policy_loss_cispo" in verl:
        yield "cispo", fields | {"objective": "cispo"}, case("cispo", "token-mean")


def trl_losses(text: str, trl: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Callable[[Arrays], Result]]]:
    """Yield name, our ``spec.algorithm`` and TRL's result of each case."""

    def case(loss_type: str, level: str = "token", **changes: Any) -> Callable[[Arrays], Result]:
        def result(arrays: Arrays) -> Result:
            logprobs_BT = arrays.logprobs()
            mask_BT = arrays.mask_BT.double()
            trainer = _trl_trainer(loss_type, level, logprobs_BT, trl) | changes
            self = SimpleNamespace(**trainer)
            inputs = {
                "prompt_ids": mask_BT[:, :1], "prompt_mask": mask_BT[:, :1], "completion_ids": mask_BT,
                "completion_mask": mask_BT, "advantages": arrays.advantages_B, "old_per_token_logps": arrays.old_BT,
                "sampling_per_token_logps": arrays.behavior_BT, "num_items_in_batch": mask_BT.sum(),
                "ref_per_token_logps": arrays.reference_BT,
            }  # fmt: skip
            if self.use_vllm:
                inputs["importance_sampling_ratio"] = importance_ratio(
                    text,
                    self,
                    {
                        "completion_mask": mask_BT,
                        "old_per_token_logps": arrays.old_BT,
                        "sampling_per_token_logps": arrays.behavior_BT,
                    },
                )
            return backward(trl["_compute_loss"](self, None, inputs), logprobs_BT)

        return result

    fields = {"clipLow": 0.2, "clipHigh": 0.28, "correction": "none", "dualClip": 0}
    yield "grpo", fields | {"aggregation": "seq_mean_token_mean"}, case("grpo")
    yield "bnpo", fields, case("bnpo")
    yield "bnpo with KL", fields | {"klCoefficient": KL}, case("bnpo", beta=KL)
    yield "dapo", fields, case("dapo")
    yield "dr_grpo", fields | {"aggregation": "seq_mean_token_sum_norm"}, case("dr_grpo")
    cispo = {"objective": "cispo", "clipLow": 1.0, "clipHigh": 0.28, "correction": "none"}
    yield "cispo", cispo, case("cispo", epsilon_high=1.28)
    sapo = {"objective": "sapo", "correction": "none", "aggregation": "seq_mean_token_mean"}
    yield "sapo", sapo, case("sapo")
    vespo = {"objective": "vespo", "correction": "none"}
    yield "vespo", vespo, case("vespo")
    unbounded = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e9}
    engine: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_clip_min": None, **unbounded}
    yield "vespo against the engine", vespo | {"ratio": "behavior"}, case("vespo", **engine)
    luspo = fields | {"objective": "gspo", "aggregation": "seq_mean_token_sum"}
    yield "luspo", luspo, case("luspo", "sequence")
    masked = fields | {"maskNegativeKl": 0.05}
    yield "off-policy mask", masked, case("bnpo", off_policy_mask_threshold=0.05)
    for mode, correction, level in (
        ("token_truncate", {"correction": "tis", "correctionCap": 1.2}, "token"),
        ("sequence_truncate", {"correction": "tis", "correctionCap": 1.2}, "sequence"),
        ("token_mask", {"correction": "icepop", "correctionFloor": 0.8, "correctionCap": 1.2}, "token"),
        ("sequence_mask", {"correction": "icepop", "correctionFloor": 0.8, "correctionCap": 1.2}, "sequence"),
    ):
        vllm: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_mode": mode}
        vllm |= {
            "vllm_importance_sampling_clip_max": 1.2,
            "vllm_importance_sampling_clip_min": 0.8 if correction["correction"] == "icepop" else None,
        }
        yield f"{mode}", fields | correction | {"correctionLevel": level}, case("bnpo", **vllm)


def _trl_trainer(loss_type: str, level: str, logprobs_BT: Tensor, trl: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of TRL's trainer that its loss reads."""
    none = torch.zeros_like(logprobs_BT.detach())
    args = SimpleNamespace(
        delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1,
        use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False
    )
    return {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs_BT, none, None),
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": level, "beta": 0.0, "loss_type": loss_type, "epsilon_low": 0.2,
        "epsilon_high": 0.28, "args": args, "use_vllm": False, "vllm_importance_sampling_correction": True,
        "model": SimpleNamespace(training=True), "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS, "accelerator": accelerator, "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)), "get_off_policy_mask": trl["get_off_policy_mask"],
        "get_gamma_weights": torch.no_grad()(trl["get_gamma_weights"]),  # its decorator in TRL
    }  # fmt: skip


VERL_ADVANTAGES = {
    "grpo": ("compute_grpo_outcome_advantage", "group_normalized"),
    "rloo": ("compute_rloo_outcome_advantage", "rloo"),
    "opo": ("compute_opo_outcome_advantage", "opo"),
    "reinforce_pp_baseline": ("compute_reinforce_plus_plus_baseline_outcome_advantage", "reinforce_pp_baseline"),
    "reinforce_pp": ("compute_reinforce_plus_plus_outcome_advantage", "reinforce_pp"),
    "remax": ("compute_remax_outcome_advantage", "remax"),
}
"""Name → verl's function, our advantage."""


def advantage_difference(verl: dict[str, Any], name: str, seed: int) -> float:
    """Return the largest difference of an advantage, over groups of more than one member.

    A group of one has no other samples: for it the projects have conventions of their own (docs/algorithms.md).
    """
    function, advantage = VERL_ADVANTAGES[name]
    samples = [sample for sample in random_samples(seed) if sample.group != "b"]
    mask_BT = torch.zeros(len(samples), MAX_TOKENS, dtype=torch.float64)
    rewards_BT = torch.zeros_like(mask_BT)
    for b, sample in enumerate(samples):
        mask_BT[b, : len(sample.logprobs_T)] = 1
        rewards_BT[b, len(sample.logprobs_T) - 1] = sample.reward
    arguments: dict[str, Any] = {"token_level_rewards": rewards_BT, "response_mask": mask_BT}
    if name == "reinforce_pp":
        arguments["config"] = Config(gamma=1.0)
    elif name == "remax":
        arguments["reward_baselines"] = torch.tensor([sample.baseline for sample in samples], dtype=torch.float64)
    else:
        arguments["index"] = np.array([sample.group for sample in samples], dtype=object)
    theirs_BT = verl[function](**arguments)[0]
    own = estimate(resolved({"advantage": advantage}), [_at_the_end(sample) for sample in samples])
    return max(float(np.abs(theirs_BT[b, : len(found_T)].numpy() - found_T).max()) for b, found_T in enumerate(own))


def _at_the_end(sample: ReferenceSample) -> ReferenceSample:
    """Return the sample as one turn with its whole reward at its last token."""
    rewards_T = np.zeros_like(sample.rewards_T)
    rewards_T[-1] = sample.reward
    return ReferenceSample(**(vars(sample) | {"rewards_T": rewards_T, "turns_T": np.zeros_like(sample.turns_T)}))


def critic_differences(verl: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the largest differences of generalized advantages, returns, and the critic's loss and its gradient, for
    samples of several turns with one token of an observation between them."""
    samples = random_samples(seed)
    mask_BT = torch.zeros(len(samples), MAX_TOKENS, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    values_BT, rewards_BT, own_BT = (torch.zeros(mask_BT.shape) for _ in range(3))
    found = estimate(resolved({"advantage": "gae", "discount": 0.9, "gaeLambda": 0.7}), samples)
    for b, sample in enumerate(samples):
        places = np.arange(len(sample.turns_T)) + sample.turns_T
        mask_BT[b, places] = True
        for rows_BT, each_T in ((values_BT, sample.values_T), (rewards_BT, sample.rewards_T), (own_BT, found[b])):
            rows_BT[b, places] = torch.from_numpy(each_T)
    noise_BT = torch.randn(mask_BT.shape, generator=generator)
    given_BT = torch.where(mask_BT, values_BT, noise_BT)
    theirs_BT, returns_BT = verl["compute_gae_advantage_return"](rewards_BT, given_BT, mask_BT.double(), 0.9, 0.7)
    (whitened_T,) = whiten({0: own_BT[mask_BT].numpy()}, {0: np.ones(int(mask_BT.sum()), np.bool_)}, WORLD).values()
    targets_BT, none = (values_BT + own_BT).where(mask_BT, 0.0), torch.zeros(0)
    tokens = Microbatch(mask_BT.long(), none, none, mask_BT, none, none, 1, [])
    weights_B = torch.full((len(samples),), 1 / float(mask_BT.sum()))
    inputs = MicrobatchInputs(range(len(samples)), tokens, mask_BT.numel(), 0, weights_B, none, none, 1, none)
    losses = []
    for theirs in (False, True):
        now_BT = (given_BT + noise_BT).requires_grad_()
        if theirs:
            share = verl["compute_value_loss"](now_BT, targets_BT, given_BT, mask_BT.double(), 0.3)[0]
        else:
            share = CriticLoss([inputs], [given_BT], [targets_BT], 0.3, ValueStatistics(torch.device("cpu")))(0, now_BT)
        losses.append(backward(share, now_BT))
    (loss, gradient), (expected, derivative) = losses
    return {
        "gae, whitened": float(np.abs(theirs_BT[mask_BT].numpy() - whitened_T).max()),
        "gae, returns": float((returns_BT - targets_BT)[mask_BT].abs().max()),
        "value loss": float((loss - expected).abs()),
        "value loss, gradient": float((gradient - derivative).abs().max() / derivative.abs().max()),
    }


def loss_differences(cases: Iterator[tuple[str, dict[str, Any], Callable[[Arrays], Result]]]) -> dict[str, Any]:
    """Return for each case the largest differences over all seeds: of the loss, for advantages of about 1, and of the
    gradient, relative to its largest entry."""
    found = {}
    for name, fields, theirs in cases:
        differences = []
        for seed in range(SEEDS):
            arrays = Arrays(seed)
            (loss, gradient), (expected, derivative) = ours(resolved(fields), arrays), theirs(arrays)
            change = (gradient - derivative).abs().max() / derivative.abs().max()
            differences.append((float((loss - expected).abs()), float(change)))
        found[name] = {"loss": max(loss for loss, _ in differences), "gradient": max(each for _, each in differences)}
    return found


KL_PENALTIES = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
"""verl's name → our estimator."""


def kl_difference(verl: dict[str, Any], name: str, seed: int) -> float:
    """Return the largest difference of value and gradient of an estimate of KL at the tokens."""
    arrays = Arrays(seed)
    theirs_BT, own_BT = arrays.logprobs(), arrays.logprobs()
    expected_BT = verl["kl_penalty"](theirs_BT, arrays.reference_BT, name)
    found_BT = load(KL_ESTIMATORS, KL_PENALTIES[name], "klEstimator")(own_BT, arrays.reference_BT)
    value = float((found_BT - expected_BT).detach().abs().max())
    (_, gradient), (_, derivative) = backward(found_BT.sum(), own_BT), backward(expected_BT.sum(), theirs_BT)
    return max(value, float((gradient - derivative).abs().max()))


def compare_verl(texts: dict[str, str], namespace: dict[str, Any], exact: bool) -> dict[str, Any]:
    """Return the largest differences of losses, advantages, the critic and estimates of KL from verl, by their kind."""
    core, helpers = texts.values()
    helper = SimpleNamespace(**functions(helpers, namespace, exact))
    verl = functions(core, namespace | {"verl_F": helper}, exact)
    of_critic = [critic_differences(verl, seed) for seed in range(SEEDS)]
    return {
        "verl": loss_differences(verl_losses(verl)),
        "verl_advantages": {
            name: max(advantage_difference(verl, name, seed) for seed in range(SEEDS)) for name in VERL_ADVANTAGES
        },
        "verl_critic": {name: max(each[name] for each in of_critic) for name in of_critic[0]},
        "verl_kl_penalty": {
            name: max(kl_difference(verl, name, seed) for seed in range(SEEDS)) for name in KL_PENALTIES
        },
    }


def flat(report: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each case of a report by peer and name."""
    return {
        f"{kind.replace('_', ' ')} {name}": max(case.values()) if isinstance(case, dict) else case
        for kind, cases in report.items()
        for name, case in cases.items()
    }


def main() -> int:
    """Print the result; return the exit code."""
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as directory:
        texts = {package: fetch(package, Path(directory)) for package in RELEASES}
    namespace: dict[str, Any] = {
        "torch": torch, "np": np, "math": math, "defaultdict": defaultdict,
        "ActorConfig": Config, "AlgoConfig": dict, "DictConfig": dict,
    }  # fmt: skip
    (text,) = texts["trl"].values()
    nan = {"nanmin": lambda x: x.min(), "nanmax": lambda x: x.max()}
    trl = functions(text, namespace | nan)
    report = compare_verl(texts["verl"], namespace, exact=True) | {"trl": loss_differences(trl_losses(text, trl))}
    released = flat(compare_verl(texts["verl"], namespace, exact=False))
    wrong = [name for name, value in flat(report).items() if not value <= TOLERANCE]
    wrong += [f"{name}, as released" for name, value in released.items() if not value <= KNOWN.get(name, TOLERANCE)]
    report["as_released"] = {name: value for name, value in released.items() if name in KNOWN}
    report["releases"] = {package: version for package, (version, _) in RELEASES.items()}
    report["over_tolerance"] = wrong
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
