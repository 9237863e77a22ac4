"""A fake engine with real weights: it joins the trainer's weight groups and returns log-probabilities of a real model.

It generates tokens with e2e.fakes.tokens from the digest of the weights: this is fast, and any different bit of the
weights changes the tokens. The real trainer trains on these samples, so two runs can be compared bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from e2e.fakes.engine import FakeEngine, Running
from e2e.fakes.model import STOP
from e2e.fakes.tokens import weights_key
from rljob.protocol import agent_protocol as m
from rljob.transfer.rendezvous import Rendezvous
from rljob.transfer.rounds import receive_round
from rljob.transfer.weight_group import WeightGroup
from rljob.transfer.wire_plan import WirePlan

WEIGHTS_SECONDS = 60.0
VOCABULARY = 257  # of e2e/fakes/model.py


def write_tiny_model(directory: Path) -> None:
    """Add a Qwen2 of one layer to the tokenizer in ``directory``; every call writes the same weights."""
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.2, eos_token_id=STOP,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)


class TinyEngine(FakeEngine):
    """A fake engine with real weights; see the module docstring.

    Args:
        url: address of the coordinator.
        token: the agents' token.
        model: directory of :func:`write_tiny_model`.
    """

    def __init__(self, url: str, token: str, model: Path) -> None:
        super().__init__(url, token)
        self._model = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._groups: dict[str, WeightGroup] = {}

    def _complete(self, finished: list[tuple[Running, str]]) -> None:
        for running, _ in finished:
            running.stream.logprobs = self._logprobs(running.request.token_ids, running.stream.token_ids)
        super()._complete(finished)

    @torch.no_grad()
    def _logprobs(self, prompt: bytes, written: array[int]) -> array[float]:
        given = array("i", prompt)
        tokens_T = torch.tensor([*given, *written])
        logprobs_TV = self._model(tokens_T[None]).logits[0].log_softmax(-1)
        chosen = logprobs_TV[len(given) - 1 : -1].gather(1, tokens_T[len(given) :, None])
        return array("f", chosen[:, 0].tolist())

    def _update_when_due(self) -> None:
        if self._updates:
            update = self._updates.pop()
            self._updates.clear()
            self._receiving = asyncio.create_task(self._apply_update(update))

    async def _apply_update(self, update: m.PrepareWeights) -> None:
        self.digest = await asyncio.to_thread(self._receive, update)
        self.lineage, self.version = update.lineage, update.version
        self._weights = weights_key(self.digest)
        self._link.send(m.WeightAck(update.update, update.lineage, update.version, self.digest, *[0.0] * 5))

    def _receive(self, update: m.PrepareWeights) -> str:
        """Receive all weights from the trainer; return their digest."""
        if update.group not in self._groups:
            rendezvous = Rendezvous(update.group, update.address, update.port, update.world_size)
            self._groups[update.group] = WeightGroup.join(rendezvous, 1, "gloo", WEIGHTS_SECONDS)
        group, state = self._groups[update.group], dict[str, torch.Tensor]()

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            state.update((name, tensor.clone()) for name, tensor in tensors)

        deadline = time.monotonic() + WEIGHTS_SECONDS
        digest = receive_round(group, WirePlan(update.parameters, update.bucket_bytes), load, deadline)
        self._model.load_state_dict(state, strict=False)
        return digest
