"""A normalisation of rewards is refused exactly where the advantage removes it, by the trainer's own functions."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rljob.api.algorithm import Algorithm
from rljob.api.load import load
from rljob.api.models import RLJobSpec
from rljob.api.reward_checks import reward_problems
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import EarlierSteps, Train
from rljob.testing.random_samples import ONE_RANK, resolved
from rljob.trainer.algorithms.advantages.base import AdvantageInputs
from rljob.trainer.algorithms.needs import load_function
from rljob.trainer.algorithms.stabilizers import shape_rewards, shape_tokens, stabilize
from rljob.trainer.batch import Row

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
TURNS = 2
THOROUGH = bool(os.environ.get("RLJOB_THOROUGH"))
KINDS = (None, "group", "batch", "running") if THOROUGH else (None, "group", "batch")
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group_normalized": {},
    "group_centered": {},
    "reward": {},
    "rloo": {},
    "opo": {},
    "lite_ppo": {},
    "remax": {},
    "reinforce_pp": {},
    "discounted": {"advantage": "reinforce_pp", "discount": 0.5},
    "reinforce_pp_baseline": {},
    "turn_return": {},
}
OTHERS: list[dict[str, Any]] = [{}, {"overlongBuffer": 8}, {"klCoefficient": 0.5, "klIn": "reward"}]
CASES = (
    [*product((1, 3), (1, TURNS), OTHERS)]
    if THOROUGH
    else [*((3, 1, other) for other in OTHERS), (3, TURNS, {}), (1, 1, {})]
)
"""Members of a group, turns of a sample, other changes of rewards."""


def given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def rewarded(train: Train, turns: int) -> tuple[Train, dict[int, np.ndarray]]:
    """Return a batch with earlier batches, and the reward of each of the model's tokens: of several turns before it
    ends, or all at the end."""
    generator, rewards = np.random.default_rng(len(train.samples)), {}
    samples: list[BatchSample] = []
    for i, sample in enumerate(train.samples):
        rewards[i] = np.zeros(sample.response_tokens)
        rewards[i][-1] = generator.normal(2, 3)
        if turns > 1:
            rewards[i][: max(1, sample.response_tokens // 2)] += generator.normal(0, 1)
        changed = {"reward": float(rewards[i].sum()), "baseline": len(sample.group) + float(sample.group[1:])}
        samples.append(msgspec.structs.replace(sample, **changed))
    return msgspec.structs.replace(train, samples=samples, earlier=EarlierSteps(5, 1.5, 9.0)), rewards


def advantages(train: Train, rewards: dict[int, np.ndarray], algorithm: Algorithm) -> np.ndarray:
    """Return the advantages of all tokens, as a step computes them; KL is a number of each token."""
    shaped, of_tokens, samples, rows = shape_rewards(train, algorithm).samples, {}, [], {}
    for i, sample in enumerate(shaped):
        mask_L = np.ones(sample.response_tokens, np.bool_)
        of_tokens[i] = shape_tokens(rewards[i], mask_L, sample.reward - train.samples[i].reward)
        kl_L = np.sin(np.arange(len(mask_L)) + i) * (algorithm.kl_coefficient or 0)
        of_tokens[i], reward = of_tokens[i] - kl_L, sample.reward - float(kl_L.sum())
        samples.append(msgspec.structs.replace(sample, reward=reward))
        ends = (max(1, len(mask_L) // 2),) if len(mask_L) > 1 else ()
        rows[i] = Row(np.zeros(len(mask_L), np.int64), np.zeros(len(mask_L), np.float32), mask_L, of_tokens[i], ends)
    scores: Any = None
    inputs = AdvantageInputs(0, samples, rows, of_tokens, scores, ONE_RANK, algorithm)
    masks = {i: row.mask_L for i, row in rows.items()}
    found = stabilize(load_function(algorithm, "advantage")(inputs), masks, train.samples, algorithm, ONE_RANK)
    return np.concatenate([found[i] for i in rows])


def refused(spec: RLJobSpec, fields: dict[str, Any], members: int, turns: int) -> set[str]:
    """Return which of rewardMean and rewardStd are refused because they have no effect."""
    task = spec.tasks[0].model_copy(update={"loop": "environment" if turns > 1 else "single_turn"})
    training = spec.training.model_copy(update={"samples_per_prompt": members})
    changed = {"algorithm": Algorithm.model_validate(given(fields)), "tasks": [task], "training": training}
    problems = [each for each in reward_problems(spec.model_copy(update=changed)) if "so it has no effect" in each]
    return {each.partition(":")[0].removeprefix("algorithm.") for each in problems}


@pytest.mark.parametrize("whiten", [None, True], ids=["", "whitened"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_normalization_is_refused_where_it_has_no_effect_and_nowhere_else(batch, name, whiten):
    spec, wrong = load(QUICKSTART).spec, []
    for members, turns, other in CASES:
        train, rewards = rewarded(batch(groups=4, members=members)[0], turns)
        base = {"advantage": name, "whitenAdvantages": whiten} | ADVANTAGES[name] | other
        found = {
            (mean, std): advantages(train, rewards, resolved(given(base | {"rewardMean": mean, "rewardStd": std})))
            for mean, std in product(KINDS, KINDS)
        }
        for (mean, std), values in found.items():
            fields = base | {"rewardMean": mean, "rewardStd": std}
            named = refused(spec, fields, members, turns)
            for field, without in (("rewardMean", found[None, std]), ("rewardStd", found[mean, None])):
                if fields[field] is None:
                    continue
                same = np.allclose(values, without, rtol=1e-4, atol=1e-5)
                if (field in named) != same and (members > 1 or not same):
                    wrong.append((field, given(fields), members, turns, same))
    assert not wrong, "\n".join(map(str, wrong))
