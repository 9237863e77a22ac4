"""What holds of the ledger of every job, whatever it suffered."""

from __future__ import annotations

from e2e.pods.job import Job


def check_prompts(job: Job) -> None:
    """No prompt was skipped, none failed, none was thrown away, and no sample is in two batches."""
    rows = [row["row"] for row in job.ledger("SELECT DISTINCT row FROM groups WHERE kind = 'train' ORDER BY row")]
    assert rows == list(range(len(rows))), "a prompt was skipped"
    lost = job.ledger("SELECT id, state, reason FROM samples WHERE state IN ('failed', 'expired')")
    assert lost == []
    twice = job.ledger(
        "SELECT value, COUNT(*) AS n FROM batches, json_each(batches.samples) GROUP BY value HAVING n > 1"
    )
    assert twice == []
