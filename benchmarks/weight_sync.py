"""Time of a weight update of idle vLLM servers, compared with the wire and with the engines' own load.

    python -m benchmarks.weight_sync --json [--cells 1,95s2,95s2ipc] [--repeats 5] [--keep] [--timeout SECONDS]

A cell is a model size in MB, after an x the tensor parallel size of the engine, after an s the number of servers, and
the transport if it is not gloo: 95x2, 1000s2, 95s2ipc. For each cell this program is the trainer and the agents of the
servers: it packs the weights while it sends them, and carries out the updates with the agent's code. As many processes
as the servers have workers only receive, in groups like those of the servers. Each repeat measures, in sequence, so
that all figures alternate on one machine (the servers are stopped while the others but ``update`` and ``load`` are
measured):

- ``raw``: gloo broadcasts of the same bytes in the same buckets by torch.distributed, to the processes that only
  receive, as one group;
- ``wire``: a round of rljob to these processes, with digests and receipts, and ``wire_cpu``, the core-seconds of the
  sender in it;
- ``shared``, ``shared_cpu``: the same as one group of all of them; only with several servers;
- ``pack`` (gather and copy), ``convert`` (the same to bfloat16) and ``checksum``, each alone;
- ``update``: a weight update of all servers with its packing; of it ``paused`` is from the pause to the end of the
  resume, of the server where it takes longest. Its steps are measured by the servers: ``pause``, ``receive`` (with the
  commit), ``resume``, ``score`` (the probe, in small models);
- ``load``: all servers load the same tensors from their own memory at the same time, without a wire.

``wire_of_raw`` is raw / wire. ``pause_of_limit`` is paused / (100 ms + raw + load). The smallest size is the
quickstart's model, whose whole update is ``idle_update_ms``. All times are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import time_limit
from benchmarks.report import report, target
from benchmarks.weight_sync_receivers import BUCKET_BYTES, HOST, SECONDS, Cell, Receivers
from rljob.api.roles import EngineParallelism, Rollout
from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import Probe
from rljob.rollout.adapters.base import EngineClient, Launch
from rljob.rollout.adapters.update_steps import PAUSE, RECEIVE, RESUME, SCORE
from rljob.rollout.adapters.vllm.adapter import VllmAdapter
from rljob.rollout.supervisor import EngineProcess
from rljob.rollout.weight_update import WeightUpdater
from rljob.trainer.weight_probe import probe_tokens
from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.bucket_wires import wire_buffers
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.wire_plan import WirePlan

TIMEOUT_SECONDS = 3600.0
VOCABULARY = 320
QUICKSTART = 1
SIZES: dict[int, dict[str, Any]] = {
    QUICKSTART: {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    95: {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 7, "num_attention_heads": 8},
    1000: {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
}
"""Size in MB of float32 → dimensions of a model of about this size; the first is the quickstart's."""
CELLS = [*map(str, SIZES), "95x2", "95s2", "1000s2", "95s2ipc"]


class LocalLoadAdapter(VllmAdapter):
    """vLLM with a worker that can load the tensors of a file from its memory."""

    def launch(self, port: int, key: str) -> Launch:
        """Return the command of the server."""
        launch = super().launch(port, key)
        command = list(launch.command)
        command[command.index("--worker-extension-cls") + 1] = "benchmarks.weight_sync_worker.LocalLoad"
        return Launch(command, launch.environment)


class Figures:
    """Seconds of each repeat, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Add one repeat."""
        self.seconds.setdefault(name, []).append(seconds)

    def add_both(self, name: str, seconds: tuple[float, float]) -> None:
        """Add the seconds and the core-seconds of one repeat."""
        self.add(name, seconds[0])
        self.add(f"{name}_cpu", seconds[1])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a block."""
        started = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - started)

    def median(self, name: str) -> float:
        """Return the median, without the first repeat, which is a warm-up."""
        return statistics.median(self.seconds[name][1:])


async def measure(cell: Cell, repeats: int) -> dict[str, float]:
    """Return the figures of one cell, in ms and ratios."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        directory = Path(folder)
        torch.manual_seed(1)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **SIZES[cell.size],
        )
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(directory / "model")
        pool = Rollout(
            name="main", dtype="float32", max_model_length=256, max_concurrency=8, kv_cache_bytes=64 << 20,
            parallelism=EngineParallelism(tensor=cell.tensor),
        )  # fmt: skip
        adapter = LocalLoadAdapter(pool, directory / "model")
        servers = [await EngineProcess.start(adapter) for _ in range(cell.servers)]
        receivers = Receivers(directory, cell)
        try:
            for server in servers:
                await server.wait_healthy()
            figures = Figures()
            await _repeat(model, cell, servers, receivers, figures, repeats, directory / "model")
        finally:
            receivers.end()
            for server in servers:
                await server.kill()
    return _ratios(figures, sum(parameter.numel() * 4 for parameter in model.parameters()))


async def _repeat(
    model: Qwen2ForCausalLM,
    cell: Cell,
    servers: list[EngineProcess],
    receivers: Receivers,
    figures: Figures,
    repeats: int,
    source: Path,
) -> None:
    engines: list[EngineClient] = [server.client for server in servers]
    trainer = Trainer(model, cell, engines)
    for version in range(repeats + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        weights = await trainer.update(version, figures)
        with _stopped(servers):
            trainer.pack_alone(figures)
            with figures.timed("checksum"):
                PackedWeights.of(weights.plan, weights.buckets).digest()
            figures.add("raw", await asyncio.to_thread(receivers.raw, weights))
            figures.add_both("wire", await asyncio.to_thread(receivers.wire, weights, cell.tensor))
            if cell.servers > 1:
                figures.add_both("shared", await asyncio.to_thread(receivers.wire, weights, cell.servers * cell.tensor))
        figures.add("load", max(await asyncio.gather(*(_load(engine, source) for engine in engines))))
        for engine in engines:
            sampling = SamplingParams(1.0, 4, [], version)
            await engine.generate(f"benchmark-{version}", array("i", [1, 2, 3]).tobytes(), sampling)
        del weights  # as in the trainer: the next version uses its memory
        sys.stderr.write(
            " ".join(f"{name} {values[-1] * 1000:.1f} ms" for name, values in figures.seconds.items()) + "\n"
        )


@contextmanager
def _stopped(servers: list[EngineProcess]) -> Iterator[None]:
    """Stop the servers' processes meanwhile: idle workers of vLLM poll each other and take a core."""
    try:
        for server in servers:
            os.killpg(server.pid, signal.SIGSTOP)
        yield
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGCONT)


class Trainer:
    """The trainer and the agents of the servers."""

    def __init__(self, model: Qwen2ForCausalLM, cell: Cell, engines: list[EngineClient]) -> None:
        self._model = model
        self._cell = cell
        self._sender = WeightSender(HOST, SECONDS, cell.transport)
        self._updaters = {f"engine-{i}": WeightUpdater(engine) for i, engine in enumerate(engines)}
        self._probe = Probe(probe_tokens(VOCABULARY), [])
        self._buffers = wire_buffers(cell.transport, "cpu")
        self._plan = WirePlan.of(model.named_parameters(), BUCKET_BYTES, torch.float32)
        self._halves = WirePlan.of(model.named_parameters(), BUCKET_BYTES, torch.bfloat16)
        self._unsent = {"pack": (self._plan, BucketBuffers()), "convert": (self._halves, BucketBuffers())}

    async def update(self, version: int, figures: Figures) -> PackedWeights:
        """Update all servers and return the weights."""
        if sum(self._plan.sizes) < 1e7:
            self._probe.logprobs = await asyncio.to_thread(_logprobs, self._model, self._probe.token_ids)
        weights = PackedWeights(self._plan)
        calls = []
        for name, updater in self._updaters.items():
            place = self._sender.open(name, fresh=False, workers=self._cell.tensor)
            update = PrepareWeights(
                version, 0, version, place.group, place.address, place.port, place.world_size, self._cell.transport,
                BUCKET_BYTES, weights.parameters, self._probe if self._probe.logprobs else Probe([], []), "keep",
                SECONDS,
            )  # fmt: skip
            calls += [asyncio.to_thread(self._sender.send, name, weights), updater.run(update)]
        with figures.timed("update"):
            filling = asyncio.to_thread(weights.fill, self._model.named_parameters(), self._buffers)
            _, *done = await asyncio.gather(filling, *calls)
        assert {done[i] for i in range(0, len(done), 2)} == {ack.digest for ack in done[1::2]}
        steps = [updater.seconds for updater in self._updaters.values()]
        for name in (PAUSE, RECEIVE, RESUME, SCORE):
            figures.add(name, max(seconds.get(name, 0.0) for seconds in steps))
        figures.add("paused", max(sum(seconds[name] for name in (PAUSE, RECEIVE, RESUME)) for seconds in steps))
        return weights

    def pack_alone(self, figures: Figures) -> None:
        """Pack the weights without sending them, as they are and as bfloat16."""
        for name, (plan, buffers) in self._unsent.items():
            weights = PackedWeights(plan)
            with figures.timed(name):
                weights.fill(self._model.named_parameters(), buffers)
            weights.digest()


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
    try:
        cells = [Cell.of(text) for text in options.cells.split(",")]
    except ValueError as error:
        parser.error(f"--cells: {error}")
    if unknown := {cell.size for cell in cells} - SIZES.keys():
        parser.error(f"--cells: there is no model of {min(unknown)} MB; choose from {', '.join(map(str, SIZES))}")
    time_limit.limit("benchmarks.weight_sync", options.timeout)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    targets: dict[str, Any] = {}
    for cell in cells:
        result = asyncio.run(measure(cell, options.repeats))
        figures |= {f"{name}_{cell.name}": value for name, value in result.items()}
        if cell.name == f"{QUICKSTART}_mb":
            targets["idle_update_ms"] = target(result["update_ms"], "<=", 30)
        elif cell.size != QUICKSTART:
            targets[f"wire_of_raw_{cell.name}"] = target(result["wire_of_raw"], ">=", 0.85)
            targets[f"pause_of_limit_{cell.name}"] = target(result["pause_of_limit"], "<=", 1.3)
    report("weight_sync", figures, targets, options.keep)


if __name__ == "__main__":
    main()
