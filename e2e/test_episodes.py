"""A job whose model acts in an environment: complete batches, also with faults and when the runner is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from e2e.fakes.episodes import FAULTS, FaultyCounter
from e2e.fakes.harness import make_job, run_harness
from e2e.fakes.trainer import FakeTrainer
from rljob.api.models import RLJob
from rljob.environments.episode import Calls
from rljob.environments.session_server import build_session_app
from rljob.environments.session_table import SessionTable
from rljob.ledger.audit import audit
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.episode_messages import MAX_REQUEST_BYTES
from rljob.protocol.http_server import HttpServer
from rljob.protocol.messages import SampleTokens

STEPS = 3
TURN = ("observation", "model")


def counting_job() -> RLJob:
    """Return a job with one task, whose environment gives its rewards."""
    task = {
        "name": "count",
        "data": {"seeds": {}},
        "loop": "environment",
        "environment": {"name": "counter", "maxTurns": 5, "observation": " -> {observation};"},
        "prompt": "{observation};",
        "sampling": {"maxTokens": 8},
    }
    return make_job(
        training={"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 0},
        tasks=[task],
        rewards=[],
        environments=[{"name": "counter", "function": "e2e.fakes.episodes:FaultyCounter", "timeoutSeconds": 0.2}],
    )


@asynccontextmanager
async def served(job: RLJob) -> AsyncIterator[tuple[str, SessionTable]]:
    """Serve the job's environment inside this process; yield its address and its sessions."""
    entry = job.spec.environments[0]
    table = SessionTable(FaultyCounter, Calls(entry.name, entry.timeout_seconds), 64, 60.0)
    limits = HttpLimits(body_bytes=MAX_REQUEST_BYTES, connections=1024)
    server = HttpServer(build_session_app(table), limits, host="127.0.0.1", port=0, log_config=None, signals=False)
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", table
    finally:
        server.should_exit = True
        await serving


async def applied(trainer: FakeTrainer, step: int) -> None:
    """Wait until the trainer has applied batch ``step``."""
    async with trainer.has_applied:
        await trainer.has_applied.wait_for(lambda: len(trainer.applied) > step)


@pytest.mark.timeout(300)
async def test_faults_and_a_killed_runner_cost_no_more_than_their_samples(tmp_path: Path) -> None:
    job = counting_job()
    batches = []
    for kills in (0, 1):
        storage = tmp_path / str(kills)
        storage.mkdir()
        async with served(job) as (url, table):
            urls = {"counter": url}
            async with run_harness(
                job, storage, seconds_per_token=0.001, runner_process=bool(kills), environment_urls=urls
            ) as harness:
                trainer = harness.trainer()
                running = asyncio.create_task(trainer.run())
                if kills:
                    await applied(trainer, 0)
                    harness.kill("runner")
                await running
            failed = harness.ledger("SELECT reason FROM samples WHERE state = 'failed'")
        report = audit(storage)
        assert report.ok and report.finished, [check for check in report.checks if not check.ok]
        assert len(table) == 0
        causes = Counter(next(cause for cause in FAULTS.values() if cause in row["reason"]) for row in failed)
        assert causes, "no sample failed"
        batches.append([one.shard for one in trainer.applied])
    assert batches[0] == batches[1], "a killed runner changed a batch"
    samples = [sample for shard in batches[0] for sample in msgspec.msgpack.decode(shard, type=list[SampleTokens])]
    assert len(samples) == STEPS * 16
    assert {tuple(segment.kind for segment in sample.segments) for sample in samples} == {
        ("prompt", "model", *TURN, *TURN)
    }
    for sample in samples:
        written = [segment for segment in sample.segments if segment.kind == "model"]
        assert sum(span.end - span.start for span in sample.spans) == sum(each.end - each.start for each in written)
        assert {each.reward for each in written} <= {0.0, 1.0}
