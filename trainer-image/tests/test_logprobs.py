"""Log-probabilities and entropies: equal to torch's log-softmax, gradient included, at the right temperature."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.trainer.logprobs import linear_logprobs, token_logprobs


def expected(logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = logits.double() / temperature[:, None, None].double()
    return torch.log_softmax(scaled, -1).gather(-1, targets[..., None])


def with_entropy(logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    logprobs = torch.log_softmax(logits.double() / temperature[:, None, None].double(), -1)
    return torch.cat([logprobs.gather(-1, targets[..., None]), -(logprobs.exp() * logprobs).sum(-1, keepdim=True)], -1)


@settings(deadline=None)
@given(
    rows=st.integers(1, 4),
    positions=st.integers(0, 5),
    chunk=st.integers(1, 8),
    temperature=st.floats(0.1, 5),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_a_log_softmax(rows, positions, chunk, temperature, seed):
    """Mistake 9: log-probabilities before the temperature instead of after it."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, positions, 11, generator=generator)).requires_grad_()
    targets = torch.randint(0, 11, (rows, positions), generator=generator)
    temperatures = torch.linspace(temperature, temperature + 1, rows)
    weights = torch.randn(rows, positions, 1, generator=generator)
    ours = token_logprobs(logits, targets, temperatures, chunk)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), logits)
    theirs = expected(logits, targets, temperatures)
    (reference,) = torch.autograd.grad((theirs * weights).sum(), logits)
    # Resolution of float32: about one ulp of the largest logit after the temperature.
    largest = (logits.detach().abs() / temperatures[:, None, None]).flatten().tolist()
    error = 8 * torch.finfo(torch.float32).eps * max([1.0, *largest])
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=error)
    steepest = max([1.0, *weights.abs().flatten().tolist()]) / temperature
    torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=error * steepest)


def test_the_gradient_is_exact_in_float64():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.randint(0, 7, (2, 3)), torch.tensor([0.7, 1.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, temperature, 2), (logits,))


@pytest.mark.parametrize("chunk", [2, 100])
def test_entropies_and_their_gradients_are_exact_in_float64(chunk):
    torch.manual_seed(1)
    logits = (3 * torch.randn(2, 3, 7, dtype=torch.float64)).requires_grad_()
    targets, temperature = torch.randint(0, 7, (2, 3)), torch.tensor([0.7, 1.3], dtype=torch.float64)
    weights = torch.randn(2, 3, 2, dtype=torch.float64)

    def ours(x):
        return token_logprobs(x, targets, temperature, chunk, entropy=True)

    theirs = with_entropy(logits, targets, temperature)
    torch.testing.assert_close(ours(logits), theirs, rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad((ours(logits) * weights).sum(), logits)
    (reference,) = torch.autograd.grad((theirs * weights).sum(), logits)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (logits,))


def test_tokens_that_a_model_excludes_add_nothing_to_the_entropy():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf, -1e30]]], requires_grad=True)
    found = token_logprobs(logits, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), entropy=True)
    torch.testing.assert_close(found[0, 0, 1], torch.tensor(2.0).log())
    found[..., 1].sum().backward()
    assert logits.grad.abs().max() < 1e-6


def test_bfloat16_logits_are_normalized_in_float32():
    logits = (3 * torch.randn(2, 3, 50)).bfloat16().requires_grad_()
    targets, temperature = torch.randint(0, 50, (2, 3)), torch.tensor([1.0, 0.5])
    ours = token_logprobs(logits, targets, temperature)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected(logits, targets, temperature), rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert logits.grad.float().sum(-1).abs().max() == pytest.approx(0, abs=2e-2)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_gradients_of_an_output_layer_in_chunks_are_exact_in_float64(chunk):
    hidden = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3), (7,)))
    targets, temperature = torch.randint(0, 7, (2, 5)), torch.tensor([0.7, 1.3], dtype=torch.float64)

    def ours(hidden, weight, bias):
        return linear_logprobs(hidden, weight, bias, targets, temperature, chunk, entropy=True)

    theirs = with_entropy(torch.nn.functional.linear(hidden, weight, bias), targets, temperature)
    torch.testing.assert_close(ours(hidden, weight, bias), theirs, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda frozen: ours(frozen, weight.detach(), None), (hidden,))


def test_bfloat16_chunks_add_up_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(1, 512, 8).bfloat16()
    weight, targets = torch.randn(11, 8).bfloat16(), torch.randint(0, 11, (1, 512))
    gradients = []
    for chunk in (1, 512):
        made = weight.clone().requires_grad_()
        linear_logprobs(hidden, made, None, targets, torch.ones(1), chunk).sum().backward()
        gradients.append(made.grad.float())
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=0.2)


def test_an_output_layer_in_chunks_needs_memory_for_a_chunk_only():
    N, V, H, chunk = 4096, 50_000, 64, 128
    hidden, weight = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((1, N, H), (V, H)))
    targets, temperature = torch.empty(1, N, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
    with Allocations("meta") as memory:
        linear_logprobs(hidden, weight, None, targets, temperature, chunk).sum().backward()
    gradients = hidden.nbytes + 2 * weight.nbytes
    assert chunk * V * 4 < memory.peak < 5 * chunk * V * 4 + gradients + 20 * N < N * V * 4 / 4
