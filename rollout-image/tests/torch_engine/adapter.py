"""Adapter of the engine in ``server.py``: `engine: torch_engine.adapter:TorchEngine`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout.adapters.base import GenerationOutput, Launch, unpack_ints
from rljob.rollout.adapters.http_client import EngineHttp
from rljob.rollout.exit_diagnosis import first_error

KEY_VARIABLE = "TORCH_ENGINE_KEY"


class TorchEngine:
    """Servers of one pool."""

    in_flight = ("keep", "abort", "wait")  # there is no KV cache to keep

    def __init__(self, pool: Rollout, model: Path) -> None:
        self._pool = pool
        self._model = model

    def problems(self) -> Iterator[str]:
        """Yield one problem for each argument, and for several workers: the server supports neither."""
        if self._pool.parallelism.workers > 1:
            yield "parallelism: this engine has one worker; remove it"
        yield from (f"args[{i}]: {arg!r} is unknown; remove it" for i, arg in enumerate(self._pool.args))

    def launch(self, port: int, key: str) -> Launch:
        """Return the command of the server."""
        command = [sys.executable, "-m", "torch_engine.server", self._model, port, self._pool.max_model_length]
        return Launch([str(part) for part in command], {KEY_VARIABLE: key})

    def connect(self, port: int, key: str) -> TorchClient:
        """Return a client of the server."""
        return TorchClient(f"http://127.0.0.1:{port}", key)

    def find_error(self, lines: Iterable[str]) -> str:
        """Return the Python exception in the log."""
        return first_error(lines)


class Generated(msgspec.Struct):
    """Answer of /generate."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish: str


class TorchClient:
    """A running server."""

    def __init__(self, url: str, key: str) -> None:
        self._http = EngineHttp("the torch engine", url, key)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def healthy(self) -> bool:
        """Return whether the server answers."""
        return await self._http.answers("/health")

    async def responsive(self) -> bool:
        """Return whether the server answers: it has one thread."""
        return await self._http.answers("/health")

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> GenerationOutput:
        """Generate one completion."""
        body = {"request": request, "token_ids": unpack_ints(token_ids), "sampling": sampling}
        output = await self._http.call("/generate", body, msgspec.json.Decoder(Generated))
        return GenerationOutput.pack(output.token_ids, output.logprobs, output.spans, output.finish)

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop requests."""
        await self._http.post("/abort", list(requests))

    async def join(self, update: PrepareWeights, seconds: float) -> None:
        """Join the weight group."""
        await self._http.post("/join", {"update": update, "seconds": seconds})

    async def pause(self, in_flight: str) -> None:
        """Stop generating."""
        await self._http.post("/pause", in_flight)

    async def receive(self, update: PrepareWeights, seconds: float) -> str:
        """Receive and commit the weights."""
        return await self._http.call("/receive", {"update": update, "seconds": seconds}, msgspec.json.Decoder(str))

    async def resume(self) -> None:
        """Continue generating."""
        await self._http.post("/resume")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        return await self._http.call("/score", list(token_ids), msgspec.json.Decoder(list[float]))
