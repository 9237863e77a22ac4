"""Each batch was applied once in the lineage of the final checkpoint, and checkpoints are what the ledger says.

The weights of version s come from the newest incarnation that applied batch s − 1, and those it began from likewise,
back to version 0. That chain is walked from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.reader import LedgerReader
from rljob.protocol.checkpoint_files import CONFIGURATION_FILE, STATE_FILE, WEIGHTS_PATTERN, damage


class CheckpointRecord(msgspec.Struct):
    """What a checkpoint says of itself (of the trainer's trainer.json)."""

    step: int
    incarnation: int


def writer(ledger: LedgerReader, step: int, incarnation: int) -> int | None:
    """Return the incarnation that made the weights of version ``step``, which ``incarnation`` held; None: there is
    none."""
    own: int | None = ledger.value(
        "SELECT MAX(incarnation) FROM applied WHERE step = ? AND incarnation <= ?", step - 1, incarnation
    )
    return own


def chain(ledger: LedgerReader, step: int, incarnation: int) -> Iterator[tuple[int, int, int]]:
    """Yield (incarnation, first, last + 1) of the batches that made version ``step``, newest first; it ends early where
    no incarnation applied a batch."""
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
    """Check who applied what."""
    findings = Findings("each batch was applied once in the lineage of the final checkpoint")
    findings.examined = ledger.value("SELECT COUNT(*) FROM applied")
    findings.take(
        "its number does not follow on the one before it, or it did not begin where an earlier one had been",
        (
            f"incarnation {row[0]}"
            for row in ledger.db.execute(
                "SELECT incarnation FROM (SELECT incarnation, step, LAG(incarnation, 1, 0) OVER (ORDER BY incarnation)"
                " AS before FROM incarnations) i WHERE incarnation != before + 1 OR step < 0 OR (step > 0 AND NOT"
                " EXISTS (SELECT 1 FROM applied a WHERE a.step = i.step - 1 AND a.incarnation < i.incarnation))"
            )
        ),
    )
    findings.take(
        "it did not apply the batches from its beginning on, one after the other",
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
            findings.add("it did not apply each batch that its weights are made of", f"incarnation {maker}")
        wanted = began
    if wanted > 0:
        findings.add("no incarnation applied the batch before it", f"version {wanted}")
    return findings.check()


def examine_checkpoints(ledger: LedgerReader, steps: int, finished: bool) -> Check:
    """Check the checkpoints that are kept: all of a run that is done, else the newest (older ones may be going)."""
    findings = Findings("checkpoints are there and are what the ledger says")
    findings.examined = ledger.value("SELECT COUNT(*) FROM checkpoints")
    kept = ledger.rows("SELECT step, path, incarnation FROM checkpoints WHERE removed = 0 ORDER BY step DESC")
    if finished and steps > 0 and (not kept or kept[0]["step"] != steps):
        findings.add("the run is done, but it is not among the kept checkpoints", f"version {steps}")
    findings.take(
        "it is newer than a checkpoint that is kept, but is said to be removed",
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
            continue  # the trainer wrote the next one and took this away; the ledger has not heard of it yet
        if isinstance(record, str):
            findings.add(record, name)
            continue
        if record != CheckpointRecord(row["step"], maker or 0):
            findings.add(
                f"its own record says step {record.step}, incarnation {record.incarnation}; the ledger says "
                f"step {row['step']}, incarnation {maker or 'unknown'}",
                name,
            )
        problems = list(damaged_weights(directory))
        if finished or directory.exists():
            for problem in problems:
                findings.add(problem, name)
    return findings.check()


def damaged_weights(directory: Path) -> Iterator[str]:
    """Yield a sentence for every weights file of a checkpoint that is cut off or none, by its header and length."""
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
    """Return whether there is a checkpoint of a later step beside ``directory``."""
    steps = (path.name.rpartition("-")[2] for path in directory.parent.glob("step-*"))
    return any(int(other) > step for other in steps if other.isdecimal())


def _record(directory: Path) -> CheckpointRecord | str:
    """Return what a checkpoint says of itself, or what is wrong with it."""
    if not directory.is_dir():
        return f"its directory {directory} does not exist"
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=CheckpointRecord)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{directory / STATE_FILE} cannot be read: {error}"
