"""Checks that the ledger is where the job says, before a coordinator opens it: a ledger is never moved.

A ledger beside the payload of another run, or an empty ledger beside a payload, would lose the run without an error.
"""

from __future__ import annotations

from pathlib import Path

from rljob.ledger.reader import LedgerReader, NoRunError
from rljob.ledger.store import LEDGER, PAYLOAD, ledger_directory

FIELD = "spec.storage.ledger"


def check_placement(storage: Path) -> None:
    """Check the directories of ledger and payload.

    Raises:
        ValueError: the ledger of the run is in the other place, or one of the two is missing.
    """
    directory = ledger_directory(storage)
    own, ledger, payload = directory != storage, directory / LEDGER, storage / PAYLOAD
    remedy = "or give this job a name and storage of its own"
    if own and (storage / LEDGER).exists():
        raise ValueError(
            f"{FIELD}: the run in {storage} has its ledger there, and a ledger is not moved to another volume; "
            f"create the job without {FIELD}, {remedy}"
        )
    if payload.exists() and not ledger.exists():
        field = f"restore the claim of {FIELD}" if own else f"create the job with {FIELD} as before"
        raise ValueError(f"{FIELD}: {storage} holds a run whose ledger is not in {directory}; {field}, {remedy}")
    if not payload.exists() and _holds_run(storage):
        raise ValueError(
            f"{FIELD}: {directory} holds the ledger of a run whose samples are not in {storage}; "
            f"use the storage of that run, {remedy}"
        )


def _holds_run(storage: Path) -> bool:
    """Return whether the ledger has a job. A coordinator that was killed at its first start leaves one without."""
    if not (ledger_directory(storage) / LEDGER).exists():
        return False
    try:
        with LedgerReader(storage) as ledger:
            return ledger.value("SELECT 1 FROM meta WHERE key = 'job'") is not None
    except NoRunError:  # empty; a damaged one is reported when it is opened
        return False
