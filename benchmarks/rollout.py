"""Tokens per second through rljob, against the same vLLM server driven directly.

    python -m benchmarks.rollout --json [--cells 64x32,512x256] [--repeats 3] [--keep]

For each cell (answer length × concurrency) the parts of a job run as with ``rljob run``, except that this program is
the trainer: it sends weights, takes each batch and does nothing with it. At α = 0 nothing is generated while it holds
a batch, and in that pause it sends the same prompts, seeds and lengths to the same server with a minimal aiohttp
client of the same concurrency. So both sides alternate on one server. A batch through rljob is timed from the first
dispatch to the last completion taken (the coordinator's own stopwatch); every sample is also recorded in the ledger,
fsynced, decoded and scored by the reward service while that goes on. The first pair is a warm-up and not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
import zstandard
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import report, target
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.local import plan, processes
from rljob.local.plan import Surroundings
from rljob.protocol import messages as m
from rljob.protocol.coordinator_link import CoordinatorLink
from rljob.protocol.status import decode_status
from rljob.scheduling.seeds import derive
from rljob.trainer.example_model import train_tokenizer
from rljob.trainer.weights import WeightSender, describe

SEED = 5
GROUP = 8
END = 319
CELLS = [(length, concurrency) for length in (64, 512) for concurrency in (32, 128, 256)]
TOKENS_PER_BATCH = {64: 32_768, 512: 65_536}
ROLES = ("agent", "trainer", "runner")


def samples_of(length: int, concurrency: int) -> int:
    """Return the samples of a batch: at least two waves, and some seconds of work."""
    return max(2 * concurrency, TOKENS_PER_BATCH[length] // length) // GROUP * GROUP


def manifest(length: int, concurrency: int, repeats: int) -> RLJob:
    """Return the job of one cell."""
    spec = {
        "seed": SEED,
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {
            "steps": repeats + 5,
            "promptsPerStep": samples_of(length, concurrency) // GROUP,
            "samplesPerPrompt": GROUP,
            "maxStaleness": 0,
        },
        "tasks": [
            {
                "name": "sums",
                "data": {"reasoningGym": {"dataset": "chain_sum", "config": {"max_digits": 1}}},
                "reward": "sums",
                "sampling": {"maxTokens": length},
            }
        ],
        "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main", "maxConcurrency": concurrency, "maxModelLength": 640, "kvCacheBytes": 512 << 20}],
    }
    return resolve(RLJob.model_validate({"metadata": {"name": "rollout"}, "spec": spec}))


def make_model(directory: Path) -> Qwen2ForCausalLM:
    """Write the quickstart's architecture with random weights under which it never ends by itself.

    The first hidden dimension is 1 for every token and no layer writes to it; the end's output row is far below zero
    there, so every answer is as long as it may be.
    """
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.06,
        max_position_embeddings=1024,
        eos_token_id=END,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END, 0] = -1000.0
    model.save_pretrained(directory)
    texts = [f"{a} + {b} - {c} =" for a in range(10) for b in range(10) for c in range(10)]
    train_tokenizer(texts).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return model


class IdleTrainer:
    """A trainer that publishes its weights and hands every batch to ``on_batch``."""

    def __init__(self, url: str, token: str, model: Qwen2ForCausalLM, job: RLJob) -> None:
        sync = job.spec.weight_sync
        self._url, self._token = url, token
        self._weights = [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]
        self._sender = WeightSender("127.0.0.1", sync.bucket_bytes, sync.timeout_seconds, "gloo")
        self._step, self._incarnation = 0, 0
        self._link = CoordinatorLink(url, "trainer", token, m.ToTrainer, self._register)

    def _register(self) -> list[Any]:
        return [m.RegisterTrainer("idle", self._incarnation, self._step)]

    async def batches(self) -> Any:
        """Yield (step, shard) of each batch; the next is asked for when the caller comes back."""
        async for message in self._link.messages():
            if isinstance(message, m.TrainerRegistered):
                self._incarnation = message.incarnation
            elif isinstance(message, m.SendWeights):
                for engine in message.engines:
                    await self._send(message.update, engine)
            elif isinstance(message, m.Train):
                yield message.step, await self._pull(message)
                self._step = message.step + 1
                self._link.send(m.StepDone(self._incarnation, message.step, {}))
            elif isinstance(message, m.Checkpoint):
                self._link.send(m.Checkpointed(self._incarnation, message.step, "checkpoints/none"))

    async def _send(self, update: int, engine: m.EngineTarget) -> None:
        group = self._sender.open(engine.engine, engine.fresh)
        place = (group.group, group.address, group.port, group.world_size, "gloo")
        probe = m.Probe([], [], 1e-4)
        self._link.send(
            m.WeightsReady(self._incarnation, update, engine.engine, *place, describe(self._weights), probe)
        )
        digest = await asyncio.to_thread(self._sender.send, engine.engine, self._weights)
        self._link.send(m.WeightsSent(self._incarnation, update, engine.engine, digest, 0.0, ""))

    async def _pull(self, train: m.Train) -> list[m.SampleTokens]:
        url = f"{self._url}/v1/batches/{train.step}/shards/0?of=1&incarnation={self._incarnation}"
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
            response.raise_for_status()
            return msgspec.msgpack.decode(zstandard.decompress(await response.read()), type=list[m.SampleTokens])


class DirectClient:
    """The same requests by the shortest way: no rljob between."""

    def __init__(self, url: str, key: str, concurrency: int) -> None:
        self._url, self._key, self._concurrency = f"{url}/inference/v1/generate", key, concurrency

    async def run(self, requests: list[dict[str, Any]]) -> tuple[float, int]:
        """Send all requests; return seconds and tokens received."""
        waiting, tokens = iter(requests), 0
        headers = {"Authorization": f"Bearer {self._key}"}

        async def work() -> None:
            nonlocal tokens
            for request in waiting:
                async with session.post(self._url, json=request) as response:
                    reply = json.loads(await response.read())
                    tokens += len(reply["choices"][0]["token_ids"])

        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(self._concurrency)))
            return time.perf_counter() - began, tokens


def requests_of(samples: list[m.SampleTokens], length: int, tag: str) -> list[dict[str, Any]]:
    """Return the batch's requests as the engine got them."""
    requests = []
    for sample in sorted(samples, key=lambda s: [int(part) for part in s.sample[1:].split(".")]):
        prompt = array("i", sample.token_ids).tolist()[: -sum(sample.loss_mask)]
        sampling = {
            "temperature": 1.0,
            "max_tokens": length,
            "stop_token_ids": [END],
            "ignore_eos": True,
            "seed": derive(SEED, sample.sample, 0, 0),
            "logprobs": 0,
            "detokenize": False,
        }
        requests.append({"request_id": f"{tag}-{sample.sample}", "token_ids": prompt, "sampling_params": sampling})
    return requests


async def generating(url: str) -> tuple[float, float]:
    """Return the coordinator's stopwatch: seconds in which engines had work; and now."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/status") as response:
        status = decode_status(await response.read())
    return next(metric.value for metric in status.metrics if metric.name == "seconds_generating"), time.perf_counter()


def server_of(agent: int) -> tuple[str, str]:
    """Return address and key of the engine server that the agent started."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = dict(
                    v.split("=", 1) for v in (entry / "environ").read_bytes().decode().split("\0") if "=" in v
                )
                return f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}", variables["VLLM_API_KEY"]
    raise RuntimeError("the agent's engine server was not found")


async def measure(length: int, concurrency: int, repeats: int) -> dict[str, Any]:
    """Return the figures of one cell."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        storage = Path(folder)
        job = manifest(length, concurrency, repeats)
        model = make_model(storage / "model")
        (storage / "logs").mkdir()
        (storage / "job.json").write_text(job.model_dump_json(by_alias=True))
        tokens = {role: secrets.token_urlsafe(16) for role in ROLES}
        (storage / "tokens.json").write_text(json.dumps(tokens))
        here = Surroundings(storage, _free_ports(plan.servers(job)), tokens)
        commands = [command for command in plan.parts(job, here) if command.name != "trainer"]
        parts = {command.name: await processes.start(command, storage) for command in commands}
        try:
            trainer = IdleTrainer(here.coordinator_url, tokens["trainer"], model, job)
            return await _pairs(
                trainer, here.coordinator_url, parts["rollout-main-0"].pid, length, concurrency, repeats
            )
        finally:
            for process in parts.values():
                if process.returncode is None:
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in parts.values()))


async def _pairs(
    trainer: IdleTrainer, url: str, agent: int, length: int, concurrency: int, repeats: int
) -> dict[str, Any]:
    through, direct = [], []
    before = 0.0
    async for step, samples in trainer.batches():
        after, _ = await generating(url)
        generated = sum(sum(sample.loss_mask) for sample in samples)
        assert generated == length * len(samples), "an answer ended early"
        client = DirectClient(*server_of(agent), concurrency)
        seconds, received = await client.run(requests_of(samples, length, f"direct-{step}"))
        assert received == generated
        if step > 0:
            through.append(generated / (after - before))
            direct.append(received / seconds)
            sys.stderr.write(f"{length}x{concurrency}: {through[-1]:.0f} through rljob, {direct[-1]:.0f} direct\n")
        before = after
        if step == repeats:
            break
    return {
        "rljob_tokens_per_second": statistics.median(through),
        "direct_tokens_per_second": statistics.median(direct),
        "ratio": statistics.median(a / b for a, b in zip(through, direct, strict=True)),
    }


def _free_ports(names: list[str]) -> dict[str, int]:
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: listener.getsockname()[1] for name, listener in sockets.items()}
    for listener in sockets.values():
        listener.close()
    return ports


def main() -> None:
    """Measure all cells and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--cells", help="cells as LENGTHxCONCURRENCY, comma-separated")
    parser.add_argument("--repeats", type=int, default=3, help="counted pairs of each cell")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/rollout.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells = CELLS
    if options.cells:
        cells = [(int(a), int(b)) for a, _, b in (cell.partition("x") for cell in options.cells.split(","))]
    figures: dict[str, Any] = {}
    ratios = []
    for length, concurrency in cells:
        result = asyncio.run(measure(length, concurrency, options.repeats))
        ratios.append(result["ratio"])
        figures |= {f"{name}_{length}_tokens_{concurrency}_concurrent": value for name, value in result.items()}
    report("rollout", figures, {"throughput_ratio": target(min(ratios), ">=", 0.9)}, options.keep)


if __name__ == "__main__":
    main()
