"""Checks on a run's ledger that no sample was lost, duplicated or misattributed. Read only.

The modules audit_* define the properties; the audit reports the rows that violate a property. The run may continue
during the audit: all queries read one snapshot of the ledger, and samples that are open in it count as open.
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

from rljob.api.algorithm_presets import model_pools, needs_greedy, stabilizers
from rljob.api.models import RLJobSpec
from rljob.ledger.audit_cross_checks import RunFiles, examine_run_files, read_run_files
from rljob.ledger.audit_decisions import DECISIONS
from rljob.ledger.audit_lineage import examine_checkpoints, examine_lineage
from rljob.ledger.audit_payload import examine_payload, examine_texts
from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.audit_results import RESULTS
from rljob.ledger.audit_rules import ACCOUNTS, ENDS, PREPARATIONS
from rljob.ledger.evaluation_results import pass_rates_agree
from rljob.ledger.reader import DamagedError, LedgerReader, columns
from rljob.ledger.sample_numbers import find_number
from rljob.protocol.score_messages import add_up

PROPERTIES = (*ACCOUNTS, *RESULTS, *DECISIONS)
DATABASE = "the ledger is a sound database"
MAX_LINES = 20
STORAGE_CLASSES = {"INTEGER": "('integer')", "REAL": "('real', 'integer')", "TEXT": "('text')"}
"""Declared type → SQLite storage classes that a value may have."""
NAMES = {"groups": "id", "samples": "id", "completions": "sample"}
"""Table → column that names its rows; default: the first one."""
OTHER_METRICS = (
    "SELECT id FROM samples WHERE json_valid(metrics) AND (json_type(metrics) != 'object'"
    " OR EXISTS (SELECT 1 FROM json_each(metrics) WHERE type NOT IN ('integer', 'real')))"
)
JSON_COLUMNS = (
    ("samples", "id", "metrics"),
    ("samples", "id", "completions"),
    ("samples", "id", "turn_rewards"),
    ("samples", "id", "turn_states"),
    ("samples", "id", "sequences"),
    ("applied", "step", "metrics"),
    ("batches", "step", "samples"),
    ("decisions", "group_number", "survivors"),
    ("step_metrics", "step", "metrics"),
    ("evaluations", "version", "pass_at"),
)
"""(table, key column, column that holds JSON)."""


class Report(msgspec.Struct):
    """Result of an audit."""

    ok: bool
    finished: bool  # the run is done; open samples are a problem only then
    counts: dict[str, int]
    checks: list[Check]


def audit(storage: Path) -> Report:
    """Audit the run in ``storage``.

    Raises:
        NoRunError: the directory has no run, or a run of another version of rljob.
    """
    files = read_run_files(storage)
    try:
        ledger = LedgerReader(storage)
    except DamagedError as error:
        return Report(False, False, {}, [Check(DATABASE, False, 0, [str(error)])])
    with ledger:
        spec = ledger.job().spec
        database = examine_database(ledger)
        report = Report(False, False, {}, [database])
        try:
            _examine(ledger, spec, files, report)
        except sqlite3.DatabaseError as error:
            database.fail(f"the remaining checks cannot run: {error}")
        except (TypeError, ValueError, OverflowError) as error:
            if database.ok:
                raise  # the values are valid, so this is a defect of the audit
            database.fail(f"the remaining checks cannot run on such values: {error}")
    report.ok = all(check.ok for check in report.checks)
    return report


def _examine(ledger: LedgerReader, spec: RLJobSpec, files: RunFiles, report: Report) -> None:
    """Add all other checks to ``report``. Raises at the first value that cannot be read."""
    parameters = prepare(ledger, spec)
    report.finished = bool(parameters["finished"])
    report.counts = count(ledger)
    report.checks += examine_properties(ledger, parameters)
    version = parameters["version"]
    report.checks.append(examine_lineage(ledger, version))
    report.checks.append(examine_checkpoints(ledger, spec.training.steps, report.finished))
    report.checks.append(examine_run_files(ledger, files, version))
    report.checks.append(examine_payload(ledger))
    report.checks.append(examine_texts(ledger))


def prepare(ledger: LedgerReader, spec: RLJobSpec) -> dict[str, Any]:
    """Create the temporary tables that the rules read; return the parameters of the rules."""
    ledger.db.create_function("root", 1, lambda square: None if square is None else math.sqrt(square))
    ledger.db.create_function("add_up", 2, _add_up)
    ledger.db.create_function("find_number", 1, lambda name: find_number(str(name)))
    ledger.db.create_function("pass_rates_agree", 4, pass_rates_agree)
    ledger.prepare_accounts()
    greedy = int(needs_greedy(spec.algorithm))
    for statement in PREPARATIONS:
        ledger.db.execute(statement, {"greedy": greedy} if statement is ENDS else {})
    training, evaluation = spec.training, spec.evaluation
    version = ledger.value("SELECT COALESCE(MAX(step) + 1, 0) FROM applied WHERE typeof(step) = 'integer'")
    done = ledger.value("SELECT 1 FROM meta WHERE key = 'finished'") is not None
    evaluated: set[int] = set()
    if evaluation is not None and evaluation.engines == "shared":  # dedicated engines may drop an evaluation
        evaluated = {0, training.steps, *range(0, training.steps, evaluation.every_steps or training.steps + 1)}
    return {
        "version": version,
        "finished": int(done and version >= training.steps),
        "steps": training.steps,
        "groups": training.prompts_per_step,
        "members": training.samples_per_prompt,
        "admitted": training.samples_per_prompt + spec.scheduling.redundancy.members + greedy,
        "greedy": greedy,
        "redundant": spec.scheduling.redundancy.groups,
        "alpha": training.max_staleness,
        "filters": json.dumps({task.name: task.group_filter.model_dump(by_alias=True) for task in spec.tasks}),
        "advantage": " with ".join([str(spec.algorithm.advantage), *stabilizers(spec.algorithm)]),
        "tasks": json.dumps([task.name for task in spec.tasks]),
        "roles": json.dumps({task.name: _roles(spec, task.name) for task in spec.tasks}),
        "evaluated": json.dumps(sorted(evaluated)),
        "answers": evaluation.samples_per_problem if evaluation is not None else 0,
        "pass_reward": evaluation.pass_reward if evaluation is not None else 0.0,
        "pass_at": json.dumps(evaluation.pass_at if evaluation is not None else []),
    }


def _roles(spec: RLJobSpec, task: str) -> str:
    """Return the JSON list of the roles of the models of frozen pools whose log-probabilities samples of a task have,
    as SQLite writes it."""
    return json.dumps(sorted(model_pools(spec.algorithm, task)), separators=(",", ":"))


def _add_up(turn_rewards: Any, reward: Any) -> bool:
    """Return whether ``turn_rewards`` is a JSON list of numbers that add up to ``reward``."""
    try:
        return add_up(msgspec.json.decode(turn_rewards, type=list[float]), reward)
    except (TypeError, msgspec.MsgspecError):
        return False


def examine_database(ledger: LedgerReader) -> Check:
    """Run SQLite's integrity check, and check the type of every value and the JSON columns."""
    findings = Findings(DATABASE)
    try:
        for (line,) in ledger.db.execute(f"PRAGMA integrity_check({MAX_LINES})"):
            if line == "ok":
                findings.examined += 1
            else:
                findings.add("the database is damaged", line.replace("\n", " "))
        for table, names in _tables(ledger):
            wrong = " OR ".join(
                f"typeof({name}) NOT IN {STORAGE_CLASSES[kind]} AND NOT ({name} IS NULL AND {int(nullable)})"
                for name, (kind, nullable) in names.items()
            )
            key = next(iter(names))
            query = f"SELECT {NAMES.get(table, key)} FROM main.{table} WHERE {wrong}"
            findings.add_all("a value does not have the type of its column", _keys(ledger, query, {}, f"{table} "))
    except sqlite3.DatabaseError as error:
        findings.add("the database cannot be read completely", str(error))
    for table, key, column in JSON_COLUMNS:
        query = f"SELECT {key} FROM {table} WHERE {column} IS NOT NULL AND NOT json_valid({column})"
        findings.add_all(f"its {column} are not valid JSON", _keys(ledger, query, {}, f"{table} "))
    findings.add_all("its metrics are not numbers", _keys(ledger, OTHER_METRICS, {}, "samples "))
    return findings.check()


def _tables(ledger: LedgerReader) -> Iterator[tuple[str, dict[str, tuple[str, bool]]]]:
    for row in ledger.rows("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"):
        yield row[0], columns(ledger.db, row[0])


def examine_properties(ledger: LedgerReader, parameters: dict[str, Any]) -> Iterator[Check]:
    """Run the rules of every property."""
    for prop in PROPERTIES:
        findings = Findings(prop.name)
        findings.examined = ledger.value(prop.examined)
        findings.note = ledger.db.execute(prop.note, parameters).fetchone()[0] or ""
        for rule in prop.rules:
            findings.add_all(rule.problem, _keys(ledger, rule.query, parameters, ""))
        yield findings.check()


def _keys(ledger: LedgerReader, query: str, parameters: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield the first column of a query's rows; if the query fails on damaged values, yield the error."""
    try:
        for row in ledger.db.execute(query, parameters):
            yield f"{prefix}{row[0]}"
    except sqlite3.DatabaseError as error:
        yield f"rows that could not be checked ({error})"


def count(ledger: LedgerReader) -> dict[str, int]:
    """Return the number of rows of each kind, and of samples in each state."""
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
    return counts | {str(row[0]): row[1] for row in islice(states, MAX_LINES)}
