"""Server and receiver of the torch engine: python -m torch_engine.server MODEL PORT LENGTH.

Its model has two matrices, ``embedding`` and ``output`` [vocabulary, width]: the logits of a position are ``output``
times tanh of a decaying sum of the embeddings up to the position. MODEL is a directory with a model.safetensors and a
tokenizer.json.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web
from safetensors.torch import load_file
from tokenizers import Tokenizer

from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.rollout.answer_end import AnswerEnd
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import Rendezvous

TOKEN_SECONDS = 0.001
DECAY = 0.5
torch.set_num_threads(1)


class Request(msgspec.Struct):
    """Body of /generate."""

    request: str
    token_ids: list[int]
    sampling: SamplingParams


class Update(msgspec.Struct):
    """Body of /join and /receive."""

    update: PrepareWeights
    seconds: float


class Server:
    """The routes."""

    def __init__(self, model: Path, length: int) -> None:
        self.weights = load_file(model / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.version = -1
        self.length = length
        self.receiver = WeightReceiver("cpu")
        self.paused = self.draining = False
        self.running: set[str] = set()
        self.aborted: set[str] = set()

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Return the states of all positions, [tokens, width]."""
        state, states = torch.zeros(self.weights["embedding"].shape[1]), []
        for embedding in self.weights["embedding"][tokens]:
            state = DECAY * state + embedding
            states.append(torch.tanh(state))
        return torch.stack(states)

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probabilities of the token after each position, [tokens, vocabulary]."""
        return torch.log_softmax(self.hidden(tokens) @ self.weights["output"].T / temperature, -1)

    async def generate(self, raw: bytes) -> Any:
        """Generate token by token; a pause is between two tokens."""
        body = msgspec.json.decode(raw, type=Request)
        sampling, tokens = body.sampling, [*body.token_ids]
        if len(tokens) + sampling.max_tokens > self.length:
            raise web.HTTPBadRequest(text=f"more than {self.length} tokens")
        while self.paused or self.draining:
            await asyncio.sleep(TOKEN_SECONDS)
        generator = torch.Generator().manual_seed(sampling.seed)
        end = AnswerEnd(sampling, body.token_ids, lambda: self.tokenizer)
        logprobs: list[float] = []
        versions: list[int] = []
        finish = "length"
        self.running.add(body.request)
        try:
            while len(logprobs) < sampling.max_tokens and finish != "stop":
                while self.paused and body.request not in self.aborted:
                    await asyncio.sleep(TOKEN_SECONDS)
                if body.request in self.aborted:
                    finish = "abort"
                    break
                # Only the last 64 tokens matter: older tokens have decayed below the resolution of float32.
                distribution = self.logprobs(tokens[-64:], sampling.temperature or 1.0)[-1]
                greedy = sampling.temperature == 0
                drawn = (
                    distribution.argmax() if greedy else torch.multinomial(distribution.exp(), 1, generator=generator)
                )
                token = int(drawn)
                tokens.append(token)
                logprobs.append(float(distribution[token]))
                versions.append(self.version)
                finish = "stop" if end.is_at(token) else finish
                await asyncio.sleep(TOKEN_SECONDS)
        finally:
            self.running.discard(body.request)
            self.aborted.discard(body.request)
        starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        spans = [[versions[start], start, end] for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)]
        new = tokens[len(body.token_ids) :]
        return {"token_ids": new, "logprobs": logprobs, "spans": spans if versions else [], "finish": finish}

    async def abort(self, raw: bytes) -> None:
        """Mark requests as aborted."""
        self.aborted |= {*msgspec.json.decode(raw, type=list[str])} & self.running

    async def pause(self, raw: bytes) -> None:
        """Stop; see the modes of EngineClient.pause."""
        mode = msgspec.json.decode(raw, type=str)
        if mode == "abort":
            self.aborted |= self.running
        while mode in ("abort", "wait") and self.running:
            self.draining = True
            await asyncio.sleep(TOKEN_SECONDS)
        self.paused, self.draining = True, False

    async def resume(self, raw: bytes) -> None:
        """Continue."""
        self.paused = self.draining = False

    async def join(self, raw: bytes) -> None:
        """Join the weight group as its only worker."""
        body = msgspec.json.decode(raw, type=Update)
        update = body.update
        rendezvous = Rendezvous(update.group, update.address, update.port, update.world_size)
        arguments = (rendezvous, 1, update.transport, update.bucket_bytes, body.seconds)
        await asyncio.to_thread(self.receiver.join, *arguments)

    async def receive(self, raw: bytes) -> str:
        """Receive all weights and use them at once; return their digest."""
        body = msgspec.json.decode(raw, type=Update)
        received: dict[str, torch.Tensor] = {}

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            received.update((name, tensor.clone()) for name, tensor in tensors)

        await asyncio.to_thread(self.receiver.receive, body.update.parameters, load, body.seconds)
        self.weights, self.version = received, body.update.version
        return self.receiver.digest

    async def health(self, raw: bytes) -> bool:
        """Return True."""
        return True

    async def score(self, raw: bytes) -> list[float]:
        """Return the log-probability of each token but the first."""
        tokens = msgspec.json.decode(raw, type=list[int])
        rows = zip(self.logprobs(tokens[:-1]), tokens[1:], strict=True)
        return [float(row[token]) for row, token in rows]


@web.middleware
async def check_key(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Reject requests without the key."""
    if request.headers.get("Authorization") != f"Bearer {os.environ['TORCH_ENGINE_KEY']}":
        raise web.HTTPUnauthorized
    return await handler(request)


def route(call: Callable[[bytes], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers with the result of ``call`` as JSON."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(await call(await request.read())))

    return handle


def main() -> None:
    """Serve."""
    model, port, length = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    server = Server(model, length)
    app = web.Application(middlewares=[check_key])
    app.router.add_get("/health", route(server.health))
    calls = (server.generate, server.abort, server.pause, server.resume, server.join, server.receive)
    for call in (*calls, server.score):
        app.router.add_post(f"/{call.__name__}", route(call))
    web.run_app(app, host="127.0.0.1", port=port, keepalive_timeout=3600, print=None)


if __name__ == "__main__":
    main()
