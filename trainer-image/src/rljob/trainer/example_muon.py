"""Muon (https://kellerjordan.github.io/posts/muon) in float32, for the warm-up of the example model on a CPU.

torch.optim.Muon orthogonalizes in bfloat16. For a CPU without AVX-512 torch has no fast kernels of that type: a step of
the example model takes half a second of CPU time there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
A, B, C = 3.4445, -4.775, 2.0315
"""Coefficients of the Newton-Schulz iteration; its singular values end between about 0.7 and 1.2."""
LEAST_NORM = 1e-7


class Float32Muon(torch.optim.Optimizer):
    """The same update as ``torch.optim.Muon`` with its defaults, but for rounding.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate.
        weight_decay: a step multiplies the matrices by 1 - lr · weight_decay.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonalize(matrix.grad.lerp(momentum, MOMENTUM))
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U·Vᵀ of the matrix's singular value decomposition U·S·Vᵀ."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=B, alpha=C), wide, beta=A)
    return wide.T if matrix.size(0) > matrix.size(1) else wide
