"""The page's server for a transformers model."""

from __future__ import annotations

import sys

import torch
from transformers import Qwen2ForCausalLM

from mypackage.server import Server, serve
from rljob.protocol.parent_death import die_with_parent
from rljob.transfer.receiver import WeightReceiver


class QwenServer(Server):
    """Serves a Qwen2."""

    def __init__(self, directory: str) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.receiver = WeightReceiver("cpu")
        self.version = -1

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0, -1]

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.model.load_state_dict(dict(weights), strict=False)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    serve(QwenServer(sys.argv[1]))
