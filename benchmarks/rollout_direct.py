"""The direct side of the rollout benchmark: the same requests to the same vLLM server, without rljob."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from pathlib import Path
from typing import Any

import aiohttp

from rljob.protocol import messages as m
from rljob.scheduling.seeds import derive


class DirectClient:
    """Sends generation requests to a vLLM server without rljob.

    Args:
        url: of the server.
        key: its API key.
        concurrency: number of requests in flight.
    """

    def __init__(self, url: str, key: str, concurrency: int) -> None:
        self._url, self._key, self._concurrency = f"{url}/inference/v1/generate", key, concurrency

    async def run(self, requests: list[dict[str, Any]]) -> tuple[float, int]:
        """Send all requests; return (seconds, tokens received)."""
        waiting, tokens = iter(requests), 0
        headers = {"Authorization": f"Bearer {self._key}"}

        async def work() -> None:
            nonlocal tokens
            for request in waiting:
                async with session.post(self._url, json=request) as response:
                    reply = json.loads(await response.read())
                    tokens += len(reply["choices"][0]["token_ids"])

        connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=no_limit) as session:
            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(self._concurrency)))
            return time.perf_counter() - began, tokens


def make_requests(samples: list[m.SampleTokens], length: int, seed: int, end: int, tag: str) -> list[dict[str, Any]]:
    """Return the requests that generated a batch, in the order of the sample ids.

    Args:
        samples: of the batch.
        length: tokens of each response.
        seed: of the job.
        end: id of the end token.
        tag: prefix of the request ids.
    """
    requests = []
    for sample in sorted(samples, key=lambda s: [int(part) for part in s.sample[1:].split(".")]):
        prompt = array("i", sample.token_ids).tolist()[: -sum(sample.loss_mask)]
        sampling = {
            "temperature": 1.0,
            "max_tokens": length,
            "stop_token_ids": [end],
            "ignore_eos": True,
            "seed": derive(seed, sample.sample, 0, 0),
            "logprobs": 0,
            "detokenize": False,
        }
        requests.append({"request_id": f"{tag}-{sample.sample}", "token_ids": prompt, "sampling_params": sampling})
    return requests


def find_server(agent: int) -> tuple[str, str]:
    """Return (URL, API key) of the engine server that the agent with this process id started.

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
                return f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}", variables["VLLM_API_KEY"]
    raise RuntimeError(f"process {agent} has no engine server among its children")
