"""Checks that files beside the ledger are not newer than the ledger.

A ledger that lost its latest commits is consistent by itself. The -wal file holds the latest commits; without it the
ledger is in an older state.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.reader import LedgerReader
from rljob.protocol.run_status import decode_status

COMMITTED_STATES = ("Succeeded", "Suspended")
"""States that are reported only after the ledger has committed everything."""
MAX_STEPS_AHEAD = 1
"""In other states, status and checkpoints may be this many steps ahead: they do not wait for the commit."""
_STEP = re.compile(r"step-(\d+)")


class RunFiles(msgspec.Struct):
    """State and step in status.json, and the newest step among the checkpoint directories. Must be read before the
    ledger, since the run may continue."""

    state: str
    step: int
    checkpoint: int


def read_run_files(storage: Path) -> RunFiles:
    """Read status.json and the names of the checkpoints in ``storage``; default: state "" and step 0."""
    names = (_STEP.fullmatch(path.name) for path in (storage / "checkpoints").glob("step-*"))
    newest = max((int(match[1]) for match in names if match), default=0)
    try:
        status = decode_status((storage / "status.json").read_bytes())
    except (OSError, ValueError):  # missing or damaged: only users read it, and the next start rewrites it
        return RunFiles("", 0, newest)
    return RunFiles(status.state, status.progress.step, newest)


def examine_run_files(ledger: LedgerReader, files: RunFiles, version: int) -> Check:
    """Check that the ledger is at least as new as status.json and the checkpoints."""
    findings = Findings("the ledger is as new as the run's own status and checkpoints", examined=2)
    ahead = 0 if files.state in COMMITTED_STATES else MAX_STEPS_AHEAD
    older = f"the ledger is older: it has {version} applied batches; was its -wal file lost?"
    if files.step > version + ahead:
        findings.add(older, f"status.json has {files.state} at step {files.step}")
    if files.checkpoint > version + ahead:
        findings.add(older, f"checkpoint of step {files.checkpoint}")
    if files.state == "Succeeded" and ledger.value("SELECT 1 FROM meta WHERE key = 'finished'") is None:
        findings.add("the ledger does not record the end of the run; was its -wal file lost?", "status.json: Succeeded")
    return findings.check()
