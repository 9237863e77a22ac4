"""A run that is stopped and resumed gives the same result, bit for bit, as an uninterrupted run."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from e2e.fakes.fork_server import rljob_command
from e2e.fakes.harness import ROOT, TOKENS, Harness, make_job, run_harness
from e2e.fakes.model import write_model
from e2e.fakes.trainer import FakeTrainer
from rljob.api.explain import to_data
from rljob.api.models import RLJob
from rljob.api.yaml_loader import write_yaml
from rljob.protocol.run_status import decode_status

STEPS = 6


def synchronous_job(**changes: Any) -> RLJob:
    """Return a job at α = 0 whose checkpoints fall between the steps it is stopped at."""
    training = {"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 0}
    return make_job(training=training, checkpoints={"everySteps": 4, "keep": 2}, **changes)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The last checkpoint of the uninterrupted run."""
    directory = tmp_path_factory.mktemp("unbroken")

    async def run() -> None:
        async with run_harness(synchronous_job(), directory) as harness:
            await harness.trainer().run()

    asyncio.run(run())
    return checkpoint(directory)


def checkpoint(directory: Path) -> bytes:
    return (directory / f"checkpoints/step-{STEPS:06d}/weights.json").read_bytes()


async def suspend(harness: Harness) -> None:
    """Request suspension until the run is suspended or has succeeded."""
    headers = {"Authorization": f"Bearer {TOKENS['owner']}"}
    state = ""
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as session:
        while state not in ("Suspended", "Succeeded"):
            async with session.post(f"{harness.coordinator_url}/v1/suspend") as response:
                state = decode_status(await response.read()).state
            await asyncio.sleep(0.01)  # nothing is logged in this process


async def run_until(harness: Harness, trainer: FakeTrainer, step: int, end: str, line: str = "is incarnation") -> None:
    """Run until ``trainer`` has applied ``step`` batches, or for step 0 until the coordinator has logged ``line``; then
    suspend or kill the run, according to ``end``."""
    running = asyncio.create_task(trainer.run())
    if step == 0:
        await harness.until("coordinator", line)
    async with trainer.has_applied:
        await trainer.has_applied.wait_for(lambda: len(trainer.applied) >= step)
    if end == "suspended":
        await suspend(harness)
        await running
    else:
        harness.kill("coordinator")
        running.cancel()  # closing the harness stops the other components at any point
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("end", ["suspended", "killed"])
@pytest.mark.parametrize("step", range(STEPS))
async def test_a_run_stopped_at_any_step_gives_the_checkpoint_of_the_run_never_stopped(
    tmp_path: Path, unbroken: bytes, step: int, end: str
) -> None:
    async with run_harness(synchronous_job(), tmp_path) as harness:
        await run_until(harness, harness.trainer(), step, end)
    async with run_harness(synchronous_job(), tmp_path) as harness:
        second = harness.trainer()
        await second.run()
    assert checkpoint(tmp_path) == unbroken
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS)), "no line was lost or repeated by the stop"
    if end == "suspended":
        assert all(one.train.step >= step for one in second.applied), "a suspended run must not repeat batches"


async def test_a_run_stopped_repeatedly_also_in_evaluations_gives_the_same_checkpoint(
    tmp_path: Path, unbroken: bytes
) -> None:
    job = synchronous_job(evaluation={"everySteps": 2, "problems": 16})
    for end in ("suspended", "killed", "suspended", "killed"):
        async with run_harness(job, tmp_path) as harness:
            await run_until(harness, harness.trainer(), 1 if end == "suspended" else 0, end, line="evaluating version")
    async with run_harness(job, tmp_path) as harness:
        await harness.trainer().run()
    assert checkpoint(tmp_path) == unbroken


def run_locally(manifest: dict[str, Any], root: Path) -> None:
    """Run a manifest with `rljob run` in ``root``/run, with fakes of the engine and the trainer."""
    (root / "job.yaml").write_text(write_yaml(manifest))
    program = [ROOT / "e2e/fakes/rljob_run.py", "run", "job.yaml", "--run-dir", "run", "--no-screen"]
    with contextlib.chdir(root):
        process = rljob_command(program, {"PYTHONPATH": str(ROOT)})
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err + out


@pytest.mark.timeout(240)
def test_a_resumed_local_run_uses_the_new_values_of_fields_that_may_change(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    spec = to_data(synchronous_job(models=[{"name": "policy", "source": "model"}]))["spec"]
    spec["training"] |= {"steps": 2, "promptsPerStep": 1, "samplesPerPrompt": 2}
    for task in spec["tasks"]:
        task["groupFilter"] = {"kind": "none"}
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": spec}
    run_locally(manifest, tmp_path)
    run = tmp_path / "run"
    assert {path.name for path in run.glob("checkpoints/step-*")} == {"step-000002"}
    written = {path: path.read_bytes() for path in run.glob("tensorboard/*")}
    assert written and not (run / "logs/rollout-main-1.log").exists()

    spec["training"]["steps"] = 4
    spec["checkpoints"] = {"everySteps": 1, "keep": 9}
    spec["tracking"] = {"tensorboard": False}
    spec["rollouts"][0]["replicas"] = {"min": 2}
    spec["runner"]["replicas"] = {"min": 2}
    spec["storage"]["size"] = "1Gi"  # has no effect here, so that it may change too
    run_locally(manifest, tmp_path)
    steps = {path.name for path in run.glob("checkpoints/step-*")}
    assert steps == {"step-000002", "step-000003", "step-000004"}
    assert {path: path.read_bytes() for path in run.glob("tensorboard/*")} == written
    assert (run / "logs/rollout-main-1.log").exists() and (run / "logs/runner-1.log").exists()
    lines = [msgspec.json.decode(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == list(range(4))
