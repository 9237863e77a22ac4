"""What the benchmark of a restart writes into a ledger is what the coordinator would have written."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from benchmarks import coordinator_restart
from benchmarks.coordinator import manifest
from benchmarks.coordinator_restart import RESTART, STALENESS, fill
from rljob.coordinator.recovery import recover
from rljob.coordinator.run import Run
from rljob.ledger.queries import MixtureRecord, mixture
from rljob.ledger.states import Kind
from rljob.ledger.writer import LedgerWriter


async def test_a_coordinator_recovers_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, steps = 5, 3
    load = dataclasses.replace(RESTART, prompts=prompts, samples=steps * prompts * 8)
    monkeypatch.setattr(coordinator_restart, "RESTART", load)
    first = LedgerWriter(tmp_path)  # as the first start leaves it
    committing = asyncio.create_task(first.run())
    first.admit_group("g0", Kind.TRAIN, 0, "sums", 0, 0, ["g0.0"], 0)
    first.record_mixture({"sums": MixtureRecord(1, expected=1.0)})
    await first.drain()
    committing.cancel()
    first.close()
    assert fill(tmp_path) == (STALENESS + 1) * prompts * 8
    ledger = LedgerWriter(tmp_path)
    started = ledger.query("SELECT MAX(row) + 1 FROM groups")[0][0]
    assert mixture(ledger) == {"sums": MixtureRecord(started, expected=float(started - steps * prompts))}
    run = Run(manifest(load).spec, ledger)
    recover(run)
    assert (run.version, len(run.scheduler.groups)) == (steps, (STALENESS + 1) * prompts)
    ledger.close()
