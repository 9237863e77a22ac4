"""A run whose ledger is on a volume of its own: killed, resumed, audited."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from e2e.fakes.harness import make_job, run_harness
from rljob.ledger.audit import audit

STEPS = 4


async def test_a_run_with_a_separate_ledger_survives_a_killed_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, volume = tmp_path / "storage", tmp_path / "ledger"
    storage.mkdir()
    volume.mkdir()
    job = make_job(training={"steps": STEPS, "promptsPerStep": 2, "samplesPerPrompt": 2, "maxStaleness": 0})
    async with run_harness(job, storage, variables={"RLJOB_LEDGER": str(volume)}) as harness:
        trainer = harness.trainer()
        running = asyncio.create_task(trainer.run())
        async with trainer.has_applied:
            await trainer.has_applied.wait_for(lambda: len(trainer.applied) >= 2)
        harness.kill("coordinator")
        await running
        assert harness.restarts["coordinator"] >= 1
    assert (volume / "ledger.sqlite").exists() and not (storage / "ledger.sqlite").exists()
    assert list((storage / "payload").glob("*.segment"))
    monkeypatch.setenv("RLJOB_LEDGER", str(volume))
    report = audit(storage)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert report.finished and (storage / "metrics.jsonl").read_bytes().count(b'"kind":"step"') == STEPS
