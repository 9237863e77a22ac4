"""Files beside the ledger must not be newer than it: a ledger that lost its newest part looks whole by itself.

The -wal file holds what was committed last; without it the ledger is an older one.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.reader import LedgerReader
from rljob.protocol.run_status import decode_status

DURABLE = ("Succeeded", "Suspended")
"""States that are said only once all of the run is in the ledger."""
UNDER_WAY = 1
"""Steps that status and checkpoints of a run may be ahead, as they do not wait for the ledger's commit."""
_STEP = re.compile(r"step-(\d+)")


class Witnesses(msgspec.Struct):
    """What status.json and the checkpoints' names say. Read it before the ledger of a run under way."""

    state: str
    step: int
    checkpoint: int


def read_witnesses(storage: Path) -> Witnesses:
    """Return what is beside the ledger in ``storage``; nothing said is state "" and step 0."""
    names = (_STEP.fullmatch(path.name) for path in (storage / "checkpoints").glob("step-*"))
    newest = max((int(match[1]) for match in names if match), default=0)
    try:
        status = decode_status((storage / "status.json").read_bytes())
    except (OSError, ValueError):  # it is for people, and the next start writes it again
        return Witnesses("", 0, newest)
    return Witnesses(status.state, status.progress.step, newest)


def examine_witnesses(ledger: LedgerReader, witnesses: Witnesses, version: int) -> Check:
    """Check that the ledger is as new as what is beside it."""
    findings = Findings("the ledger is as new as the run's own status and checkpoints", examined=2)
    ahead = 0 if witnesses.state in DURABLE else UNDER_WAY
    older = f"the ledger is older: it knows {version} applied batches; was its -wal file lost?"
    if witnesses.step > version + ahead:
        findings.add(older, f"status.json says {witnesses.state} at step {witnesses.step}")
    if witnesses.checkpoint > version + ahead:
        findings.add(older, f"there is a checkpoint of step {witnesses.checkpoint}")
    if witnesses.state == "Succeeded" and ledger.value("SELECT 1 FROM meta WHERE key = 'finished'") is None:
        findings.add("the ledger does not say that the run is done; was its -wal file lost?", "status.json: Succeeded")
    return findings.check()
