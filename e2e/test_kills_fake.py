"""Every part is killed with SIGKILL in the middle of a run, several times: the run loses time and nothing else.

The parts are processes; engine, trainer and reward are fakes (e2e/fakes), the coordinator and the runner are real.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from e2e.fakes.plain import plain_batches
from e2e.fakes.stage import Stage, make_job
from e2e.fakes.trainer import read_checkpoint
from rljob.api.models import RLJob
from rljob.runner.text import TextCodec

STEPS, GROUPS, MEMBERS = 9, 4, 4
ENDS = {"trained", "filtered", "surplus", "expired", "failed"}
MOMENTS = [  # a part is killed when this one logs that
    ("trainer", "applying batch 2."),
    ("agent", "took version 4."),
    ("trainer", "applied batch 5."),
    ("reward", "scoring"),
]


@pytest.mark.parametrize("part", ["coordinator", "runner", "agent", "trainer", "reward"])
@pytest.mark.timeout(120)
async def test_a_run_survives_kill_9_at_staleness_0_and_1(tmp_path: Path, part: str) -> None:
    await asyncio.gather(*(survive(part, alpha, tmp_path / f"staleness-{alpha}") for alpha in (0, 1)))


async def survive(part: str, alpha: int, storage: Path) -> None:
    """Run a job, kill ``part`` at every moment, and check what is left at the end."""
    training = {"steps": STEPS, "promptsPerStep": GROUPS, "samplesPerPrompt": MEMBERS, "maxStaleness": alpha}
    job = make_job(training=training)
    stage = Stage(job, storage)
    try:
        for other in ("coordinator", "reward", "runner"):
            await stage.start(other)
        await stage.start("agent", "--seconds-per-token", "0.002")
        await stage.start("trainer", "--seconds-per-step", "0.02")
        for where, words in MOMENTS:
            await stage.until(where, words)
            stage.kill(part)
        await stage.ended("trainer")
    finally:
        await stage.close()
    assert stage.restarts[part] >= 3
    check_run(job, storage)


def check_run(job: RLJob, storage: Path) -> None:
    """Assert what must hold of every finished run, by its ledger and its last checkpoint."""
    status = json.loads((storage / "status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("Succeeded", "")
    ledger = sqlite3.connect(storage / "ledger.sqlite")
    ledger.row_factory = sqlite3.Row
    samples = ledger.execute("SELECT s.*, g.task, g.row FROM samples s JOIN groups g ON g.id = s.group_id").fetchall()
    batches = [json.loads(row["samples"]) for row in ledger.execute("SELECT samples FROM batches ORDER BY step")]
    ledger.close()

    members = Counter(sample["group_id"] for sample in samples)
    assert set(members.values()) == {MEMBERS}, "a group was admitted in part"
    assert {sample["state"] for sample in samples} <= ENDS, "a sample came to no end"
    for task in job.spec.tasks:
        rows = sorted(sample["row"] for sample in samples if sample["task"] == task.name and sample["member"] == 0)
        assert rows == list(range(len(rows))), "a prompt was skipped or started twice"

    in_batches = Counter(name for batch in batches for name in batch)
    assert len(batches) == STEPS and set(in_batches.values()) == {1}, "a sample is in two batches"
    assert in_batches.keys() == {sample["id"] for sample in samples if sample["state"] == "trained"}

    final = read_checkpoint(storage / "checkpoints" / f"step-{STEPS}" / "weights.json")
    assert final.batches == batches, "the final weights were not made from each batch once"
    if job.spec.training.max_staleness == 0:
        *_, last = plain_batches(job.spec, TextCodec(storage / "model"))
        assert final.state == last.state, "kills changed what was learned"
