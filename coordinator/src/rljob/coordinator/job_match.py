"""Checks that a ledger holds the run of the job it is opened for.

The ledger keeps the manifest of the run's first start, with the defaults of that day filled in, so that a later default
changes no running job. What presets fill in is not kept: each version of rljob expands them itself (`job.json`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rljob.api.diff import differences, format_value
from rljob.api.immutable import MUTABLE
from rljob.api.models import RLJob, RLJobSpec
from rljob.ledger.queries import recorded_job
from rljob.ledger.writer import LedgerWriter

STEPS = "spec.training.steps"


def check_same_job(ledger: LedgerWriter, job: RLJob) -> None:
    """Check that the ledger's run is that of ``job``, and record the job.

    Args:
        job: as it was given to the coordinator, presets not expanded where the giver has not.

    Raises:
        ValueError: it is another job's; names the first field that differs.
    """
    new = job.spec.model_dump(mode="json", by_alias=True)
    known = recorded_job(ledger)
    if known is not None:
        for path, was, now in _changes(known["spec"], new):
            owner = f"the ledger in {ledger.directory} holds the run of RLJob {known['name']}"
            if path == STEPS:
                raise ValueError(f"{path}: {owner} with {was}, which may grow but not become {now}")
            raise ValueError(
                f"{path}: {owner}, which was started with {format_value(was)}, not {format_value(now)}; "
                "give it that value, or give this job storage of its own"
            )
    ledger.record_job(job.metadata.name, new)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of what differs and may not."""
    readable = True
    try:
        old = RLJobSpec.model_validate(old).model_dump(mode="json", by_alias=True)  # with fields of newer versions
    except ValidationError:
        readable = False  # it has fields of another version: what both have is compared
    for path, was, now in differences(old, new, "spec"):
        if path == STEPS:
            if now >= was:
                continue
        elif _mutable(path) or (not readable and (was is None or now is None)):
            continue
        yield path, was, now


def _mutable(path: str) -> bool:
    field = re.sub(r"\[\d+\]", "[]", path)
    return any(field == mutable or field.startswith((f"{mutable}.", f"{mutable}[")) for mutable in MUTABLE)
