"""Rows with several segments of the model: (prompt, model, observation, model), against plain torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_steps import CHECKS, gradients_of, plan_all
from transformers import AutoModelForCausalLM

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample, Segment
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.base import AdvantageInputs
from rljob.trainer.algorithms.rewards import token_rewards
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Row
from rljob.trainer.step import apply_batch

VOCABULARY = 61
SEGMENTS = ("prompt", "model", "observation", "model")


def two_turns(seed: int) -> tuple[Train, dict[int, Row], list[list[int]]]:
    """Return a batch of 3 groups of 2, with turn rewards of 0.25 and the rest at the end, and the segments' ends."""
    generator = np.random.default_rng(seed)
    samples, rows, ends = [], {}, []
    for i in range(6):
        sizes = generator.integers(1, 7, len(SEGMENTS))
        mask = np.repeat([kind == "model" for kind in SEGMENTS], sizes)
        ids = generator.integers(0, VOCABULARY, len(mask))
        logprobs = np.where(mask, -4 + 0.4 * generator.standard_normal(len(mask)), 0).astype(np.float32)
        reward, model = float(generator.integers(0, 3)), int(mask.sum())
        ends.append(np.cumsum(sizes).tolist())
        name, group, given = f"{i // 2}.{i % 2}", f"{i // 2}", len(mask) - model
        samples.append(BatchSample(name, group, reward, given, model, len(mask), -1, 0.7, 16))
        turns = [Segment("model", 0, ends[-1][1], 0.25), Segment("model", ends[-1][1], len(mask), reward - 0.25)]
        rows[i] = Row(ids, logprobs, mask, token_rewards(turns, mask))
    return Train(incarnation=1, step=0, samples=samples, check_initial_logprobs=False), rows, ends


def turn_returns(inputs: AdvantageInputs) -> dict[int, np.ndarray]:
    """Return of each token: the sum of rewards from it on, discounted by 0.5 per token."""
    result = {}
    for i, rewards_L in inputs.rewards.items():
        total, values = 0.0, np.zeros(len(rewards_L))
        for t in reversed(np.flatnonzero(inputs.rows[i].mask_L)):  # observations are skipped
            total = values[t] = rewards_L[t] + 0.5 * total
        result[i] = values
    return result


def reference(source: str, train: Train, rows: dict[int, Row], algorithm: Algorithm, advantage) -> dict:
    """Return the gradients of a plain model over the batch, token by token."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    total = torch.zeros(())
    for i, row in rows.items():
        logits = model(input_ids=torch.from_numpy(row.token_ids_L)[None]).logits[0] / train.samples[i].temperature
        for t in range(1, len(row.token_ids_L)):
            if row.mask_L[t]:
                logprob = torch.log_softmax(logits[t - 1], -1)[row.token_ids_L[t]]
                ratio = (logprob - float(row.logprobs_L[t])).exp()
                clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                total = total - torch.minimum(ratio * advantage(i, t), clipped * advantage(i, t))
    (total / sum(sample.response_tokens for sample in train.samples)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("advantage", ["group_centered", "mine:turn_returns"])
def test_only_the_models_tokens_are_trained_on(model_directory, world, job, monkeypatch, budget, advantage):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(turn_returns=turn_returns))
    train, rows, ends = two_turns(budget)
    made = job(algorithm={"advantage": "group_centered", "ratio": "behavior", "correction": "none", "dualClip": 0})
    algorithm = made.spec.algorithm.model_copy(update={"advantage": advantage})
    rewards = [sample.reward for sample in train.samples]

    def expected(i: int, t: int) -> float:
        if advantage == "group_centered":
            return rewards[i] - (rewards[i] + rewards[i ^ 1]) / 2
        later = rows[i].mask_L[t:].cumsum() - 1  # the model's tokens from t on
        turn = 0.25 * 0.5 ** later[ends[i][1] - 1 - t] if t < ends[i][1] else 0
        return float(turn + (rewards[i] - 0.25) * 0.5 ** later[-1])

    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    gradients = gradients_of(backend)
    result = apply_batch(plan_all(train, algorithm, world, budget), rows, algorithm, backend, world, CHECKS)
    for name, gradient in reference(str(model_directory), train, rows, algorithm, expected).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6)
    means = [np.mean([expected(i, t) for t in np.flatnonzero(rows[i].mask_L)]) for i in rows]
    np.testing.assert_allclose(result.advantages_N, means, rtol=1e-6, atol=1e-7)


def test_the_reward_of_a_segment_is_assigned_to_the_models_last_token_up_to_its_end():
    mask = np.array([False, True, True, False, True, False])

    def rewards(*turns: tuple[int, float]) -> list[float]:
        return token_rewards([Segment("model", 0, end, reward) for end, reward in turns], mask).tolist()

    assert rewards((6, 1.5)) == [0, 0, 0, 0, 1.5, 0]
    assert rewards((3, 0.5), (5, 1.0)) == [0, 0, 0.5, 0, 1.0, 0]
    assert rewards((4, 0.5), (4, 0.25)) == [0, 0, 0.75, 0, 0, 0]  # a turn without tokens: the turn before it
    assert rewards((1, 2.0)) == [0, 2.0, 0, 0, 0, 0]
    assert token_rewards([Segment("model", 0, 1, 1.0)], mask[:1]).tolist() == [0]
