"""Tokens per second through rljob, compared with direct requests to the same server of vLLM or SGLang.

    python -m benchmarks.rollout --json [--engine sglang] [--cells 64x32,512x256] [--repeats 3] [--keep]
        [--timeout SECONDS]

For each cell (response length × concurrency) the components of a job run as with ``rljob run``, except for the trainer:
this program takes its place, sends weights, receives each batch and does not train. At α = 0 nothing is generated while
the trainer holds a batch. In this pause the program sends the same prompts, seeds and lengths to the same server with a
minimal aiohttp client of the same concurrency, so rljob and direct requests alternate on one server. The time of a
batch through rljob is from the first dispatch to the last completion (a counter of the coordinator); it includes
recording every sample in the ledger with fsync, decoding, and scoring by the reward service. The first pair is a
warm-up and not counted.

The benchmark fails when a component exits, and at the time-out (--timeout).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import time_limit
from benchmarks.report import report, target
from benchmarks.rollout_direct import ROUTES, DirectClient, find_server, make_requests
from benchmarks.rollout_trainer import IdleTrainer
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.local import commands, processes
from rljob.local.commands import LocalContext
from rljob.local.run_directory import ROLES
from rljob.protocol.free_port import free_port
from rljob.protocol.run_status import decode_status
from rljob.trainer.example_model import train_tokenizer

T = TypeVar("T")

TIMEOUT_SECONDS = 7200.0
SEED = 5
GROUP = 8
END = 319  # id of the end token
CELLS = [(length, concurrency) for length in (64, 512) for concurrency in (32, 128, 256)]
TOKENS_PER_BATCH = {64: 32_768, 512: 65_536}
REPEATS = {64: 9, 512: 3}  # by length: a short batch is measured more often, its ratio scatters by 15 %


def samples_per_batch(length: int, concurrency: int) -> int:
    """Return the number of samples: at least twice the concurrency, and TOKENS_PER_BATCH."""
    return max(2 * concurrency, TOKENS_PER_BATCH[length] // length) // GROUP * GROUP


def manifest(engine: str, length: int, concurrency: int, repeats: int) -> RLJob:
    """Return the job of one cell; ``repeats`` is the number of counted batches."""
    pool = {"maxConcurrency": concurrency, "maxModelLength": 640, "kvCacheBytes": 512 << 20}
    spec = {
        "seed": SEED,
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {
            "steps": repeats + 5,
            "promptsPerStep": samples_per_batch(length, concurrency) // GROUP,
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
        "rollouts": [{"name": "main", "engine": engine, **pool}],
    }
    return resolve(RLJob.model_validate({"metadata": {"name": "rollout"}, "spec": spec}))


def make_model(directory: Path) -> Qwen2ForCausalLM:
    """Write a model of the quickstart's architecture with random weights that never generates the end token.

    The first hidden dimension is 1 for every token and no layer writes to it. The output row of the end token is far
    below zero in this dimension, so every response has the maximum length.
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


async def seconds_generating(url: str) -> float:
    """Return the coordinator's counter of seconds in which engines had requests."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/status") as response:
        status = decode_status(await response.read())
    return next(metric.value for metric in status.metrics if metric.name == "seconds_generating")


async def measure(engine: str, length: int, concurrency: int, repeats: int) -> dict[str, Any]:
    """Return the figures of one cell."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        storage = Path(folder)
        job = manifest(engine, length, concurrency, repeats)
        model = make_model(storage / "model")
        (storage / "logs").mkdir()
        (storage / "job.json").write_text(job.model_dump_json(by_alias=True))
        tokens = {role: secrets.token_urlsafe(16) for role in ROLES}
        (storage / "tokens.json").write_text(json.dumps(tokens))
        context = LocalContext(storage, {name: free_port() for name in commands.servers(job)}, tokens)
        to_start = [command for command in commands.components(job, context) if command.name != "trainer"]
        started: dict[str, processes.ComponentProcess] = {}
        trainer = IdleTrainer(context.coordinator_url, tokens["trainer"], model, job)
        try:
            for command in to_start:
                started[command.name] = await processes.start(command, storage)
            agent = started["rollout-main-0"].pid
            pairs = _pairs(engine, trainer, context.coordinator_url, agent, length, concurrency, repeats)
            return await fail_on_exit(pairs, started, storage)
        finally:
            await trainer.close()
            await asyncio.gather(*(processes.end(process, asyncio.Event()) for process in started.values()))


async def fail_on_exit(
    work: Coroutine[Any, Any, T], started: Mapping[str, processes.ComponentProcess], directory: Path
) -> T:
    """Return the result of ``work``, during which no component may exit.

    Args:
        work: the coroutine to await.
        started: name → process of each component.
        directory: of the run, for the logs.

    Raises:
        RuntimeError: a component has exited; the message ends with the last lines of its log.
    """
    task = asyncio.create_task(work)
    exits = {asyncio.create_task(process.wait()): name for name, process in started.items()}
    try:
        await asyncio.wait({task, *exits}, return_when=asyncio.FIRST_COMPLETED)
        for exited, name in exits.items():
            if exited.done() and not task.done():
                how = processes.describe_exit(exited.result())
                raise RuntimeError(f"{name} {how}; {processes.tail(processes.log_path(directory, name))}")
        return await task
    finally:
        for pending in (task, *exits):
            pending.cancel()
        await asyncio.gather(task, *exits, return_exceptions=True)


async def _pairs(
    engine: str, trainer: IdleTrainer, url: str, agent: int, length: int, concurrency: int, repeats: int
) -> dict[str, Any]:
    route = ROUTES[engine]
    through, direct = [], []
    before = 0.0
    async with contextlib.aclosing(trainer.batches()) as batches:
        async for step, samples in batches:
            after = await seconds_generating(url)
            generated = sum(sum(sample.loss_mask) for sample in samples)
            assert generated == length * len(samples), "a response ended early"
            requests = make_requests(route, samples, length, SEED, END, f"direct-{step}")
            client = DirectClient(route, *find_server(agent, route.key_variable), concurrency)
            seconds, received = await client.run(requests)
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


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def main() -> None:
    """Measure all cells and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--engine", choices=ROUTES, default="vllm", help="of the server; see docs/sglang.md")
    parser.add_argument("--cells", help="cells as LENGTHxCONCURRENCY, comma-separated")
    parser.add_argument("--repeats", type=_count, help="counted pairs of each cell (default 9 or 3)")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.rollout", options.timeout)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells = CELLS
    if options.cells:
        cells = [(int(a), int(b)) for a, _, b in (cell.partition("x") for cell in options.cells.split(","))]
    figures: dict[str, Any] = {}
    ratios = []
    for length, concurrency in cells:
        repeats = REPEATS[length] if options.repeats is None else options.repeats
        result = asyncio.run(measure(options.engine, length, concurrency, repeats))
        ratios.append(result["ratio"])
        figures |= {f"{name}_{length}_tokens_{concurrency}_concurrent": value for name, value in result.items()}
    name = "rollout" if options.engine == "vllm" else f"rollout_{options.engine}"
    report(name, figures, {"throughput_ratio": target(min(ratios), ">=", 0.9)}, options.keep)


if __name__ == "__main__":
    main()
