"""The audit reports any single change of a ledger, except the immaterial ones listed here with a reason: no training,
evaluation or checkpoint depends on them."""

from __future__ import annotations

import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ledgers import make_run

from rljob.ledger.audit import audit

Row = dict[str, Any]
DELETED = object()

TABLES = {
    "groups": ("number",),
    "samples": ("number",),
    "failures": ("number",),
    "ended": ("state",),
    "completions": ("number",),
    "batches": ("step",),
    "decisions": ("group_number",),
    "applied": ("step", "incarnation"),
    "step_metrics": ("step",),
    "incarnations": ("incarnation",),
    "publications": ("lineage", "step"),
    "served": ("engine", "lineage", "step"),
    "checkpoints": ("step",),
    "evaluations": ("version", "task"),
}
"""Table → key columns. Without ``meta``: it holds times and counters, and all checks depend on the end of the run."""

DERIVED = ("id", "group_id", "group_number", "member", "sample")
"""Columns that SQLite computes from others."""
REJECTED = ("surplus", "failed", "expired")


def rejected(row: Row, new: Any) -> bool:
    """Whether the sample was discarded and its reward was not used."""
    return row["state"] in REJECTED or (row["state"] == "filtered" and row["reward"] is None)


def always(row: Row, new: Any) -> bool:
    """Return True for every change."""
    return True


IMMATERIAL: dict[tuple[str, str], tuple[str, Callable[[Row, Any], bool]]] = {
    ("groups", "version"): (
        "neighbours, tokens and α bound the version of admission; within these bounds it is not used",
        always,
    ),
    ("samples", "reason"): ("text for users", lambda row, new: row["reason"] != "" and new != ""),
    ("failures", "number"): ("the last one gives a text for users", always),
    ("groups", "completions"): ("no sample of the group is open", always),
    ("groups", "dispatched"): ("between the versions of admission and of its first token it is not used", always),
    ("samples", "metrics"): ("metrics for users", always),
    ("samples", "state"): ("another end of a rejected sample", lambda row, new: rejected(row, new)),
    ("samples", "reward"): ("the reward of a rejected sample is not used", rejected),
    ("samples", "attempt"): ("there is no completion", lambda row, new: row["completions"] == 0),
    ("samples", "prompt_tokens"): ("nothing was generated", lambda row, new: row["completions"] == 0),
    ("samples", "finish"): ("nothing was generated", lambda row, new: row["completions"] == 0),
    ("samples", "dispatched"): ("engine version of a rejected sample", rejected),
    ("samples", "max_version"): (
        "-1 and NULL both mean no token", lambda row, new: row["completions"] == 0 and new == -1
    ),
    ("completions", "engine"): ("a name for users", always),
    ("batches", "formed"): ("a time", always),
    ("decisions", "*"): ("its group is in no batch", lambda row, new: row["accepted"] == 1 and not row["completions"]),
    ("applied", "metrics"): ("metrics for users", always),
    ("applied", "*"): (
        "it was lost with its trainer before publication, and replayed",
        lambda row, new: (row["step"], row["incarnation"]) == (2, 1),
    ),
    ("applied", "time"): ("a time", always),
    ("step_metrics", "metrics"): ("metrics for users", always),
    ("step_metrics", "*"): ("metrics for users", always),
    ("incarnations", "instance"): ("a name for users", always),
    ("incarnations", "time"): ("a time", always),
    ("publications", "incarnation"): (
        "a trainer that held the version and was current before the next publication", always
    ),
    ("publications", "time"): ("a time", always),
    ("served", "engine"): ("a name for users", always),
    ("served", "time"): ("a time", always),
    ("served", "*"): ("one acknowledgement less", always),
    ("checkpoints", "time"): ("a time", always),
    ("checkpoints", "removed"): ("an older checkpoint that is not needed", lambda row, new: row["step"] < 6),
    ("checkpoints", "*"): ("an older checkpoint that is not needed", lambda row, new: row["step"] < 6),
    ("checkpoints", "step"): ("it was removed", lambda row, new: row["removed"] == 1),
    ("checkpoints", "path"): ("it was removed", lambda row, new: row["removed"] == 1),
    ("checkpoints", "digest"): ("it was removed", lambda row, new: row["removed"] == 1),
    ("checkpoints", "incarnation"): ("it was removed", lambda row, new: row["removed"] == 1),
    ("evaluations", "time"): ("a time", always),
    ("evaluations", "failure"): ("text for users", always),
}  # fmt: skip


def values(old: Any, others: list[Any]) -> st.SearchStrategy[Any]:
    """Return candidate values for a cell: values of other rows, near and far values, other types."""
    near: list[Any] = [None, "", "x", -1, 0, 1, 10**6, 0.5, math.inf, "{}", *others]
    if isinstance(old, int | float):
        near += [old - 1, old + 1, -old, old + 0.25]
    elif isinstance(old, str):
        near += [old + "0", old[:-1], old.replace("0", "1")]
    return st.sampled_from([value for value in near if value is None or value != old])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with complete payload."""
    storage = make_run(tmp_path_factory.mktemp("kept") / "storage", deaths="trainer")
    assert audit(storage).ok
    shutil.copy(storage / "ledger.sqlite", storage / "sound.sqlite")
    return storage


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_single_change_is_found_or_immaterial(run: Path, data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(sorted(TABLES)))
    for before in run.glob("ledger.sqlite*"):
        before.unlink()
    ledger = Path(shutil.copy(run / "sound.sqlite", run / "ledger.sqlite"))
    column, row, new = change(ledger, table, data)
    if audit(run).ok:
        reason, holds = IMMATERIAL.get((table, column), ("", lambda row, new: False))
        assert reason and holds(row, new), f"not found: {table}.{column} of {row} became {new}"


def change(ledger: Path, table: str, data: st.DataObject) -> tuple[str, Row, Any]:
    """Delete a row or change a cell; return the column (``*``: deleted), the original row, and the new value."""
    db = sqlite3.connect(ledger, isolation_level=None)
    db.row_factory = sqlite3.Row
    try:
        completions = {
            "samples": "(SELECT COUNT(*) FROM completions c WHERE c.sample_number = t.number)",
            "decisions": "(SELECT COUNT(*) FROM samples s WHERE s.group_number = t.group_number AND s.step >= 0)",
        }.get(table, "0")
        rows = [dict(row) for row in db.execute(f"SELECT t.*, {completions} AS completions FROM {table} t")]
        row = data.draw(st.sampled_from(rows))
        key = " AND ".join(f"{name} = ?" for name in TABLES[table])
        where = [row[name] for name in TABLES[table]]
        column = data.draw(st.sampled_from(["*", *(name for name in row if name not in ("completions", *DERIVED))]))
        if column == "*":
            db.execute(f"DELETE FROM {table} WHERE {key}", where)
            return column, row, DELETED
        new = data.draw(values(row[column], sorted({other[column] for other in rows} - {None})[:20]))
        try:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key}", [new, *where])
        except sqlite3.IntegrityError:
            assume(False)  # a constraint of the database rejects it
        stored = db.execute(f"SELECT COUNT(*) FROM {table} WHERE {key} AND {column} IS ?", [*where, row[column]])
        assume(stored.fetchone()[0] == 0)  # the conversion to the column type restored the old value
        return column, row, new
    finally:
        db.close()
