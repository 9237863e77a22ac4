"""The direct side of the rollout benchmark: the same requests to the same server of vLLM or SGLang, without rljob."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rljob.protocol.batch_samples import SampleTokens
from rljob.rollout.adapters.sglang.main import KEY_VARIABLE
from rljob.scheduling.seeds import derive


@dataclass(frozen=True)
class DirectRoute:
    """How to generate with an engine's server.

    Args:
        path: of the route.
        key_variable: the server's environment variable with its key.
        request: name, prompt, tokens to generate, end token and seed → body of a request.
        tokens: body of an answer → number of tokens.
    """

    path: str
    key_variable: str
    request: Callable[[str, list[int], int, int, int], dict[str, Any]]
    tokens: Callable[[Any], int]


def _to_vllm(name: str, prompt: list[int], length: int, end: int, seed: int) -> dict[str, Any]:
    sampling = {
        "temperature": 1.0,
        "max_tokens": length,
        "stop_token_ids": [end],
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,
        "detokenize": False,
    }
    return {"request_id": name, "token_ids": prompt, "sampling_params": sampling}


def _to_sglang(name: str, prompt: list[int], length: int, end: int, seed: int) -> dict[str, Any]:
    """SGLang ignores the seed of a request, so its answers differ; their lengths do not."""
    sampling = {"temperature": 1.0, "max_new_tokens": length, "stop_token_ids": [end]}
    return {"rid": name, "input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


ROUTES = {
    "vllm": DirectRoute(
        "/inference/v1/generate", "VLLM_API_KEY", _to_vllm, lambda reply: len(reply["choices"][0]["token_ids"])
    ),
    "sglang": DirectRoute("/generate", KEY_VARIABLE, _to_sglang, lambda reply: len(reply["output_ids"])),
}
"""Engine → its route."""


class DirectClient:
    """Sends generation requests to an engine's server without rljob.

    Args:
        route: of the engine.
        url: of the server.
        key: its key.
        concurrency: number of requests in flight.
    """

    def __init__(self, route: DirectRoute, url: str, key: str, concurrency: int) -> None:
        self._url, self._key = url + route.path, key
        self._route, self._concurrency = route, concurrency

    async def run(self, requests: list[dict[str, Any]]) -> tuple[float, int]:
        """Send all requests; return (seconds, tokens received)."""
        waiting, tokens = iter(requests), 0
        headers = {"Authorization": f"Bearer {self._key}"}

        async def work() -> None:
            nonlocal tokens
            for request in waiting:
                async with session.post(self._url, json=request) as response:
                    tokens += self._route.tokens(json.loads(await response.read()))

        connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=no_limit) as session:
            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(self._concurrency)))
            return time.perf_counter() - began, tokens


def make_requests(
    route: DirectRoute, samples: list[SampleTokens], length: int, seed: int, end: int, tag: str
) -> list[dict[str, Any]]:
    """Return the requests that generated a batch, in the order of the sample ids.

    Args:
        route: of the engine.
        samples: of the batch.
        length: tokens of each response.
        seed: of the job.
        end: id of the end token.
        tag: prefix of the request ids.
    """
    requests = []
    for sample in sorted(samples, key=lambda s: [int(part) for part in s.sample[1:].split(".")]):
        prompt = array("i", sample.token_ids).tolist()[: -sum(sample.loss_mask)]
        own_seed = derive(seed, sample.sample, 0, 0)
        requests.append(route.request(f"{tag}-{sample.sample}", prompt, length, end, own_seed))
    return requests


def find_server(agent: int, key_variable: str) -> tuple[str, str]:
    """Return (URL, key) of the engine server that the agent with this process id started.

    Raises:
        RuntimeError: the agent has no such child process.
    """
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = dict(
                    v.split("=", 1) for v in (entry / "environ").read_bytes().decode().split("\0") if "=" in v
                )
                return f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}", variables[key_variable]
    raise RuntimeError(f"process {agent} has no engine server among its children")
