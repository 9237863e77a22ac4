"""The output layer of a critic that is a transformers model: the value of the state before each token.

The values of a new critic are 0.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, H features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel


class ValueHead(torch.nn.Linear):
    """The output layer of a critic. It computes in at least float32: a bfloat16 value has three digits."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the values (B, K, 1) for inputs (B, K, H)."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        values_BK1 = linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        return values_BK1.clone()  # FSDP needs outputs that are no views


def give_head(model: PreTrainedModel) -> frozenset[str]:
    """Replace the output layer of a meta model by one of one value; return the names of its parameters."""
    own = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is own)
    with torch.device("meta"):
        head = ValueHead(own.in_features, 1, dtype=own.weight.dtype)
    head._is_hf_initialized = True  # type: ignore[assignment] # transformers' initialization leaves it
    model.set_submodule(name, head)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
        if hasattr(config, "final_logit_softcapping"):
            config.final_logit_softcapping = None  # values have no bound
    return frozenset((f"{name}.weight", f"{name}.bias"))


def fill_head(parameters: Mapping[str, DTensor], names: Iterable[str]) -> None:
    """Set the parameters ``names`` to random numbers, so that values differ between inputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in names:
            own = parameters[name].to_local()
            own.copy_((torch.rand(own.shape, generator=generator) - 0.5) / parameters[name].shape[-1] ** 0.5)


def reset_head(parameters: Mapping[str, DTensor], names: Iterable[str]) -> None:
    """Set the parameters ``names`` to 0: the first values are 0 on any number of ranks."""
    with torch.no_grad():
        for name in names:
            parameters[name].to_local().zero_()
