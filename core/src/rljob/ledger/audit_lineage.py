"""Checks that each batch was applied once in the lineage of the final checkpoint, and checkpoints match the ledger.

The newest incarnation that applied batch s − 1 produced the weights of version s. It started from a checkpoint of an
earlier incarnation, and so on back to version 0. The check follows this chain from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.reader import LedgerReader
from rljob.protocol.checkpoint_files import CONFIGURATION_FILE, STATE_FILE, WEIGHTS_PATTERN, damage


class CheckpointRecord(msgspec.Struct):
    """Step and incarnation in the trainer.json of a checkpoint."""

    step: int
    incarnation: int


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
    findings.add_all(
        "its number does not follow the previous one, or no earlier incarnation reached its first step",
        (
            f"incarnation {row[0]}"
            for row in ledger.db.execute(
                "SELECT incarnation FROM (SELECT incarnation, step, LAG(incarnation, 1, 0) OVER (ORDER BY incarnation)"
                " AS before FROM incarnations) i WHERE incarnation != before + 1 OR step < 0 OR (step > 0 AND NOT"
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
    """Check the kept checkpoints: all if the run is done, else the newest, since older ones may be in removal."""
    findings = Findings("checkpoints exist and match the ledger")
    findings.examined = ledger.value("SELECT COUNT(*) FROM checkpoints")
    kept = ledger.rows("SELECT step, path, incarnation FROM checkpoints WHERE removed = 0 ORDER BY step DESC")
    if finished and steps > 0 and (not kept or kept[0]["step"] != steps):
        findings.add("the run is done, but this version has no kept checkpoint", f"version {steps}")
    findings.add_all(
        "it is marked as removed, but an older checkpoint is kept",
        (
            f"checkpoint {row[0]}"
            for row in ledger.db.execute(
                "SELECT step FROM checkpoints WHERE removed != 0 AND step > (SELECT MIN(step) FROM checkpoints"
                " WHERE removed = 0) OR removed NOT IN (0, 1)"
            )
        ),
    )
    for row in kept if finished else kept[:1]:
        name, maker = f"checkpoint {row['step']}", writer(ledger, row["step"], row["incarnation"])
        directory = ledger.storage / row["path"]
        record = _record(directory)
        if not finished and not directory.exists() and _newer(directory, row["step"]):
            continue  # the trainer replaced it; the ledger has not recorded that yet
        if isinstance(record, str):
            findings.add(record, name)
            continue
        if record != CheckpointRecord(row["step"], maker or 0):
            findings.add(
                f"its trainer.json has step {record.step}, incarnation {record.incarnation}; the ledger has "
                f"step {row['step']}, incarnation {maker or 'unknown'}",
                name,
            )
        problems = list(damaged_weights(directory))
        if finished or directory.exists():
            for problem in problems:
                findings.add(problem, name)
    return findings.check()


def damaged_weights(directory: Path) -> Iterator[str]:
    """Yield a message for every truncated or invalid weights file of a checkpoint, by its header and length."""
    if (directory / CONFIGURATION_FILE).exists() and not any(directory.glob(WEIGHTS_PATTERN)):
        yield f"{directory} has no weights ({WEIGHTS_PATTERN})"
    for path in sorted(directory.rglob(WEIGHTS_PATTERN)):
        try:
            problem = damage(path)
        except OSError as error:
            problem = f"cannot be read: {error}"
        if problem:
            yield f"{path} {problem}"


def _newer(directory: Path, step: int) -> bool:
    """Return whether a checkpoint of a later step exists beside ``directory``."""
    steps = (path.name.rpartition("-")[2] for path in directory.parent.glob("step-*"))
    return any(int(other) > step for other in steps if other.isdecimal())


def _record(directory: Path) -> CheckpointRecord | str:
    """Return the record in a checkpoint, or a message if it cannot be read."""
    if not directory.is_dir():
        return f"its directory {directory} does not exist"
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=CheckpointRecord)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{directory / STATE_FILE} cannot be read: {error}"
