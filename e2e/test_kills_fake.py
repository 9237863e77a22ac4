"""Every part is killed with SIGKILL in the middle of a run, several times: the run loses time and nothing else.

The parts are processes; engine, trainer and reward are fakes (e2e/fakes), the coordinator and the runner are real.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.fakes.plain import plain_batches
from e2e.fakes.stage import Stage, make_job
from e2e.fakes.trainer import read_checkpoint
from rljob.api.models import RLJob
from rljob.runner.text import TextCodec

STEPS, GROUPS, MEMBERS = 9, 4, 4
ENDS = {"trained", "filtered", "surplus", "expired", "failed"}
PARTS = ["coordinator", "runner", "agent", "trainer", "reward"]

Moment = tuple[str, str]
"""(part, words): when that part logs these words."""

MOMENTS: list[Moment] = [
    ("trainer", "applying batch 2."),
    ("agent", "took version 4."),
    ("trainer", "applied batch 5."),
    ("reward", "scoring"),
]


def training(alpha: int) -> dict[str, int]:
    return {"steps": STEPS, "promptsPerStep": GROUPS, "samplesPerPrompt": MEMBERS, "maxStaleness": alpha}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.timeout(120)
async def test_a_run_survives_kill_9_at_staleness_0_and_1(tmp_path: Path, part: str) -> None:
    jobs = {alpha: make_job(training=training(alpha)) for alpha in (0, 1)}
    kills = [(moment, part) for moment in MOMENTS]
    await asyncio.gather(*(survive(job, tmp_path / f"staleness-{alpha}", kills) for alpha, job in jobs.items()))


@pytest.mark.parametrize("on_deadline", ["wait", "regenerate"])
@pytest.mark.timeout(120)
async def test_redundant_work_and_evaluations_survive_kill_9_of_all_parts(tmp_path: Path, on_deadline: str) -> None:
    job = make_job(
        training=training(2),
        scheduling={"redundancy": {"groups": 2, "members": 1}, "onDeadline": on_deadline},
        evaluation={"everySteps": 3, "problems": 20},
        weightSync={"inFlight": "abort"},
    )
    moments = [("agent", "took version 0."), *MOMENTS]
    await survive(job, tmp_path, list(zip(moments, PARTS, strict=True)))


async def survive(job: RLJob, storage: Path, kills: Sequence[tuple[Moment, str]]) -> None:
    """Run a job, kill a part at every moment, and check what is left at the end."""
    stage = Stage(job, storage)
    try:
        for part in ("coordinator", "reward", "runner"):
            await stage.start(part)
        await stage.start("agent", "--seconds-per-token", "0.002")
        await stage.start("trainer", "--seconds-per-step", "0.02")
        for (where, words), part in kills:
            await stage.until(where, words)
            stage.kill(part)
        await stage.ended("trainer")
    finally:
        await stage.close()
    assert all(stage.restarts[part] >= 1 for _, part in kills)
    check_run(stage)


def check_run(stage: Stage) -> None:
    """Assert what must hold of every finished run, by its ledger and its last checkpoint."""
    status = json.loads((stage.storage / "status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("Succeeded", "")
    spec = stage.job.spec
    rows = stage.ledger("SELECT s.*, g.task, g.row, g.kind FROM samples s JOIN groups g ON g.id = s.group_id")
    samples = [row for row in rows if row["kind"] == "train"]

    members = Counter(sample["group_id"] for sample in samples)
    assert set(members.values()) == {MEMBERS + spec.scheduling.redundancy.members}, "a group was admitted in part"
    assert {sample["state"] for sample in samples} <= ENDS, "a sample came to no end"
    assert {row["state"] for row in rows if row["kind"] == "evaluation"} <= {"evaluated"}
    for task in spec.tasks:
        firsts = [sample for sample in samples if sample["task"] == task.name and sample["member"] == 0]
        prompts = [sample["row"] for sample in firsts if sample["state"] != "expired"]  # those are started afresh
        assert sorted(prompts) == list(range(len(prompts))), "a prompt was lost or started twice"

    batches = [json.loads(row["samples"]) for row in stage.ledger("SELECT samples FROM batches ORDER BY step")]
    in_batches = Counter(name for batch in batches for name in batch)
    assert len(batches) == STEPS and set(in_batches.values()) == {1}, "a sample is in two batches"
    assert in_batches.keys() == {sample["id"] for sample in samples if sample["state"] == "trained"}

    final = read_checkpoint(stage.storage / "checkpoints" / f"step-{STEPS}" / "weights.json")
    assert final.batches == batches, "the final weights were not made from each batch once"
    if spec.training.max_staleness == 0:
        *_, last = plain_batches(spec, TextCodec(stage.storage / "model"))
        assert final.state == last.state, "kills changed what was learned"
