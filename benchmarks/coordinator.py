"""What a sample costs the coordinator: its real process with ledger and payload on disk, driven over real sockets.

python -m benchmarks.coordinator [--json] [--only CELL,...]

The peers (benchmarks/coordinator_peers.py: 64 agents, a runner, a trainer) are another process. Only CPU time of the
coordinator is compared, because rates depend on the machine; ``rate_of_floor`` is the floor's CPU per sample over the
coordinator's, both saturated and in the same call (benchmarks/floor_coordinator.py). At 500 samples a second most of
the CPU time is that of fsync, which depends on the machine, so there ``rate_of_floor_500_per_second`` is the figure to
compare. ``wal_bytes_per_sample`` does not include payload and texts, which are written once, to files of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import time_limit
from benchmarks.coordinator_peers import Load, encoded
from benchmarks.coordinator_restart import RESTART, measure_restart
from benchmarks.process_counters import memory_bytes
from benchmarks.report import names_of, report, target
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.ledger.segments import HEADER
from rljob.ledger.store import LEDGER
from rljob.protocol.free_port import free_port

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = 8
TOKEN = "none"
TIMEOUT_SECONDS = 1200.0
WAL_SEQUENCE = slice(12, 16)
"""Of the header of a WAL: how often it has begun again."""
TURNS = 25
TURN_TOKENS = {"2k": (40, 38), "32k": (500, 806)}
"""Context of the last of 25 turns → tokens of a completion and of an observation."""
CELLS: Mapping[str, Load] = {  # ``warm`` is more than what is in flight, two batches, whose turns began before
    "saturated": Load(),
    "saturated_without_shards": Load(ranks=0),
    "500_per_second": Load(rate=500.0, samples=5120, warm=1536),
    "lag": Load(rate=500.0, samples=5120, warm=1536, ask=True),
    **{
        f"turns_{name}": Load(
            prompts=8, agents=16, ranks=0, samples=1024, warm=256, tokens=tokens, turns=TURNS, observation=observed
        )
        for name, (tokens, observed) in TURN_TOKENS.items()
    },
    "held": Load(  # all trajectories are in their last turns when the first ones end
        prompts=2500, staleness=0, agents=16, ranks=0, samples=64, warm=1, tokens=500, turns=TURNS, observation=806
    ),
    "shards_256": Load(prompts=1024, staleness=0, agents=16, ranks=256, samples=24_576, warm=1024),
    "restart": RESTART,
}


@dataclass
class Measured:
    """One cell."""

    cpu_us_per_sample: float = 0.0
    wal_per_sample: float = 0.0  # bytes; nan: the WAL began again
    text_per_sample: float = 0.0  # bytes
    payload_per_token: float = 0.0  # bytes
    resident_gib: float = 0.0
    shard_seconds: float = 0.0
    shard_samples: int = 0
    answers_ms: list[float] = field(default_factory=list)


def manifest(load: Load) -> RLJob:
    """Return the job: more steps than the peers need, so that it does not end before them."""
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {
            "steps": load.samples // (load.prompts * MEMBERS) + 8,
            "promptsPerStep": load.prompts,
            "samplesPerPrompt": MEMBERS,
            "maxStaleness": load.staleness,
        },
        "tasks": [
            {
                "name": "sums",
                "data": {"reasoningGym": {"dataset": "chain_sum"}},
                "reward": "sums",
                "sampling": {"maxTokens": 512},
            }
        ],
        "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main", "maxConcurrency": 256, "maxModelLength": 1 << 16}],
        "checkpoints": {"everySteps": 1_000_000, "keep": 1},
    }
    return resolve(RLJob.model_validate({"metadata": {"name": "load"}, "spec": spec}))


def coordinator(load: Load, directory: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the coordinator of rljob."""
    (directory / "job.json").write_text(manifest(load).model_dump_json(by_alias=True))
    roles = ("agent", "runner", "trainer", "reward", "owner")
    (directory / "tokens.json").write_text(json.dumps(dict.fromkeys(roles, TOKEN)))
    environment = {
        "RLJOB_JOB": str(directory / "job.json"),
        "RLJOB_STORAGE": str(directory / "run"),
        "RLJOB_COORDINATOR": f"http://127.0.0.1:{port}",
        "RLJOB_TOKENS": str(directory / "tokens.json"),
        "RLJOB_LISTEN": f"127.0.0.1:{port}",
        "RLJOB_NAME": "main",
        "RLJOB_LOG_LEVEL": "ERROR",
    }
    return subprocess.Popen([sys.executable, "-m", "rljob.coordinator.main"], env=os.environ | environment, cwd=ROOT)


def program(module: str) -> list[str]:
    """Return the command of a part of this benchmark."""
    return [sys.executable, "-c", f"from benchmarks.{module} import main; main()"]


def floor(_: Load, directory: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the floor."""
    (directory / "run").mkdir()
    return subprocess.Popen([*program("floor_coordinator"), str(port), str(directory / "run")], cwd=ROOT)


@asynccontextmanager
async def events(port: int, load: Load, pid: int) -> AsyncIterator[asyncio.StreamReader]:
    """Run the peers; yield their standard output."""
    arguments = [f"http://127.0.0.1:{port}", encoded(load), "--token", TOKEN, "--pid", str(pid)]
    command = [*program("coordinator_peers"), *arguments]
    peers = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    assert peers.stdout is not None
    try:
        yield peers.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            peers.kill()
        await peers.wait()


async def measure(start: Any, load: Load) -> Measured:
    """Return what a coordinator that ``start`` starts costs under a load."""
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        process = start(load, Path(name), port)
        try:
            return await _measure(process.pid, Path(name), port, load)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


async def _measure(pid: int, directory: Path, port: int, load: Load) -> Measured:
    found = Measured()
    began: dict[str, Any] = {}
    wal = 0.0
    pulling: dict[str, Any] = {}
    answering: asyncio.Task[None] | None = None
    async with events(port, load, pid) as output:
        while line := await output.readline():
            event = json.loads(line)
            match event["event"]:
                case "begin":
                    began, wal = event, wal_bytes(directory)
                    answering = asyncio.create_task(ask(port, found.answers_ms)) if load.ask else None
                case "shards begin":
                    pulling = event
                case "shards end":
                    found.shard_seconds += event["cpu_seconds"] - pulling["cpu_seconds"]
                    found.shard_samples += event["samples"]
                case "end":
                    break
        else:
            raise RuntimeError("the peers ended before the load was processed; see their messages")
    if answering is not None:
        answering.cancel()
    found.cpu_us_per_sample = (event["cpu_seconds"] - began["cpu_seconds"]) / (load.samples - load.warm) * 1e6
    found.payload_per_token, found.text_per_sample = payload_and_text_bytes(directory)
    found.wal_per_sample = (wal_bytes(directory) - wal) / (load.samples - load.warm)
    found.resident_gib = memory_bytes(pid) / 2**30
    return found


def wal_bytes(directory: Path) -> float:
    """Return what was written to the WAL of the ledger. It is the length of the file before SQLite first begins it
    again; nan if that has happened."""
    path = directory / "run" / f"{LEDGER}-wal"
    with path.open("rb") as file:
        begun_again = int.from_bytes(file.read(WAL_SEQUENCE.stop)[WAL_SEQUENCE], "big")
    return math.nan if begun_again else path.stat().st_size


def payload_and_text_bytes(directory: Path) -> tuple[float, float]:
    """Return the payload's bytes per token of the samples (prompt, model and observations), and the mean size of the
    record of a text; zeros for the floor."""
    with contextlib.closing(sqlite3.connect(directory / "run" / LEDGER)) as ledger:
        try:
            count, size = ledger.execute("SELECT COUNT(*), SUM(length) FROM completions").fetchone()
            lengths = "SELECT MAX(total_tokens) AS tokens FROM completions GROUP BY sample_number"
            (tokens,) = ledger.execute(f"SELECT SUM(tokens) FROM ({lengths})").fetchone()
            (text,) = ledger.execute("SELECT AVG(text_length) FROM scores").fetchone()
        except sqlite3.OperationalError:
            return 0.0, 0.0
    return (size + count * HEADER.size) / tokens, text + HEADER.size


async def ask(port: int, milliseconds: list[float]) -> None:
    """Ask for /healthz every 10 ms until cancelled: an answer takes at least as long as the event loop is busy."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began = loop.time()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
        milliseconds.append((loop.time() - began) * 1e3)
        await asyncio.sleep(0.01)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    return sorted(values)[int(share * (len(values) - 1))]


async def run(cells: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return figures and targets of the cells."""
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}

    def add(name: str, value: float, bound: float, comparison: str = "<=") -> None:
        figures[name] = round(value, 3)
        targets[name] = target(figures[name], comparison, bound)

    for cell in cells:
        if cell == "restart":
            with tempfile.TemporaryDirectory() as name:
                seconds = measure_restart(coordinator, Path(name), free_port())
            add("restart_s", seconds[0], 5)
            figures |= {"restart_cpu_s": round(seconds[1], 2), "restart_in_flight": seconds[2]}
            figures["restart_ledger_mb"] = round(seconds[3] / 1e6)
            continue
        load = CELLS[cell]
        found = await measure(coordinator, load)
        figures[f"resident_gib_{cell}"] = round(found.resident_gib, 3)
        if cell == "held":
            add("resident_gib", found.resident_gib, 4)
        elif cell == "saturated":
            if math.isnan(found.wal_per_sample):
                raise RuntimeError("the WAL began again during the measurement; measure fewer samples")
            add("cpu_us_per_sample", found.cpu_us_per_sample, 110)
            add("wal_bytes_per_sample", found.wal_per_sample, 1500)
            figures["text_bytes_per_sample"] = round(found.text_per_sample, 1)
            add("payload_bytes_per_token", found.payload_per_token, 9)
        elif cell == "saturated_without_shards":
            least = await measure(floor, replace(load, samples=2 * load.samples))
            figures["cpu_us_per_sample_without_shards"] = round(found.cpu_us_per_sample, 1)
            figures["cpu_us_per_sample_of_floor"] = round(least.cpu_us_per_sample, 1)
            add("rate_of_floor", least.cpu_us_per_sample / found.cpu_us_per_sample, 0.5, ">=")
        elif cell == "500_per_second":
            add("cpu_us_per_sample_500_per_second", found.cpu_us_per_sample, 220)
            least = await measure(floor, load)
            figures["cpu_us_per_sample_of_floor_500_per_second"] = round(least.cpu_us_per_sample, 1)
            add("rate_of_floor_500_per_second", least.cpu_us_per_sample / found.cpu_us_per_sample, 0.5, ">=")
        elif cell == "lag":
            figures["loop_lag_p50_ms"] = round(percentile(found.answers_ms, 0.5), 3)
            add("loop_lag_p99_ms", percentile(found.answers_ms, 0.99), 20)
        elif cell == "shards_256":
            add("shard_us_per_sample_256_ranks", found.shard_seconds / found.shard_samples * 1e6, 30)
        else:
            context = cell.removeprefix("turns_")
            add(f"cpu_us_per_turn_{context}", found.cpu_us_per_sample / TURNS, 120)
            add(f"payload_bytes_per_token_{context}", found.payload_per_token, 9)
    return figures, targets


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/coordinator.json")
    parser.add_argument("--only", type=names_of(CELLS), default=list(CELLS), help="cells, comma-separated")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.coordinator", options.timeout)
    figures, targets = asyncio.run(run(options.only))
    report("coordinator", figures, targets, options.json)


if __name__ == "__main__":
    main()
