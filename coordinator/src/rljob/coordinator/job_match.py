"""Checks that a ledger belongs to the run of the given job.

The ledger stores the manifest with the defaults of the version that recorded it, so that a changed default in a later
version does not change a running job. Values from presets are not stored: each version of rljob expands presets itself
(`job.json`).
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
    """Check that the ledger's run belongs to ``job``, and record the job.

    Args:
        ledger: the open ledger.
        job: the manifest as the coordinator received it; presets may be unexpanded.

    Raises:
        ValueError: the run belongs to another job; the message names the first field that differs.
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
    """Yield (path, cause) of every difference between two specs that a run does not allow."""
    readable = True
    try:
        old = RLJobSpec.model_validate(old).model_dump(mode="json", by_alias=True)  # adds fields of newer versions
    except ValidationError:
        readable = False  # it has fields of another version: only common fields are compared
    for path, was, now, cause in run_changes({"spec": old}, {"spec": new}):
        if readable or (was is not None and now is not None):
            yield path, cause
