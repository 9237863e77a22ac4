"""Checks that a ledger holds the run of the job it is opened for.

The ledger keeps the manifest of the run's first start, with the defaults of that day filled in, so that a later default
changes no running job. What presets fill in is not kept: each version of rljob expands them itself (`job.json`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rljob.api.immutable import run_changes
from rljob.api.models import RLJob, RLJobSpec
from rljob.ledger.queries import recorded_job
from rljob.ledger.writer import LedgerWriter


def check_same_job(ledger: LedgerWriter, job: RLJob) -> None:
    """Check that the ledger's run is that of ``job``, and record the job.

    Args:
        ledger: open.
        job: as it was given to the coordinator, presets not expanded where the giver has not.

    Raises:
        ValueError: it is another job's; names the first field that differs.
    """
    new = job.spec.model_dump(mode="json", by_alias=True)
    known = recorded_job(ledger)
    if known is not None:
        for path, cause in _changes(known["spec"], new):
            raise ValueError(
                f"{path}: the ledger in {ledger.directory} holds the run of RLJob {known['name']}, which was {cause}; "
                "give it that value, or give this job storage of its own"
            )
    ledger.record_job(job.metadata.name, new)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and cause of every difference between two specs that makes them two runs."""
    readable = True
    try:
        old = RLJobSpec.model_validate(old).model_dump(mode="json", by_alias=True)  # with fields of newer versions
    except ValidationError:
        readable = False  # it has fields of another version: what both have is compared
    for path, was, now, cause in run_changes({"spec": old}, {"spec": new}):
        if readable or (was is not None and now is not None):
            yield path, cause
