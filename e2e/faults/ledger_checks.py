"""Checks that every finished run must pass, for all faults."""

from __future__ import annotations

import json

from e2e.fakes.harness import Harness
from e2e.fakes.plain import plain_batches
from e2e.fakes.trainer import read_checkpoint
from rljob.ledger.audit import audit
from rljob.runner.tokenizer import TextCodec


def check(harness: Harness) -> None:
    """Assert that a run succeeded, its ledger passes the audit, and its final weights contain each batch once.

    Raises:
        AssertionError: the message names the failed check.
    """
    status = json.loads((harness.storage / "status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("Succeeded", ""), f"{status['state']}: {status['message']}"
    report = audit(harness.storage)
    problems = [f"{check.name}: {problem}" for check in report.checks for problem in check.problems]
    assert report.ok and report.finished, "\n".join(problems) or "the audit reports the run as unfinished"

    spec = harness.job.spec
    for task in spec.tasks:
        firsts = harness.ledger(
            f"SELECT row FROM groups WHERE kind = 'train' AND task = '{task.name}' AND restarts = 0"
        )
        rows = sorted(row["row"] for row in firsts)
        assert rows == list(range(len(rows))), f"a prompt of {task.name} was lost or started twice"

    batches = [json.loads(row["samples"]) for row in harness.ledger("SELECT samples FROM batches ORDER BY step")]
    final = read_checkpoint(harness.storage / "checkpoints" / f"step-{spec.training.steps:06d}" / "weights.json")
    assert final.batches == batches, "the final weights were not made from each batch once"
    if spec.training.max_staleness == 0:
        *_, last = plain_batches(spec, TextCodec(harness.storage / "model"))
        assert final.state == last.state, "the final weights differ from those of the plain loop"
