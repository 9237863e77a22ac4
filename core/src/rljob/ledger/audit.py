"""Proves from a run's ledger that nothing was lost, doubled or mixed up; the ledger is only read.

A property is a sentence (see the other modules audit_*); the rows that break it are named. The run may continue
meanwhile: the ledger is read as it was at one moment, and what was open then is counted as open.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rljob.api.models import RLJobSpec
from rljob.ledger.audit_cross_checks import Witnesses, examine_witnesses, read_witnesses
from rljob.ledger.audit_lineage import examine_checkpoints, examine_lineage
from rljob.ledger.audit_payload import examine_payload
from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.audit_results import RESULTS
from rljob.ledger.audit_rules import ACCOUNTS, PREPARATIONS
from rljob.ledger.reader import DamagedError, LedgerReader, columns
from rljob.protocol.score_messages import add_up

PROPERTIES = (*ACCOUNTS, *RESULTS)
SOUND = "the ledger is a sound database"
MOST_DAMAGES = 20
STORED = {"INTEGER": "('integer')", "REAL": "('real', 'integer')", "TEXT": "('text')"}
"""Declared type → how SQLite may hold a value of it."""
JSON_COLUMNS = (
    ("samples", "id", "metrics"),
    ("samples", "id", "turn_rewards"),
    ("applied", "step", "metrics"),
    ("batches", "step", "samples"),
    ("step_metrics", "step", "metrics"),
)
"""(table, column that names a row, column that holds JSON)."""


class Report(msgspec.Struct):
    """What an audit found."""

    ok: bool
    finished: bool  # the run is done; else what is open is no problem
    counts: dict[str, int]
    checks: list[Check]


def audit(storage: Path) -> Report:
    """Examine the run in ``storage``.

    Raises:
        NoRunError: there is no run there, or it is of another version of rljob.
    """
    witnesses = read_witnesses(storage)
    try:
        ledger = LedgerReader(storage)
    except DamagedError as error:
        return Report(False, False, {}, [Check(SOUND, False, 0, [str(error)])])
    with ledger:
        spec = ledger.job().spec
        database = examine_database(ledger)
        report = Report(False, False, {}, [database])
        try:
            _examine(ledger, spec, witnesses, report)
        except sqlite3.DatabaseError as error:
            database.fail(f"it cannot be examined further: {error}")
        except (TypeError, ValueError, OverflowError) as error:
            if database.ok:
                raise  # a defect of ours
            database.fail(f"with such values it cannot be examined further: {error}")
    report.ok = all(check.ok for check in report.checks)
    return report


def _examine(ledger: LedgerReader, spec: RLJobSpec, witnesses: Witnesses, report: Report) -> None:
    """Add to ``report`` as far as the ledger can be read."""
    parameters = prepare(ledger, spec)
    report.finished = bool(parameters["finished"])
    report.counts = count(ledger)
    report.checks += examine_properties(ledger, parameters)
    version = parameters["version"]
    report.checks.append(examine_lineage(ledger, version))
    report.checks.append(examine_checkpoints(ledger, spec.training.steps, report.finished))
    report.checks.append(examine_witnesses(ledger, witnesses, version))
    report.checks.append(examine_payload(ledger))


def prepare(ledger: LedgerReader, spec: RLJobSpec) -> dict[str, Any]:
    """Make the temporary tables that rules read; return the rules' parameters."""
    ledger.db.create_function("root", 1, lambda square: None if square is None else math.sqrt(square))
    ledger.db.create_function("add_up", 2, _add_up)
    for statement in PREPARATIONS:
        ledger.db.execute(statement)
    training, evaluation = spec.training, spec.evaluation
    version = ledger.value("SELECT COALESCE(MAX(step) + 1, 0) FROM applied WHERE typeof(step) = 'integer'")
    done = ledger.value("SELECT 1 FROM meta WHERE key = 'finished'") is not None
    evaluated: set[int] = set()
    if evaluation is not None and evaluation.engines == "shared":  # on engines of its own one may be dropped
        evaluated = {0, training.steps, *range(0, training.steps, evaluation.every_steps or training.steps + 1)}
    return {
        "version": version,
        "finished": int(done and version >= training.steps),
        "steps": training.steps,
        "groups": training.prompts_per_step,
        "members": training.samples_per_prompt,
        "admitted": training.samples_per_prompt + spec.scheduling.redundancy.members,
        "redundant": spec.scheduling.redundancy.groups,
        "alpha": training.max_staleness,
        "filter": spec.algorithm.group_filter,
        "advantage": spec.algorithm.advantage,
        "tasks": json.dumps([task.name for task in spec.tasks]),
        "evaluated": json.dumps(sorted(evaluated)),
    }


def _add_up(turn_rewards: Any, reward: Any) -> bool:
    """Return whether ``turn_rewards`` is a JSON list of numbers that add up to ``reward``."""
    try:
        return add_up(msgspec.json.decode(turn_rewards, type=list[float]), reward)
    except (TypeError, msgspec.MsgspecError):
        return False


def examine_database(ledger: LedgerReader) -> Check:
    """Check what SQLite itself can tell, and that every value is of its column's type."""
    findings = Findings(SOUND)
    try:
        for (line,) in ledger.db.execute(f"PRAGMA integrity_check({MOST_DAMAGES})"):
            if line == "ok":
                findings.examined += 1
            else:
                findings.add("it is damaged", line.replace("\n", " "))
        for table, names in _tables(ledger):
            wrong = " OR ".join(
                f"typeof({name}) NOT IN {STORED[kind]} AND NOT ({name} IS NULL AND {int(nullable)})"
                for name, (kind, nullable) in names.items()
            )
            key = next(iter(names))
            query = f"SELECT {key} FROM main.{table} WHERE {wrong}"
            findings.take("a value of it is not of its column's type", _named(ledger, query, {}, f"{table} "))
    except sqlite3.DatabaseError as error:
        findings.add("it cannot be read to its end", str(error))
    for table, key, column in JSON_COLUMNS:
        query = f"SELECT {key} FROM {table} WHERE {column} IS NOT NULL AND NOT json_valid({column})"
        findings.take(f"its {column} are no JSON", _named(ledger, query, {}, f"{table} "))
    return findings.check()


def _tables(ledger: LedgerReader) -> Iterator[tuple[str, dict[str, tuple[str, bool]]]]:
    for row in ledger.rows("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"):
        yield row[0], columns(ledger.db, row[0])


def examine_properties(ledger: LedgerReader, parameters: dict[str, Any]) -> Iterator[Check]:
    """Check what queries can tell."""
    for prop in PROPERTIES:
        findings = Findings(prop.name)
        findings.examined = ledger.value(prop.examined)
        findings.note = ledger.db.execute(prop.note, parameters).fetchone()[0] or ""
        for rule in prop.rules:
            findings.take(rule.broken, _named(ledger, rule.query, parameters, ""))
        yield findings.check()


def _named(ledger: LedgerReader, query: str, parameters: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield what a query names; a query that fails over damaged values names that."""
    try:
        for row in ledger.db.execute(query, parameters):
            yield f"{prefix}{row[0]}"
    except sqlite3.DatabaseError as error:
        yield f"what cannot be examined ({error})"


def count(ledger: LedgerReader) -> dict[str, int]:
    """Return how many rows of each kind there are, and how many samples are in which state."""
    counts = {
        name: ledger.value(f"SELECT COUNT(*) FROM {table}")
        for name, table in (
            ("training groups", "groups WHERE kind = 'train'"),
            ("evaluation groups", "groups WHERE kind = 'evaluation'"),
            ("samples", "samples"),
            ("completions", "completions"),
            ("batches", "batches"),
            ("incarnations", "incarnations"),
            ("publications", "publications"),
            ("checkpoints", "checkpoints"),
            ("evaluations", "evaluations"),
        )
    }
    states = ledger.rows("SELECT state, COUNT(*) FROM samples GROUP BY state ORDER BY state")
    counts["open"] = sum(row[1] for row in states if row[0] in ("admitted", "scored", "batched"))
    return counts | {str(row[0]): row[1] for row in islice(states, MOST_DAMAGES)}
