"""Long queries of a run's ledger, in a process of its own: `python -m rljob.ledger.query_worker`.

    audit STORAGE          the Report of an audit, as JSON
    show STORAGE SAMPLE    the SampleDetail of a sample, as JSON

The coordinator starts it for readers (:mod:`rljob.coordinator.ledger_api`), so that their questions cost its event loop
nothing. Exit code 2 and a sentence on stderr: there is no such run or sample.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from rljob.ledger.audit import audit
from rljob.ledger.reader import LedgerReader, NoRunError
from rljob.ledger.sample_detail import show

NICE = 10
FIRST_TO_GO = "1000"
"""Of processes that run out of memory, in the kernel's words: not the coordinator, which is in the same container."""


def main(arguments: list[str]) -> int:
    """Write the result of a query to stdout; return the exit code."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # no Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    what, storage = arguments[0], Path(arguments[1])
    try:
        sys.stdout.buffer.write(_found(what, storage, arguments[2:]))
    except NoRunError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _found(what: str, storage: Path, names: list[str]) -> bytes:
    if what == "audit":
        return msgspec.json.encode(audit(storage))
    with LedgerReader(storage) as ledger:
        return msgspec.json.encode(show(ledger, names[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
