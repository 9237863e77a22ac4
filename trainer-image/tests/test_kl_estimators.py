"""Estimates of KL against NumPy and finite differences, and their expectations over a policy of three tokens: exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rljob.api.extensions import KL_ESTIMATORS, load
from rljob.trainer.algorithms.kl_estimators import KlEstimator

LOGITS, REFERENCE = np.array([0.3, -0.5, 0.9]), np.array([0.2, 0.5, 0.3])
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum()
KL = float((POLICY * np.log(POLICY / REFERENCE)).sum())
FORWARD = POLICY * (np.log(POLICY / REFERENCE) - KL)
"""Derivative of KL(policy‖reference) by the logits."""
BACKWARD = POLICY - REFERENCE
"""Derivative of KL(reference‖policy) by the logits."""


def in_numpy(name: str, own: np.ndarray, other: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Return the estimate; ``fixed`` is ``own``, for factors without gradient."""
    return {
        "k1": own - other,
        "k2": (own - other) ** 2 / 2,
        "k3": np.exp(other - own) - (other - own) - 1,
        "k3_unbiased": np.exp(own - fixed) * (np.exp(other - own) - (other - own) - 1),
    }[name]


def estimator(name: str) -> KlEstimator:
    found: KlEstimator = load(KL_ESTIMATORS, name, "klEstimator")
    return found


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_an_estimate_and_its_gradient_are_those_of_the_formula(name):
    generator = np.random.default_rng(1)
    own, other = -5 * generator.random((2, 4, 50))
    given = torch.from_numpy(own).requires_grad_()
    found = estimator(name)(given, torch.from_numpy(other))
    np.testing.assert_allclose(found.detach().numpy(), in_numpy(name, own, other, own), rtol=1e-12, atol=1e-14)
    found.sum().backward()
    step = 1e-6
    ends = [in_numpy(name, own + sign * step, other, own) for sign in (1, -1)]
    np.testing.assert_allclose(given.grad.numpy(), (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-7)


def expectations(name: str) -> tuple[float, np.ndarray]:
    """Return the estimate and its gradient by the logits, in expectation over tokens of the policy itself."""
    logits = torch.from_numpy(LOGITS.copy()).requires_grad_()
    values = estimator(name)(logits.log_softmax(0), torch.from_numpy(np.log(REFERENCE)))
    expected = (torch.from_numpy(POLICY) * values).sum()  # tokens are sampled: their frequencies have no gradient
    expected.backward()
    return float(expected.detach()), logits.grad.numpy()


def test_the_expectations_are_those_of_the_literature():
    """Anchors, and which divergence each estimator minimises as a loss: none, forward, backward, forward."""
    np.testing.assert_allclose(KL, 0.296826, atol=5e-7)
    np.testing.assert_allclose(FORWARD, [0.038937, -0.218235, 0.179298], atol=5e-7)
    np.testing.assert_allclose(BACKWARD, [0.105675, -0.362651, 0.256976], atol=5e-7)
    found = {name: expectations(name) for name in KL_ESTIMATORS}
    for name in ("k1", "k3", "k3_unbiased"):
        assert found[name][0] == pytest.approx(KL, rel=1e-12)
    gradients = {"k1": np.zeros(3), "k2": FORWARD, "k3": BACKWARD, "k3_unbiased": FORWARD}
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name][1], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "gradient"), [("k1", FORWARD), ("k3", None)])
def test_in_the_reward_k1_gives_the_gradient_of_the_divergence_and_k3_does_not(name, gradient):
    """The reward has no gradient: it multiplies that of the log-probability."""
    logits = torch.from_numpy(LOGITS.copy()).requires_grad_()
    logprobs = logits.log_softmax(0)
    reward = -estimator(name)(logprobs.detach(), torch.from_numpy(np.log(REFERENCE)))
    (-(torch.from_numpy(POLICY) * reward * logprobs).sum()).backward()
    if gradient is not None:
        np.testing.assert_allclose(logits.grad.numpy(), gradient, rtol=1e-12)
    else:
        assert np.abs(logits.grad.numpy() - FORWARD).max() > 0.05


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_token_that_one_model_excludes_gives_a_finite_number_in_float32(name):
    for given, other in ((-1e4, -0.1), (-0.1, -1e4)):
        logprob = torch.tensor([given], requires_grad=True)
        value = estimator(name)(logprob, torch.tensor([other]))
        value.sum().backward()
        assert value.isfinite().all() and logprob.grad.isfinite().all()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equal_models_have_no_divergence(name):
    logprob = torch.tensor([-0.3, -7.0], requires_grad=True)
    value = estimator(name)(logprob, logprob.detach().clone())
    assert value.tolist() == [0.0, 0.0]
    if name != "k1":
        value.sum().backward()
        assert logprob.grad.tolist() == [0.0, 0.0]
