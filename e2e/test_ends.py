"""The end of a run: everything is written before the status reports the end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import msgspec
import pytest

from e2e.fakes.harness import Harness, make_job, run_harness
from rljob.protocol.run_status import decode_status

STEPS = 3


async def succeeded(harness: Harness) -> None:
    """Poll the coordinator's status until Succeeded; no log line marks this moment."""
    async with aiohttp.ClientSession() as session:
        state = ""
        while state != "Succeeded":
            with contextlib.suppress(aiohttp.ClientConnectionError):  # it is starting
                async with session.get(f"{harness.coordinator_url}/v1/status") as response:
                    state = decode_status(await response.read()).state
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("end", ["killed at once", "exited"])
async def test_the_metrics_of_the_last_evaluation_are_written_before_the_run_succeeds(tmp_path: Path, end: str) -> None:
    training = {"steps": STEPS, "promptsPerStep": 2, "samplesPerPrompt": 2, "maxStaleness": 0}
    job = make_job(training=training, evaluation={"problems": 4})
    async with run_harness(job, tmp_path) as harness:
        training_ = asyncio.create_task(harness.trainer().run())
        await succeeded(harness)
        if end == "killed at once":
            harness.kill("coordinator")
        await training_
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert {line["version"] for line in lines if line["kind"] == "evaluation"} == {0, STEPS}
    if end == "exited":
        assert harness.codes["coordinator"] == 0
        assert (tmp_path / "ledger.sqlite").exists() and not (tmp_path / "ledger.sqlite-wal").exists()
        assert decode_status((tmp_path / "status.json").read_bytes()).state == "Succeeded"
