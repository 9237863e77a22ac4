"""The shipped checks of objectives and advantages: they accept the built-in ones and find each kind of mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_references import Tokens, selected

from rljob.testing import check_advantage, check_objective
from rljob.testing.check_objective import selected_samples
from rljob.testing.random_samples import random_samples, resolved
from rljob.trainer.algorithms.advantages.base import from_scalars, per_batch, per_group
from rljob.trainer.algorithms.needs import load_function, requires
from rljob.trainer.algorithms.objectives.base import Objective, zero_without_advantage
from rljob.trainer.algorithms.token_selection import covariances, selects


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Function that makes a function of a user importable, and returns its name."""

    def name(function: Any) -> str:
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(function=function))
        return "mine:function"

    return name


# --- objectives ---


def ppo(sample, algorithm):
    ratio = np.exp(sample.logprobs_T - sample.old_T)
    values = np.minimum(
        ratio * sample.advantages_T,
        np.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high) * sample.advantages_T,
    )
    bound = np.where(sample.advantages_T < 0, algorithm.dual_clip * sample.advantages_T, -np.inf)
    return np.maximum(values, bound)


def segment_ratio(sample, algorithm):
    gap = sample.fixed_T - sample.old_T
    mean = np.array([gap[sample.turns_T == turn].mean() for turn in sample.turns_T])
    ratio = np.exp(mean) * np.exp(sample.logprobs_T - sample.fixed_T)
    clipped = np.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    values = np.minimum(ratio * sample.advantages_T, clipped * sample.advantages_T)
    return np.where(sample.advantages_T < 0, np.maximum(values, 3 * sample.advantages_T), values)


def tis(sample, algorithm):
    return np.minimum(np.exp(sample.fixed_T - sample.behavior_T), 1) * sample.advantages_T * sample.logprobs_T


def kimi(sample, algorithm):
    gap = sample.logprobs_T - sample.old_T
    return sample.advantages_T * sample.logprobs_T - algorithm.log_ratio_penalty / 2 * gap**2


def clip_cov(sample, algorithm):
    ratio = np.exp(sample.logprobs_T - sample.old_T)
    clipped = np.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    values = np.minimum(ratio * sample.advantages_T, clipped * sample.advantages_T)
    return np.where(sample.selected_T, 0.0, values)


def kl_cov(sample, algorithm):
    denominator = sample.behavior_T if algorithm.ratio == "behavior" else sample.old_T
    gap = sample.logprobs_T - denominator
    return np.exp(gap) * sample.advantages_T - algorithm.covariance_penalty * np.abs(gap) * sample.selected_T


BEHAVIOR = {"ratio": "behavior", "correction": "none"}
COVARIANCES = {"covarianceShare": 0.2, "covarianceLow": 0.01}


@pytest.mark.parametrize(
    ("reference", "fields"),
    [
        (ppo, {"preset": "dapo"}),
        (segment_ratio, {"objective": "segment_clip"}),
        (tis, {"objective": "tis", **BEHAVIOR}),
        (kimi, {"preset": "kimi"}),
        (clip_cov, {"objective": "clip_cov", **COVARIANCES}),
        (kl_cov, {"objective": "kl_cov", "covarianceShare": 0.2, **BEHAVIOR}),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_built_in_objectives_pass(reference, fields):
    check_objective(reference, fields)


@pytest.mark.parametrize("fields", [{"objective": "clip_cov", **COVARIANCES}, {"objective": "clip_cov", **COVARIANCES,
                         **BEHAVIOR}, {"objective": "kl_cov", "covarianceShare": 0.2}])  # fmt: skip
def test_a_selection_sees_the_whole_batch(fields):
    made, samples = resolved(fields), random_samples(0)
    names = {"now": "logprobs", "old": "old", "engine": "behavior", "advantages": "advantages", "turns": "turns"}
    arrays = {own: [getattr(each, f"{name}_T") for each in samples] for own, name in names.items()}
    tokens = Tokens(**arrays, rewards=[], limits=[], keys=[each.keys_T for each in samples])
    found = selected_samples(load_function(made, "objective"), made, samples)
    places = {(n, int(t)) for n, sample in enumerate(found) for t in np.flatnonzero(sample.selected_T)}
    assert places == set(selected(made, tokens)) and len({n for n, _ in places}) > 1


SAMPLES = len(random_samples(0))


def reinforce(sample, algorithm):
    return sample.advantages_T * sample.logprobs_T


def made(values_BK: torch.Tensor, inputs: Any) -> Objective:
    ones_BK = torch.ones_like(inputs.logprobs_BK.detach())
    return Objective(values_BK, ones_BK, torch.zeros_like(inputs.mask_BK))


def right(inputs):
    return made(inputs.advantages_BK * inputs.logprobs_BK, inputs)


def other_value(inputs):
    return made(inputs.advantages_BK * inputs.logprobs_BK * (1 + 1e-8), inputs)


def detached(inputs):
    logprobs_BK = inputs.logprobs_BK
    return made(inputs.advantages_BK * (0.5 * logprobs_BK + 0.5 * logprobs_BK.detach()), inputs)


def mean_of_the_microbatch(inputs):
    return made(inputs.advantages_BK * inputs.logprobs_BK * (len(inputs.mask_BK) / SAMPLES), inputs)


@zero_without_advantage
def bonus(inputs):
    return made((inputs.advantages_BK + (inputs.advantages_BK == 0)) * inputs.logprobs_BK, inputs)


def narrow(inputs):
    return made(inputs.logprobs_BK[:, :1], inputs)


@selects(lambda inputs: inputs.samples_T == 0)
def of_the_first_sample(inputs):
    return made((inputs.advantages_BK + inputs.selected_BK) * inputs.logprobs_BK, inputs)


@zero_without_advantage
@selects(lambda inputs: covariances(inputs) == 0)
def bonus_of_selected(inputs):
    return made((inputs.advantages_BK + inputs.selected_BK) * inputs.logprobs_BK, inputs)


@selects(lambda inputs: inputs.advantages_T)
def no_selection(inputs):
    return right(inputs)


def unselected(inputs):
    return made(inputs.logprobs_BK * inputs.selected_BK, inputs)


def plus_selected(sample, algorithm):
    return (sample.advantages_T + sample.selected_T) * sample.logprobs_T


@requires(old=True)
def not_bool(inputs):
    return Objective(inputs.logprobs_BK, inputs.old_BK, inputs.advantages_BK)


def undeclared(inputs):
    return made(inputs.logprobs_BK - inputs.old_BK, inputs)


def values_alone(inputs):
    return inputs.logprobs_BK


def nothing(inputs):
    return None


def float_ratio(inputs):
    return replace(right(inputs), ratio_BK=1.0)


def numpy_clipped(inputs):
    return replace(right(inputs), clipped_BK=inputs.mask_BK.numpy())


def test_a_right_objective_of_a_user_passes(mine):
    check_objective(reinforce, {"objective": mine(right), **BEHAVIOR})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (other_value, r"the value of token \d+ of sample 0 \(seed 0\): -?\d"),
        (detached, r"the derivative of token 0 of sample 0 \(seed 0\)"),
        (mean_of_the_microbatch, "in another microbatch, the"),
        (narrow, "it returned values_BK of shape"),
        (not_bool, "clipped_BK of type torch.float64; it must be bool"),
        (undeclared, "declare @requires"),
        (values_alone, r"^spec.algorithm.objective: mine:function: it returned Tensor; it must return Objective\("),
        (nothing, r"^spec.algorithm.objective: mine:function: it returned None; it must return Objective\("),
        (float_ratio, "mine:function: it returned ratio_BK of type float; it must be a tensor"),
        (numpy_clipped, "mine:function: it returned clipped_BK of type ndarray; it must be a tensor"),
        (no_selection, "its selection has shape .* and type float64, not shape .* and type bool"),
        (unselected, "no tokens are selected; declare @selects"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_each_mistake_of_an_objective_is_named(mine, function, message):
    with pytest.raises((AssertionError, ValueError), match=message):
        check_objective(reinforce, {"objective": mine(function), **BEHAVIOR})


def test_an_objective_that_is_declared_zero_without_an_advantage_must_be(mine):
    def reference(sample, algorithm):
        return (sample.advantages_T + (sample.advantages_T == 0)) * sample.logprobs_T

    with pytest.raises(AssertionError, match="without an advantage, which zero_without_advantage declares to give 0"):
        check_objective(reference, {"objective": mine(bonus), **BEHAVIOR})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of_the_first_sample, "in another microbatch, the value"),
        (bonus_of_selected, "without an advantage, which zero"),
    ],
)
def test_a_selection_by_order_and_a_selection_without_an_advantage_are_found(mine, function, message):
    with pytest.raises(AssertionError, match=message):
        check_objective(plus_selected, {"objective": mine(function), **BEHAVIOR})


def test_wrong_fields_are_refused_as_in_a_manifest():
    with pytest.raises(ValueError, match="clipLow"):
        check_objective(reinforce, {"clipLow": -1})
    for check in (check_objective, check_advantage):
        with pytest.raises(ValueError) as raised:
            check(reinforce, {"objektive": "x", "clipLow": -1})
        assert str(raised.value).splitlines() == [
            "spec.algorithm.clipLow: must be more than 0, not -1",
            "spec.algorithm.objektive: unknown field; did you mean objective?",
        ]


# --- advantages ---


def loo(samples, algorithm):
    result = []
    for i, sample in enumerate(samples):
        others = [other.reward for k, other in enumerate(samples) if other.group == sample.group and k != i]
        result.append(sample.reward - np.mean(others) if others else 0.0)
    return result


def turn_return(samples, algorithm):
    result = []
    for sample in samples:
        values, total = np.zeros(len(sample.turns_T)), 0.0
        for turn in reversed(range(sample.turns_T[-1] + 1)):
            total = sample.rewards_T[sample.turns_T == turn].sum() + algorithm.discount * total
            values[sample.turns_T == turn] = total
        result.append(values)
    return result


def remax(samples, algorithm):
    return [sample.reward - sample.baseline for sample in samples]


def test_built_in_advantages_pass():
    check_advantage(remax, {"preset": "remax"})
    check_advantage(loo, {"preset": "rloo"})
    check_advantage(turn_return, {"advantage": "turn_return", "discount": 0.7})


def gigpo(samples, algorithm):
    result = []
    returns = [turn_return([sample], algorithm)[0] for sample in samples]
    for sample, own in zip(samples, returns, strict=True):
        members = [i for i, other in enumerate(samples) if other.group == sample.group]
        rewards = [samples[i].reward for i in members]
        episode = normalized(sample.reward, rewards) if len(members) > 1 else sample.reward
        result.append(np.full(len(own), episode))
        for turn, state in enumerate(sample.states):
            same = [
                returns[i][samples[i].turns_T == t][0]
                for i in members
                for t, other in enumerate(samples[i].states)
                if other == state
            ]
            at = sample.turns_T == turn
            if len(same) > 1:
                result[-1][at] += algorithm.step_coefficient * normalized(own[at][0], same)
    return result


def normalized(value, values):
    return (value - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)


def variant_of_gigpo(inputs):
    assert all(len(each.turn_states) == len(each.turn_rewards) > 0 for each in inputs.samples)
    return load_function(resolved({"preset": "gigpo"}), "advantage")(inputs)


def test_an_own_advantage_sees_states_and_rewards_of_turns(mine):
    check_advantage(gigpo, {"preset": "gigpo"})
    check_advantage(gigpo, {"advantage": mine(variant_of_gigpo), "discount": 0.9, "stepCoefficient": 0.5})


@per_group
def without_own_reward(rewards_G):
    return rewards_G - rewards_G.mean()


@per_batch
def of_the_first(inputs):
    return inputs.rewards_N - inputs.rewards_N[0]


@requires(old=True)
def surprise(inputs):
    old = inputs.scores.old_by_row()
    return {i: rewards_L - old[i] for i, rewards_L in inputs.rewards.items()}


def unannounced(inputs):
    return inputs.scores.old_by_row()


@from_scalars
def greedy(scalars):
    return scalars.rewards_N - scalars.baselines_N


def short(inputs):
    return {i: np.zeros(1) for i in inputs.rows}


@per_batch
def number_of_batch(inputs):
    return 0.5


def test_each_mistake_of_an_advantage_is_named(mine):
    with pytest.raises(AssertionError, match=r"the advantage of token 0 of sample 0 \(seed 0\)"):
        check_advantage(loo, {"advantage": mine(without_own_reward)})
    with pytest.raises(AssertionError, match="with the groups in another order, the advantage of token 0"):
        check_advantage(lambda samples, _: [each.reward - samples[0].reward for each in samples],
                        {"advantage": mine(of_the_first)})  # fmt: skip
    with pytest.raises(ValueError, match=r"array of shape \(1,\) for \d+ tokens"):
        check_advantage(loo, {"advantage": mine(short)})
    with pytest.raises(ValueError, match="declare @requires"):
        check_advantage(loo, {"advantage": mine(unannounced)})
    with pytest.raises(ValueError, match=r"^spec.algorithm.advantage: mine:function: it returned None; it must"):
        check_advantage(loo, {"advantage": mine(nothing)})
    with pytest.raises(ValueError, match=r"it returned no array for 10 of the 10 rows"):
        check_advantage(loo, {"advantage": mine(lambda inputs: {})})
    with pytest.raises(ValueError, match=r"array of shape \(\) for 10 samples; it must have shape \(10,\)"):
        check_advantage(loo, {"advantage": mine(number_of_batch)})
    with pytest.raises(ValueError, match=r"returned nan .*; baselines_N is nan for every advantage but remax"):
        check_advantage(remax, {"advantage": mine(greedy)})
    with pytest.raises(AssertionError, match="returned 1 advantages for 10 samples"):
        check_advantage(lambda samples, _: [0.0], {"preset": "rloo"})


def test_an_advantage_may_need_log_probabilities(mine):
    def reference(samples, algorithm):
        return [sample.rewards_T - sample.old_T.astype(np.float32) for sample in samples]

    check_advantage(reference, {"advantage": mine(surprise)})


@requires(reference=True, teacher=True)
def between(inputs):
    reference, teacher = inputs.scores.reference_by_row(), inputs.scores.teacher_by_row()
    return {i: (teacher[i] - reference[i]).astype(np.float64) for i in inputs.rows}


@requires(reference=True)
def towards(inputs):
    values_BK = -(inputs.logprobs_BK - inputs.reference_BK).square()
    return Objective(values_BK, torch.ones_like(values_BK.detach()), torch.zeros_like(inputs.mask_BK))


def test_functions_may_need_a_reference_and_a_teacher(mine):
    def advantage(samples, algorithm):
        return [sample.teacher_T.astype(np.float32) - sample.reference_T.astype(np.float32) for sample in samples]

    check_advantage(advantage, {"advantage": mine(between)})
    check_objective(
        lambda sample, algorithm: -((sample.logprobs_T - sample.reference_T) ** 2), {"objective": mine(towards)}
    )
    undeclared = requires()(towards)
    with pytest.raises(ValueError, match=r"declare @requires\(reference=True\)"):
        check_objective(lambda sample, algorithm: sample.logprobs_T, {"objective": mine(undeclared)})


@requires(values=True)
def td_error(inputs):
    found, values = {}, inputs.scores.values_by_row()
    for i, row in inputs.rows.items():
        own = np.flatnonzero(row.mask_L)
        found[i] = np.zeros(len(row.mask_L))
        found[i][own] = inputs.rewards[i][own] + np.append(values[i][own][1:], 0.0) - values[i][own].astype(np.float64)
    return found


def generalized(samples, algorithm):
    result = []
    for sample in samples:
        length = len(sample.values_T)
        trace = (
            algorithm.gae_lambda
            if algorithm.gae_length_factor is None
            else 1 - 1 / (algorithm.gae_length_factor * length)
        )
        trace = algorithm.discount * max(0.0, trace)
        errors = sample.rewards_T + algorithm.discount * np.append(sample.values_T[1:], 0.0) - sample.values_T
        result.append([sum(trace ** (u - t) * errors[u] for u in range(t, length)) for t in range(length)])
    return result


def test_an_advantage_may_need_values(mine):
    check_advantage(generalized, {"advantage": "gae", "discount": 0.9, "gaeLambda": 0.7})
    check_advantage(generalized, {"advantage": "gae", "gaeLengthFactor": 0.3})
    one_step = {"advantage": mine(td_error), "criticModel": "policy"}
    zero = resolved({"advantage": "gae", "gaeLambda": 0})
    check_advantage(lambda samples, _: generalized(samples, zero), one_step)
    with pytest.raises(ValueError, match=r"declare @requires\(values=True\)"):
        check_advantage(generalized, {"advantage": mine(requires()(td_error))})


def test_random_samples_have_every_case_of_an_algorithm():
    samples = [sample for seed in range(5) for sample in random_samples(seed)]
    ratio = np.exp(np.concatenate([sample.logprobs_T - sample.old_T for sample in samples]))
    advantages = np.concatenate([sample.advantages_T for sample in samples])
    assert (ratio < 0.7).any() and (ratio > 1.5).any() and ((ratio > 0.9) & (ratio < 1.1)).any()
    assert (advantages > 0).any() and (advantages < 0).any() and (advantages == 0).any()
    assert {int(sample.turns_T[-1]) for sample in samples} == {0, 1, 2}
    assert (np.exp(np.concatenate([sample.logprobs_T for sample in samples])) <= 1).all()
