"""A ledger that keeps given checkpoints and nothing else, for tests of their readers."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from rljob.ledger.store import LEDGER, SCHEMA, SCHEMA_VERSION


def keep_checkpoints(storage: Path, digests: Mapping[int, str]) -> None:
    """Record checkpoints (step → digest of the record) in the ledger of a run, which is created if necessary."""
    with closing(sqlite3.connect(storage / LEDGER)) as db, db:
        db.executescript(f"{SCHEMA}; PRAGMA user_version = {SCHEMA_VERSION}")
        db.executemany(
            "INSERT OR REPLACE INTO checkpoints (step, path, incarnation, time, digest)"
            " VALUES (?, printf('checkpoints/step-%06d', ?), 1, 0, ?)",
            [(step, step, digest) for step, digest in digests.items()],
        )
