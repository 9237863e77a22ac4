"""Checks that each batch was applied once in the lineage of the final checkpoint, and that checkpoints are as written.

The newest incarnation that applied batch s − 1 produced the weights of version s. It started from a checkpoint of an
earlier incarnation, and so on back to version 0. The check follows this chain from the newest checkpoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.reader import LedgerReader
from rljob.protocol.checkpoint_files import STATE_FILE, checkpoint_directories
from rljob.protocol.checkpoint_record import OTHER_RECORD, find_damage, find_unrecorded, read_state_file


def writer(ledger: LedgerReader, step: int, incarnation: int) -> int | None:
    """Return the incarnation that produced version ``step`` of the weights of ``incarnation``; None if none did."""
    found: int | None = ledger.value(
        "SELECT MAX(incarnation) FROM applied WHERE step = ? AND incarnation <= ?", step - 1, incarnation
    )
    return found


def chain(ledger: LedgerReader, step: int, incarnation: int) -> Iterator[tuple[int, int, int]]:
    """Yield (incarnation, first, last + 1) of the batches that led to version ``step``, newest first. Stops early if no
    incarnation applied a batch."""
    while step > 0:
        maker = writer(ledger, step, incarnation)
        if maker is None:
            return
        began = ledger.value("SELECT step FROM incarnations WHERE incarnation = ?", maker)
        if began is None or not 0 <= began < step:
            return
        yield maker, began, step
        step, incarnation = began, maker - 1


def examine_lineage(ledger: LedgerReader, version: int) -> Check:
    """Check the incarnations and the batches that they applied."""
    findings = Findings("each batch was applied once in the lineage of the final checkpoint")
    findings.examined = ledger.value("SELECT COUNT(*) FROM applied")
    # A process whose checkpoint was refused is an incarnation, too: it applies nothing, so its first step is of no run.
    findings.add_all(
        "its number does not follow the previous one, or no earlier incarnation reached its first step",
        (
            f"incarnation {row[0]}"
            for row in ledger.db.execute(
                "SELECT incarnation FROM (SELECT incarnation, step, LAG(incarnation, 1, 0) OVER (ORDER BY incarnation)"
                " AS before FROM incarnations) i WHERE incarnation != before + 1 OR step < 0 OR (step > 0 AND"
                " EXISTS (SELECT 1 FROM applied o WHERE o.incarnation = i.incarnation) AND NOT"
                " EXISTS (SELECT 1 FROM applied a WHERE a.step = i.step - 1 AND a.incarnation < i.incarnation))"
            )
        ),
    )
    findings.add_all(
        "it did not apply consecutive batches from its first step",
        (
            f"incarnation {row[0]}"
            for row in ledger.db.execute(
                "SELECT a.incarnation FROM applied a JOIN incarnations i ON i.incarnation = a.incarnation"
                " GROUP BY a.incarnation HAVING MIN(a.step) != MIN(i.step) OR MAX(a.step) - MIN(a.step) + 1 != COUNT(*)"
            )
        ),
    )
    newest = ledger.rows("SELECT step, incarnation FROM checkpoints ORDER BY step DESC LIMIT 1")
    step, incarnation = newest[0] if newest else (version, ledger.value("SELECT MAX(incarnation) FROM incarnations"))
    wanted = step
    for maker, began, end in chain(ledger, step, incarnation or 0):
        applied = ledger.value(
            "SELECT COUNT(*) FROM applied WHERE incarnation = ? AND step >= ? AND step < ?", maker, began, end
        )
        if applied != end - began:
            findings.add("it did not apply every batch that its weights depend on", f"incarnation {maker}")
        wanted = began
    if wanted > 0:
        findings.add("no incarnation applied the previous batch", f"version {wanted}")
    return findings.check()


def examine_checkpoints(ledger: LedgerReader, steps: int, finished: bool) -> Check:
    """Check the kept checkpoints: they match the ledger, and every file has the digest that it was written with.

    All files are read; :mod:`rljob.protocol.checkpoint_record` says what that costs. In a run that is not done, a
    checkpoint that is gone while a newer one exists may have been replaced by the trainer; then it is not a problem.
    """
    findings = Findings("checkpoints exist and match the ledger")
    findings.examined = ledger.value("SELECT COUNT(*) FROM checkpoints")
    kept = ledger.rows("SELECT step, path, incarnation, digest FROM checkpoints WHERE removed = 0 ORDER BY step DESC")
    if finished and steps > 0 and (not kept or kept[0]["step"] != steps):
        findings.add("the run is done, but this version has no kept checkpoint", f"version {steps}")
    findings.add_all(
        "it is marked as removed, but an older checkpoint is kept",
        (
            f"checkpoint {row[0]}"
            for row in ledger.db.execute(
                "SELECT step FROM checkpoints WHERE removed = 1 AND step > (SELECT MIN(step) FROM checkpoints"
                " WHERE removed = 0) OR removed NOT IN (0, 1, 2)"
            )
        ),
    )
    for row in kept:
        directory = ledger.storage / row["path"]
        problem = _problem(row, directory, writer(ledger, row["step"], row["incarnation"]) or 0)
        if problem and (finished or directory.exists() or not _newer(directory, row["step"])):
            findings.add(problem, f"checkpoint {row['step']}")
    return findings.check()


def _problem(row: sqlite3.Row, directory: Path, incarnation: int) -> str:
    """Return the first problem of a kept checkpoint, or an empty string; ``incarnation``: by the ledger, 0: unknown."""
    if not directory.is_dir():
        return f"its directory {directory} does not exist"
    try:
        state = read_state_file(directory)
    except ValueError as error:
        return str(error)
    if (state.step, state.incarnation) != (row["step"], incarnation):
        return (
            f"its {STATE_FILE} has step {state.step}, incarnation {state.incarnation}; the ledger has "
            f"step {row['step']}, incarnation {incarnation or 'unknown'}"
        )
    if state.digest != row["digest"]:
        return f"its {OTHER_RECORD}"
    damage = find_damage(directory, state.files) or find_unrecorded(directory, state.files)
    return f"{directory}/{damage}" if damage else ""


def _newer(directory: Path, step: int) -> bool:
    """Return whether a checkpoint of a later step exists beside ``directory``."""
    return max(checkpoint_directories(directory.parent), default=0) > step
