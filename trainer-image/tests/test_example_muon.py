"""The optimizer of the example model's matrices: :mod:`rljob.trainer.example_muon`."""

from __future__ import annotations

import pytest
import torch

from rljob.trainer.example_muon import Float32Muon, orthogonalize


@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (8, 8)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizers = [Float32Muon([ours], 0.1, 0.01), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.01)]
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(ours, start)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # torch rounds to bfloat16


def test_singular_values_become_about_one() -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(32, 8)))
    assert values.min() > 0.6 and values.max() < 1.3
