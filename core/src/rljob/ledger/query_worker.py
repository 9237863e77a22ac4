"""Long queries on the ledger of a run, in a separate process: `python -m rljob.ledger.query_worker`.

    audit STORAGE          the Report of an audit, as JSON
    show STORAGE SAMPLE    the SampleDetail of a sample, as JSON

The coordinator starts it for HTTP requests (:mod:`rljob.coordinator.ledger_api`), so that they do not delay its event
loop. Exit code 2 and a message on stderr: the run or sample does not exist.
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
OOM_SCORE_ADJ = "1000"
"""Out of memory, the kernel kills this process and not the coordinator, which is in the same container."""


def main(arguments: list[str]) -> int:
    """Run a query and write its result to stdout; return the exit code."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # not Linux, or not permitted
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
    query, storage = arguments[0], Path(arguments[1])
    try:
        sys.stdout.buffer.write(_run_query(query, storage, arguments[2:]))
    except NoRunError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _run_query(query: str, storage: Path, names: list[str]) -> bytes:
    if query == "audit":
        return msgspec.json.encode(audit(storage))
    with LedgerReader(storage) as ledger:
        return msgspec.json.encode(show(ledger, names[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
