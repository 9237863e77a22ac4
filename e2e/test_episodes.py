"""A job whose model acts in an environment: complete batches, also with faults and when the runner is killed."""

from __future__ import annotations

import asyncio
import os
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
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.episode_messages import MAX_REQUEST_BYTES
from rljob.protocol.http_server import HttpServer
from rljob.runner import environment_client, service_replicas

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


class Pod:
    """The service of a job's environment inside this process; ``table`` has its sessions."""

    def __init__(self, job: RLJob, host: str = "127.0.0.1", port: int = 0) -> None:
        entry = job.spec.environments[0]
        self.table = SessionTable(FaultyCounter, Calls(entry.name, entry.timeout_seconds), 64, 60.0)
        limits = HttpLimits(body_bytes=MAX_REQUEST_BYTES, connections=1024)
        app = build_session_app(self.table)
        self.server = HttpServer(app, limits, host=host, port=port, log_config=None, signals=False)

    async def start(self) -> int:
        """Serve; return the port."""
        self.serving = asyncio.create_task(self.server.serve())
        await self.server.listening.wait()
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """End the service and all its sessions."""
        self.server.should_exit = True
        await self.serving


@asynccontextmanager
async def served(job: RLJob) -> AsyncIterator[tuple[str, SessionTable]]:
    """Serve the job's environment inside this process; yield its address and its sessions."""
    pod = Pod(job)
    port = await pod.start()
    try:
        yield f"http://127.0.0.1:{port}", pod.table
    finally:
        await pod.stop()


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


@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.environ.get("RLJOB_THOROUGH"), reason="seconds; test_environment_replicas has its parts")
async def test_a_pod_that_is_gone_costs_the_groups_of_its_episodes_and_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counting_job()
    pods = {"127.0.0.1": Pod(job)}
    port = await pods["127.0.0.1"].start()
    pods["127.0.0.2"] = Pod(job, "127.0.0.2", port)
    await pods["127.0.0.2"].start()

    async def listed(url: object) -> list[str]:
        return list(pods)

    monkeypatch.setattr(environment_client, "addresses_of", listed)
    monkeypatch.setattr(service_replicas, "REFRESH_SECONDS", 0.02)
    urls = {"counter": f"http://counter:{port}"}
    async with run_harness(job, tmp_path, seconds_per_token=0.005, environment_urls=urls) as harness:
        trainer = harness.trainer()
        running = asyncio.create_task(trainer.run())
        await applied(trainer, 0)
        async with asyncio.timeout(60):
            while len(pods["127.0.0.1"].table) < 4:
                await asyncio.sleep(0.001)
        await pods.pop("127.0.0.1").stop()
        await running
        failed = harness.ledger("SELECT reason FROM samples WHERE state = 'failed'")
    await pods["127.0.0.2"].stop()
    report = audit(tmp_path)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]
    lost = [row for row in failed if "the replica at 127.0.0.1 that held the session is gone" in row["reason"]]
    assert 1 <= len(lost) <= 16
    ends = ("that held the session is gone", "was closed during step", "there is no session", "broke the connection")
    known = (*FAULTS.values(), *ends)
    assert all(any(cause in row["reason"] for cause in known) for row in failed), failed
    samples = [
        sample for one in trainer.applied for sample in msgspec.msgpack.decode(one.shard, type=list[SampleTokens])
    ]
    assert len(samples) == STEPS * 16 and all(len(sample.segments) == 6 for sample in samples)
