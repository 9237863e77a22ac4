"""Loss and gradient of every algorithm in float64 against the reference, and what masks and corrections may change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_references import Tokens, loss_and_gradient, weight

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import MASKS, PRESETS, fill
from rljob.api.extensions import AGGREGATIONS, CORRECTIONS, OBJECTIVES
from rljob.trainer.algorithms.needs import load_function
from rljob.trainer.algorithms.token_selection import SelectionInputs, selection_of
from rljob.trainer.backends.base import Output
from rljob.trainer.batch import Microbatch, MicrobatchInputs
from rljob.trainer.metrics import TokenStatistics
from rljob.trainer.policy_loss import PolicyLoss
from rljob.trainer.process_group import World

EXACT = {"rtol": 1e-12, "atol": 1e-15}
IN_LOSS = ("k2", "k3", "k3_unbiased")
LEVELS = ("token", "segment", "sequence", "geometric")
FIELDS: dict[str, dict[str, float]] = {"clip_cov": {"covarianceLow": 50, "covarianceHigh": 60}}
"""Objective → settings with which it selects no token."""
NEVER_CLIPPED = ("raft_pp", "sapo", "vespo", "kl_cov", "kimi", "gspo", "gpg")
"""Objectives of positive samples only, without a clip, or with a mean that hardly differs."""
SIGNS = ("Positive", "Negative")
MASKED: dict[str, float] = {
    "mask_geometric_below": 0.95,
    "mask_geometric_above": 1.05,
    "veto_below": 0.5,
    "mask_probability_gap": 0.1,
    "mask_negative_kl": 0.1,
}


def algorithm(**fields: Any) -> Algorithm:
    """Return a resolved algorithm."""
    made = Algorithm.model_validate(fields)
    fill(made)
    return made


def make_tokens(seed: int = 0) -> Tokens:
    """Return a minibatch of samples of one to three turns in which every clip, cap and mask holds somewhere."""
    generator = np.random.default_rng(seed)
    lengths = [1, 3, 4, 6, 9, 12]
    now = [(-2.5 * generator.random(n) - 0.05).tolist() for n in lengths]
    old = [(np.array(sample) + 0.3 * generator.standard_normal(len(sample))).tolist() for sample in now]
    engine = [(np.array(sample) + 0.4 * generator.standard_normal(len(sample))).tolist() for sample in old]
    now[3][2], old[3][2], engine[3][2] = -0.1, -2.3, -2.4  # a large ratio, with a negative advantage
    signs = [1, -1, 1, -1, 1, -1]
    advantages = [(s * (0.5 + generator.random(n))).tolist() for s, n in zip(signs, lengths, strict=True)]
    turns = [np.sort(generator.integers(0, 3, n)).tolist() for n in lengths]
    reference = [(np.array(sample) + generator.standard_normal(len(sample))).tolist() for sample in now]
    rewards, limits = [1.0, 0.5, 0.5, 0.0, -0.5, -1.0], [20, 20, 20, 30, 30, 30]  # two not of their advantage's sign
    keys = [np.random.default_rng([seed, n]).random(n).tolist() for n in lengths]
    return Tokens(now, old, engine, advantages, turns, rewards, limits, reference, keys)


def selected_tokens(made: Algorithm, tokens: Tokens) -> list[list[bool]] | None:
    """Return which tokens the objective selects, or None if it declares no selection."""
    selection = selection_of(load_function(made, "objective"))
    if selection is None:
        return None
    old_T = np.concatenate(tokens.old)
    lengths = [len(own) for own in tokens.old]
    inputs = SelectionInputs(
        samples_T=np.repeat(np.arange(len(lengths)), lengths),
        samples=len(lengths),
        advantages_T=np.concatenate(tokens.advantages),
        logprobs_T=old_T,
        log_ratio_T=old_T - np.concatenate(tokens.engine) if made.ratio == "behavior" else 0 * old_T,
        keys_T=np.concatenate(tokens.keys),
        world=World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1),
        algorithm=made,
    )
    return [part.tolist() for part in np.split(selection(inputs), np.cumsum(lengths)[:-1])]


def rows_of(values: list[list[Any]], masks: list[list[bool]], outside: float) -> torch.Tensor:
    """Return the values at the masked positions of rows; ``outside`` elsewhere."""
    rows_BK = np.full((len(masks), len(masks[0])), outside)
    for b, mask in enumerate(masks):
        rows_BK[b, np.flatnonzero(mask)] = values[b]
    return torch.from_numpy(rows_BK)


def masks_of(tokens: Tokens, padding: int) -> list[list[bool]]:
    """Return masks with an observation before each later turn, padded on the right."""
    masks: list[list[bool]] = []
    for turns in tokens.turns:
        masks.append([])
        for t in range(len(turns)):
            masks[-1] += [False, False] * (t > 0 and turns[t] != turns[t - 1]) + [True]
    longest = max(map(len, masks)) + padding
    return [mask + [False] * (longest - len(mask)) for mask in masks]


def run(
    made: Algorithm, tokens: Tokens, parts: list[list[int]] | None = None, padding: int = 0, outside: float = np.nan
) -> tuple[float, list[list[float]], TokenStatistics]:
    """Return loss, gradient by each log-probability and statistics of the trainer's own loss.

    Args:
        made: the algorithm.
        tokens: the minibatch.
        parts: samples of each microbatch; by default one has all.
        padding: positions added to each row.
        outside: log-probability at positions that are not of the model.
    """
    samples, selected = len(tokens.now), selected_tokens(made, tokens)
    aggregation = load_function(made, "aggregation")
    weights = aggregation(np.array([len(sample) for sample in tokens.now]), np.array(tokens.limits))
    statistics = TokenStatistics(torch.device("cpu"))
    inputs, outputs, old, masks = [], [], [], masks_of(tokens, padding)
    frozen: dict[str, list[torch.Tensor]] = {"reference": []} if made.kl_coefficient else {}
    for part in parts or [list(range(samples))]:
        own = [masks[n] for n in part]

        def rows(values: list[list[Any]], at: float = 0.0, part: list[int] = part, own: Any = own) -> torch.Tensor:
            return rows_of([values[n] for n in part], own, at)

        mask_BK, none = torch.tensor(own), torch.zeros(0)
        microbatch = Microbatch(mask_BK.long(), none, none, mask_BK, rows(tokens.engine), none, 1, [])
        of = {name: torch.tensor([values[n] for n in part]) for name, values in (("w", weights), ("r", tokens.rewards))}
        current = torch.zeros(len(part), dtype=torch.bool)
        turns_BK, turns = rows(tokens.turns).long(), 1 + max(max(tokens.turns[n]) for n in part)
        made_inputs = MicrobatchInputs(part, microbatch, mask_BK.numel(), 0, of["w"], of["r"], turns_BK, turns, current)
        made_inputs.advantages_BK = rows(tokens.advantages)
        made_inputs.selected_BK = None if selected is None else rows(selected).bool()
        inputs.append(made_inputs)
        outputs.append(rows(tokens.now, outside).requires_grad_())
        old.append(rows(tokens.old, outside))
        for passes in frozen.values():
            passes.append(rows(tokens.reference, outside))
    positive = sum(len(own) for own, reward in zip(tokens.now, tokens.rewards, strict=True) if reward > 0)
    loss = PolicyLoss(inputs, old, frozen, False, made, statistics, positive)
    total = torch.stack([loss(i, Output(output)) for i, output in enumerate(outputs)]).sum()
    assert loss.error is None
    total.backward()
    gradient: list[list[float]] = [[] for _ in range(samples)]
    for part, output in zip(parts or [list(range(samples))], outputs, strict=True):
        for b, n in enumerate(part):
            mask_K = np.array(masks[n])
            assert (output.grad[b][~mask_K] == 0).all()
            gradient[n] = output.grad[b][mask_K].tolist()
    return float(total.detach()), gradient, statistics


def compare(made: Algorithm, tokens: Tokens) -> None:
    loss, gradient, _ = run(made, tokens)
    expected, derivative = loss_and_gradient(made, tokens)
    np.testing.assert_allclose(loss, expected, **EXACT)
    np.testing.assert_allclose(np.concatenate(gradient), np.concatenate(derivative), **EXACT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_gradient_of_every_preset_equal_the_reference(preset, seed):
    compare(algorithm(preset=preset), make_tokens(seed))


@pytest.mark.parametrize("estimator", IN_LOSS)
@pytest.mark.parametrize("fields", [{}, {"preset": "gspo"}, {"preset": "topr"}, {"correction": "icepop"}], ids=str)
def test_loss_and_gradient_with_kl_equal_the_reference(fields, estimator):
    compare(algorithm(klCoefficient=0.3, klEstimator=estimator, **fields), make_tokens())


@pytest.mark.parametrize(
    "fields", [{}, {"aggregation": "seq_mean_token_sum"}, {"vetoBelow": 0.5}, {"lossScale": 2.5}], ids=str
)
def test_loss_and_gradient_with_the_likelihood_of_positive_samples_equal_the_reference(fields):
    made, tokens = algorithm(positiveCoefficient=0.3, **fields), make_tokens()
    compare(made, tokens)
    loss, gradient, _ = run(made, replace(tokens, advantages=[[0.0] * len(own) for own in tokens.now]))
    expected = -0.3 * np.mean(np.concatenate([np.array(tokens.now[n]) for n in positive(tokens)]))
    expected *= fields.get("lossScale", 1)
    assert loss == pytest.approx(expected, rel=1e-12), "of correct answers alone, also where a mask hides a token"
    assert [n for n, own in enumerate(gradient) if any(own)] == positive(tokens)
    worthless = replace(tokens, rewards=[0.0] * len(tokens.rewards))
    assert run(made, worthless)[0] == run(algorithm(**fields), worthless)[0]


def positive(tokens: Tokens) -> list[int]:
    return [n for n, reward in enumerate(tokens.rewards) if reward > 0]


@pytest.mark.parametrize("ratio", ["behavior", "proximal"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_of_every_objective_equal_the_reference(objective, ratio):
    compare(algorithm(objective=objective, ratio=ratio, correction="none"), make_tokens())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ratio", ["behavior", "proximal"])
@pytest.mark.parametrize(("share", "high"), [(1e-4, 5.0), (0.1, 5.0), (0.3, 0.4), (1.0, 5.0)])
@pytest.mark.parametrize("objective", ["clip_cov", "kl_cov"])
def test_objectives_that_select_tokens_by_their_covariance_equal_the_reference(objective, share, high, ratio, seed):
    bounds = {"covarianceLow": 0.01, "covarianceHigh": high} if objective == "clip_cov" else {"covariancePenalty": 0.7}
    made = algorithm(objective=objective, ratio=ratio, correction="none", covarianceShare=share, **bounds)
    tokens = make_tokens(seed)
    compare(made, tokens)
    found = selected_tokens(made, tokens)
    assert 0 < np.sum(np.concatenate(found)) <= max(1, int(share * 35))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_loss_and_gradient_of_every_correction_and_aggregation_equal_the_reference(correction, level, aggregation):
    compare(algorithm(correction=correction, correctionLevel=level, aggregation=aggregation), make_tokens())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_removes_the_gradient_of_its_tokens_and_changes_no_other(mask, aggregation):
    tokens = make_tokens()
    plain = algorithm(aggregation=aggregation, correction="none", dualClip=0, clipLow=0.99, clipHigh=10)
    masked = plain.model_copy(update={mask: MASKED[mask]})
    compare(masked, tokens)
    _, before, _ = run(plain, tokens)
    _, after, statistics = run(masked, tokens)
    hidden = [[weight(masked, tokens, n, t) == 0 for t in range(len(own))] for n, own in enumerate(tokens.now)]
    flat = np.concatenate(hidden)
    assert flat.any() and not flat.all()
    np.testing.assert_array_equal(np.concatenate(after), np.where(flat, 0, np.concatenate(before)))
    assert np.concatenate(before)[flat].all()
    world = World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1)
    assert statistics.metrics(world, 1)["masked_fraction"] == pytest.approx(flat.mean())


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_mask_of_negative_samples_is_that_of_the_current_policy(shift):
    """Mistake: the mask of the policy before the batch, which hides none of these samples, or all."""
    tokens = make_tokens()
    tokens = replace(tokens, old=[[x - shift for x in own] for own in tokens.engine])
    made = algorithm(maskNegativeKl=0.1, correction="none")
    compare(made, tokens)
    assert [n for n in range(6) if weight(made, tokens, n, 0) == 0] == [1]


@pytest.mark.parametrize(
    "fields",
    [
        *({"preset": preset} for preset in PRESETS),
        *({"objective": objective} for objective in OBJECTIVES),
        {"klCoefficient": 0.3},
    ],
    ids=str,
)
def test_microbatches_order_padding_and_nan_outside_the_mask_change_nothing(fields):
    made, tokens = algorithm(**fields), make_tokens()
    loss, gradient, _ = run(made, tokens)
    for parts in ([[0], [1], [2], [3], [4], [5]], [[5, 2], [0, 4, 1], [3]]):
        for padding, outside in ((0, 0.0), (7, np.nan), (7, 1e30)):
            other, changed, _ = run(made, tokens, parts, padding, outside)
            np.testing.assert_allclose(other, loss, **EXACT)
            np.testing.assert_allclose(np.concatenate(changed), np.concatenate(gradient), **EXACT)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_of_zero_advantage_has_no_gradient_but_counts_in_denominators(aggregation):
    """Mistakes 10 and 13: samples that are dropped from, or copied into, the denominator."""
    tokens = make_tokens()
    tokens = replace(tokens, advantages=[[0.0], *tokens.advantages[1:]])
    made = algorithm(aggregation=aggregation)
    _, gradient, _ = run(made, tokens)
    assert gradient[0] == [0.0]
    _, alone, _ = run(made, tokens.without(0))
    factor = {"token_mean": 34 / 35}.get(aggregation, 5 / 6)
    np.testing.assert_allclose(np.concatenate(gradient[1:]), factor * np.concatenate(alone), **EXACT)


@pytest.mark.parametrize("objective", ["gspo", "topr"])
def test_a_ratio_of_a_sample_does_not_grow_with_its_length(objective):
    """Mistake 12: 1.1 for each of 100 tokens is a sequence ratio of 14,000."""
    near = [[np.log(0.5)] * 100]
    tokens = Tokens([[np.log(0.55)] * 100], near, near, [[-1.0] * 100], [[0] * 100], [0.0], [100])
    _, gradient, statistics = run(algorithm(preset=objective, aggregation="seq_mean_token_sum", dualClip=0), tokens)
    assert max(map(abs, gradient[0])) <= 1.1 + 1e-9
    assert float(statistics.largest[0, 1]) == pytest.approx({"gspo": 1.1, "topr": 1.1**100}[objective], rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_update_per_batch_is_on_policy_against_proximal_and_off_policy_against_behavior(objective):
    """With l = l_old the gradient against proximal is that of A·l; mistake 8: against behavior the clip still works."""
    tokens = make_tokens()
    tokens = replace(tokens, old=tokens.now, rewards=[1.0] * 6)
    plain = {"correction": "none", "aggregation": "seq_mean_token_sum"}
    made = algorithm(objective=objective, **plain, **FIELDS.get(objective, {}))
    _, gradient, statistics = run(made, tokens)
    np.testing.assert_allclose(np.concatenate(gradient), -np.concatenate(tokens.advantages) / 6, **EXACT)
    world = World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1)
    assert statistics.metrics(world, 1)["clip_fraction"] == 0
    made = made.model_copy(update={"ratio": "behavior"})
    _, behavior, statistics = run(made, replace(tokens, rewards=[0.0] * 6))
    if objective not in NEVER_CLIPPED:
        assert statistics.metrics(world, 1)["clip_fraction"] > 0
    assert objective in ("kimi", "gpg") or not np.allclose(np.concatenate(behavior), np.concatenate(gradient))


@pytest.mark.parametrize("power", [0.0, 10.0])
@pytest.mark.parametrize("decay", [0.1, 10.0])
@pytest.mark.parametrize("drift", [-500.0, -20.0, 0.0, np.log(100), 20.0, 500.0])
def test_the_kernel_of_vespo_is_finite_in_float32_at_the_bounds_of_its_fields(power, decay, drift):
    tokens = make_tokens()
    tokens = replace(tokens, old=[[x - drift / len(own) for x in own] for own in tokens.now])
    kernel = {f"kernel{name}{sign}": x for name, x in (("Power", power), ("Decay", decay)) for sign in SIGNS}
    made = algorithm(objective="vespo", correction="none", aggregation="seq_mean_token_sum", **kernel)
    _, gradient, _ = run(made, tokens)
    weights = -6 * np.concatenate(gradient) / np.concatenate(tokens.advantages)
    assert (weights.astype(np.float32) <= 1e16).all()
    if not drift:
        np.testing.assert_allclose(weights, 1, rtol=1e-12)


def test_weights_are_the_used_ones_and_carry_no_gradient():
    """Mistake 5: weights that are announced as capped and used without the cap, or not detached."""
    tokens = make_tokens()
    tokens = replace(tokens, old=tokens.now)
    made = algorithm(correction="tis", correctionCap=1.2, aggregation="seq_mean_token_sum")
    _, gradient, statistics = run(made, tokens)
    rho = np.exp(np.concatenate(tokens.now) - np.concatenate(tokens.engine))
    assert (rho > 1.2).any()
    expected = np.minimum(rho, 1.2)
    np.testing.assert_allclose(np.concatenate(gradient), -expected * np.concatenate(tokens.advantages) / 6, **EXACT)
    world = World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1)
    assert statistics.metrics(world, 1)["correction_mean"] == pytest.approx(expected.mean())


POLICY, ENGINE, VALUE = np.array([0.2, 0.3, 0.5]), np.array([0.6, 0.3, 0.1]), np.array([1.0, -0.5, 0.25])


def expected_gradient(**fields: Any) -> np.ndarray:
    """Return minus the loss's derivative by three logits, in expectation over tokens of another engine: exact."""
    now = np.log(POLICY)
    weighted = [[3 * q * a] for q, a in zip(ENGINE, VALUE, strict=True)]  # the loss is a mean of three samples
    each = [[x] for x in now.tolist()]
    tokens = Tokens(each, each, [[x] for x in np.log(ENGINE).tolist()], weighted, [[0]] * 3, [1.0] * 3, [1] * 3)
    _, gradient, _ = run(algorithm(aggregation="seq_mean_token_sum", **fields), tokens)
    of_logprobs = -np.concatenate(gradient)
    return of_logprobs - POLICY * of_logprobs.sum()


def test_corrections_give_the_gradient_of_the_policy_itself_from_tokens_of_another_engine():
    """Exact enumeration: ρ = 1/3, 1, 5. Unbiased without a bound, biased by exactly the bounded part with one."""

    def of(kept: np.ndarray) -> np.ndarray:
        return kept * VALUE - POLICY * (kept * VALUE).sum()

    for level in LEVELS:  # one token is a turn and a sample
        whole = {"correctionCap": 5.1, "correctionLevel": level}
        np.testing.assert_allclose(expected_gradient(correction="tis", **whole), of(POLICY), **EXACT)
        np.testing.assert_allclose(expected_gradient(correction="icepop", correctionFloor=0.3, **whole), of(POLICY))
    np.testing.assert_allclose(expected_gradient(correction="none"), of(ENGINE), **EXACT)
    np.testing.assert_allclose(expected_gradient(correction="tis"), of(np.minimum(POLICY, 2 * ENGINE)), **EXACT)
    np.testing.assert_allclose(expected_gradient(correction="icepop"), of(POLICY * [0, 1, 0]), **EXACT)
    assert np.abs(of(ENGINE) - of(POLICY)).max() > 0.2


REFERENCE = np.array([0.5, 0.1, 0.4])


def kl_gradient(**fields: Any) -> np.ndarray:
    """Return the derivative by three logits of the KL term, in expectation over tokens of another engine: exact."""
    ids = [0] * 6 + [1] * 3 + [2]  # ENGINE, in tenths
    now, engine, reference = ([[x] for x in np.log(p)[ids].tolist()] for p in (POLICY, ENGINE, REFERENCE))
    tokens = Tokens(now, now, engine, [[0.0]] * 10, [[0]] * 10, [0.0] * 10, [1] * 10, reference)
    _, gradient, _ = run(algorithm(aggregation="seq_mean_token_sum", klCoefficient=1, **fields), tokens)
    of_logprobs = np.bincount(ids, np.concatenate(gradient))
    return of_logprobs - POLICY * of_logprobs.sum()


def test_a_correction_gives_the_gradient_of_the_kl_of_the_policy_from_tokens_of_another_engine():
    """Mistake: a KL estimated from samples of other weights without their importance weight, or with a capped one."""
    difference = np.log(POLICY / REFERENCE)
    forward = POLICY * (difference - (POLICY * difference).sum())
    whole = {"correction": "tis", "correctionCap": 10}
    for estimator in ("k2", "k3_unbiased"):
        np.testing.assert_allclose(kl_gradient(klEstimator=estimator, **whole), forward, **EXACT)
        weighted = np.minimum(POLICY, 2 * ENGINE) * difference
        biased = weighted - POLICY * weighted.sum()
        np.testing.assert_allclose(kl_gradient(klEstimator=estimator, correction="tis"), biased, **EXACT)
        assert np.abs(kl_gradient(klEstimator=estimator, correction="none") - forward).max() > 0.1
    np.testing.assert_allclose(kl_gradient(klEstimator="k3", **whole), POLICY - REFERENCE, **EXACT)


def test_a_mask_removes_the_kl_of_its_tokens_too():
    tokens = make_tokens()
    made = algorithm(klCoefficient=0.3, correction="none", maskProbabilityGap=0.1)
    _, gradient, _ = run(made, tokens)
    hidden = [weight(made, tokens, n, t) == 0 for n, own in enumerate(tokens.now) for t in range(len(own))]
    assert 0 < sum(hidden) < len(hidden)
    assert not np.concatenate(gradient)[hidden].any() and np.concatenate(gradient)[~np.array(hidden)].all()


def test_a_sample_of_zero_advantage_has_the_gradient_of_its_kl():
    tokens = make_tokens()
    tokens = replace(tokens, advantages=[[0.0] * len(own) for own in tokens.now])
    made = algorithm(klCoefficient=0.3)
    compare(made, tokens)
    _, gradient, _ = run(made, tokens)
    assert np.concatenate(gradient).all()


def test_the_metrics_of_kl_are_means_over_the_tokens_under_the_weights_of_the_update():
    tokens = make_tokens()
    _, _, statistics = run(algorithm(klCoefficient=0.3), tokens, [[5, 2], [0, 4, 1], [3]])
    metrics = statistics.metrics(World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1), 1)
    difference = np.concatenate(tokens.now) - np.concatenate(tokens.reference)
    assert metrics["reference_kl_k1"] == pytest.approx(difference.mean(), rel=1e-12)
    assert metrics["reference_kl_k3"] == pytest.approx((np.exp(-difference) - 1 + difference).mean(), rel=1e-12)
    assert "teacher_kl_k1" not in metrics
