"""The page's server for a transformers model."""

from __future__ import annotations

import sys

import torch
from mypackage.server import Server, serve
from transformers import Qwen2ForCausalLM


class QwenServer(Server):
    """Serves a Qwen2."""

    def load_model(self, model: str) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.model.load_state_dict(dict(weights), strict=False)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0, -1]


if __name__ == "__main__":
    serve(QwenServer(sys.argv[1]))
