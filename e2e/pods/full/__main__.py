"""The long list of tests in pods: python -m e2e.pods.full [--json] [PYTEST ARGUMENT ...].

All of e2e/pods, also what is too long for every change, one after the other. --json also writes what became of each
test last to benchmarks/results/e2e-full.json: a run of some of them leaves what is said there of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import time_limit
from benchmarks.report import report, target

TIMEOUT_SECONDS = 10_800.0
VARIABLE = "RLJOB_E2E_FULL"
"""Set: the folder of this program is collected."""
HERE = Path(__file__).parent
RESULTS = HERE.parents[2] / "benchmarks/results/e2e-full.json"


class Record:
    """What became of each test."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report of a phase of a test."""
        name = report.nodeid.rpartition("/")[2]
        case = self.cases.setdefault(name, {"case": name, "seconds": 0.0, "problem": ""})
        case["seconds"] = round(float(str(case["seconds"])) + report.duration, 1)
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash is not None else report.longreprtext
            case["problem"] = f"{report.outcome}: {why.strip().partition(chr(10))[0]}"


def _kept() -> list[dict[str, object]]:
    """Return what the results say so far."""
    cases: list[dict[str, object]] = json.loads(RESULTS.read_text())["figures"]["cases"] if RESULTS.exists() else []
    return cases


def main() -> None:
    """Run all of it; exit code 1 when something failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="keep the figures")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options, more = parser.parse_known_args()
    time_limit.limit("e2e.pods.full", options.timeout)
    os.environ[VARIABLE] = "1"
    record = Record()
    code = pytest.main(["-q", "-p", "no:randomly", *(more or [str(HERE.parent)])], plugins=[record])
    if code == pytest.ExitCode.INTERRUPTED:
        sys.exit(int(code))  # the results of some tests are missing
    known = {case["case"]: case for case in _kept()} if more else {}
    cases = [case for _, case in sorted((known | record.cases).items())]
    bad = sum(bool(case["problem"]) for case in cases)
    figures = {"cases": cases, "seconds": round(sum(float(str(case["seconds"])) for case in cases), 1)}
    report("e2e-full", figures, {"not_passed": target(bad, "<=", 0)}, options.json)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
