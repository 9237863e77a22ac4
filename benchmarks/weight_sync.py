"""Time of a weight update of one vLLM server, compared with the wire and with the engine's own load.

    python -m benchmarks.weight_sync --json [--cells 1,95,1000,95x2] [--repeats 5] [--keep] [--timeout SECONDS]

A cell is a model size in MB, and after an x the tensor parallel size of the engine. For each cell this program is the
trainer and the agent of one idle vLLM server: it packs the weights, sends them over gloo, and carries out the update
with the agent's code. As many processes as the server has workers only receive. Each repeat measures, in sequence, so
that all figures alternate on one machine:

- ``raw``: broadcasts of the same bytes in the same buckets by torch.distributed, to the processes that only receive;
- ``wire``: a round of rljob to these processes, with digests and receipts;
- ``pack`` (gather, convert, copy) and ``checksum`` (alone);
- ``update``: a weight update of the server; of it ``paused`` is from the pause to the end of the resume. Its steps are
  measured by the server: ``pause``, ``receive`` (with the commit), ``resume``, ``score`` (the probe, in small models);
- ``load``: the server loads the same tensors from its own memory, without a wire.

``wire_of_raw`` is raw / wire. ``pause_of_limit`` is paused / (100 ms + raw + load). The smallest size is the
quickstart's model, whose whole update is ``idle_update_ms``. All times are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import time_limit
from benchmarks.report import report, target
from rljob.api.roles import EngineParallelism, Rollout
from rljob.protocol.messages import PrepareWeights, Probe, SamplingParams
from rljob.rollout.adapters.base import EngineClient, Launch
from rljob.rollout.adapters.update_steps import PAUSE, RECEIVE, RESUME, SCORE
from rljob.rollout.adapters.vllm.adapter import VllmAdapter
from rljob.rollout.supervisor import EngineProcess
from rljob.rollout.weight_update import WeightUpdater
from rljob.trainer.weight_probe import probe_tokens
from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.packed_weights import PackedWeights, pack
from rljob.transfer.receiver import WeightReceiver

TIMEOUT_SECONDS = 3600.0
SECONDS = 300.0
HOST = "127.0.0.1"
BUCKET_BYTES = 16 << 20
VOCABULARY = 320
QUICKSTART = 1
SIZES: dict[int, dict[str, Any]] = {
    QUICKSTART: {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    95: {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 7, "num_attention_heads": 8},
    1000: {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
}
"""Size in MB of float32 → dimensions of a model of about this size; the first is the quickstart's."""
CELLS = [*map(str, SIZES), "95x2"]
CELL = re.compile(rf"(?:{'|'.join(map(str, SIZES))})(?:x2)?")


class LocalLoadAdapter(VllmAdapter):
    """vLLM with a worker that can load the tensors of a file from its memory."""

    def launch(self, port: int, key: str) -> Launch:
        """Return the command of the server."""
        launch = super().launch(port, key)
        command = list(launch.command)
        command[command.index("--worker-extension-cls") + 1] = "benchmarks.weight_sync_worker.LocalLoad"
        return Launch(command, launch.environment)


class Receivers:
    """Processes that only receive; the calls of the methods are broadcasts and rounds that they take part in."""

    def __init__(self, folder: Path, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(folder / "store")
        self._pipes, self._processes = [], []
        for rank in range(1, 1 + count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_receive, args=(theirs, store, rank, 1 + count), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1 + count)
        self._sender = WeightSender(HOST, SECONDS, "gloo")
        self._place = self._sender.open("receivers", fresh=True, workers=count)

    def raw(self, weights: PackedWeights) -> float:
        """Return the seconds of plain broadcasts of all buckets, until the receivers have them."""
        self._order([bucket.numel() for bucket in weights.buckets])
        started = time.perf_counter()
        for bucket in weights.buckets:
            dist.broadcast(bucket, 0)
        _acknowledge()
        return time.perf_counter() - started

    def wire(self, weights: PackedWeights) -> float:
        """Return the seconds of a round; of the first one with the group's forming."""
        self._order((self._place, weights.parameters))
        started = time.perf_counter()
        self._sender.send("receivers", weights)
        return time.perf_counter() - started

    def _order(self, order: object) -> None:
        for pipe in self._pipes:
            pipe.send(order)
        for pipe in self._pipes:
            pipe.recv()

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        dist.destroy_process_group()


def _acknowledge() -> None:
    for rank in range(1, dist.get_world_size()):
        dist.broadcast(torch.zeros(1), rank)


def _receive(pipe: Connection, store: str, rank: int, size: int) -> None:
    """Be a process that only receives."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    receiver, joined = WeightReceiver("cpu"), False
    while True:
        order = pipe.recv()
        pipe.send("ready")
        if isinstance(order, list):
            for number in order:
                dist.broadcast(torch.empty(number, dtype=torch.uint8), 0)
            _acknowledge()
            continue
        place, parameters = order
        if not joined:
            receiver.join(place, rank, "gloo", BUCKET_BYTES, SECONDS)
            joined = True
        receiver.receive(parameters, lambda tensors: None, SECONDS)


class Figures:
    """Seconds of each repeat, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Add one repeat."""
        self.seconds.setdefault(name, []).append(seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a block."""
        started = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - started)

    def median(self, name: str) -> float:
        """Return the median, without the first repeat, which is a warm-up."""
        return statistics.median(self.seconds[name][1:])


async def measure(size: int, tensor: int, repeats: int) -> dict[str, float]:
    """Return the figures of one cell, in ms and ratios."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        directory = Path(folder)
        torch.manual_seed(1)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **SIZES[size],
        )
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(directory / "model")
        pool = Rollout(
            name="main", dtype="float32", max_model_length=256, max_concurrency=8, kv_cache_bytes=64 << 20,
            parallelism=EngineParallelism(tensor=tensor),
        )  # fmt: skip
        server = await EngineProcess.start(LocalLoadAdapter(pool, directory / "model"))
        receivers = Receivers(directory, pool.parallelism.workers)
        try:
            await server.wait_healthy()
            figures = Figures()
            await _repeat(model, pool, server.client, receivers, figures, repeats, directory / "model")
        finally:
            receivers.end()
            await server.kill()
    return _ratios(figures, sum(parameter.numel() * 4 for parameter in model.parameters()))


async def _repeat(
    model: Qwen2ForCausalLM,
    pool: Rollout,
    engine: EngineClient,
    receivers: Receivers,
    figures: Figures,
    repeats: int,
    source: Path,
) -> None:
    updater, sender = WeightUpdater(engine), WeightSender(HOST, SECONDS, "gloo")
    probe, buffers = Probe(probe_tokens(VOCABULARY), []), BucketBuffers()
    for version in range(repeats + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        begin = time.perf_counter()
        weights = pack(model.named_parameters(), BUCKET_BYTES, torch.float32, buffers=buffers)
        figures.add("pack", time.perf_counter() - begin)
        place = sender.open("main", fresh=False, workers=pool.parallelism.workers)
        probe.logprobs = await asyncio.to_thread(_logprobs, model, probe.token_ids) if size_of(weights) < 1e7 else []
        update = PrepareWeights(
            version, 0, version, place.group, place.address, place.port, place.world_size, "gloo", BUCKET_BYTES,
            weights.parameters, probe if probe.logprobs else Probe([], []), "keep", SECONDS,
        )  # fmt: skip
        with figures.timed("update"):
            sent, ack = await asyncio.gather(asyncio.to_thread(sender.send, "main", weights), updater.run(update))
        assert sent == ack.digest
        for name in (PAUSE, RECEIVE, RESUME, SCORE):
            figures.add(name, updater.seconds.get(name, 0.0))
        figures.add("paused", sum(updater.seconds[name] for name in (PAUSE, RECEIVE, RESUME)))
        with figures.timed("checksum"):
            PackedWeights(weights.parameters, weights.buckets).digest()
        figures.add("raw", await asyncio.to_thread(receivers.raw, weights))
        figures.add("wire", await asyncio.to_thread(receivers.wire, weights))
        figures.add("load", await _load(engine, source))
        sampling = SamplingParams(1.0, 4, [], version)
        await engine.generate(f"benchmark-{version}", array("i", [1, 2, 3]).tobytes(), sampling)
        del weights  # as in the trainer: the next version uses its memory
        sys.stderr.write(
            " ".join(f"{name} {values[-1] * 1000:.1f} ms" for name, values in figures.seconds.items()) + "\n"
        )


def size_of(weights: PackedWeights) -> int:
    """Return the bytes on the wire."""
    return sum(bucket.numel() for bucket in weights.buckets)


@torch.no_grad()
def _logprobs(model: Qwen2ForCausalLM, sequences: list[list[int]]) -> list[list[float]]:
    tokens_BL = torch.tensor(sequences)
    logprobs_BLV = model(tokens_BL).logits[:, :-1].log_softmax(-1)
    return logprobs_BLV.gather(-1, tokens_BL[:, 1:, None])[..., 0].tolist()


async def _load(engine: Any, source: Path) -> float:
    """Return the seconds in which the idle engine loads a model from its memory."""
    await engine.pause("keep")
    reply = await engine._http.call(
        "/collective_rpc",
        {"method": "benchmark_load", "args": [str(source)]},
        msgspec.json.Decoder(dict[str, list[str]]),
    )
    await engine.resume()
    return max(map(float, reply["results"]))


def _ratios(figures: Figures, size: int) -> dict[str, float]:
    median = {name: figures.median(name) for name in figures.seconds}
    result = {f"{name}_ms": 1000 * seconds for name, seconds in median.items()}
    limit = 0.1 + median["raw"] + median["load"]
    pairs = zip(figures.seconds["raw"][1:], figures.seconds["wire"][1:], strict=True)
    return result | {
        "megabytes": size / 1e6,
        "wire_of_raw": statistics.median(raw / wire for raw, wire in pairs),
        "pause_of_limit": median["paused"] / limit,
    }


def main() -> None:
    """Measure all cells and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--cells", default=",".join(CELLS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="counted updates of each cell")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/weight_sync.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if unknown := [cell for cell in options.cells.split(",") if not CELL.fullmatch(cell)]:
        parser.error(f"--cells: {unknown[0]!r} is no model size of {', '.join(map(str, SIZES))}, with or without x2")
    time_limit.limit("benchmarks.weight_sync", options.timeout)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    targets: dict[str, Any] = {}
    for cell in options.cells.split(","):
        size, _, tensor = cell.partition("x")
        result = asyncio.run(measure(int(size), int(tensor or 1), options.repeats))
        what = f"{size}_mb_tensor_{tensor}" if tensor else f"{size}_mb"
        figures |= {f"{name}_{what}": value for name, value in result.items()}
        if what == f"{QUICKSTART}_mb":
            targets["idle_update_ms"] = target(result["pack_ms"] + result["update_ms"], "<=", 30)
        elif size != str(QUICKSTART):
            targets[f"wire_of_raw_{what}"] = target(result["wire_of_raw"], ">=", 0.85)
            targets[f"pause_of_limit_{what}"] = target(result["pause_of_limit"], "<=", 1.3)
    report("weight_sync", figures, targets, options.keep)


if __name__ == "__main__":
    main()
