"""All tests in pods: python -m e2e.pods.full [--json] [--timeout SECONDS] [PYTEST ARGUMENT ...].

Runs all of e2e/pods sequentially, including the tests that are too long for every change. --json also writes the last
result of each test to benchmarks/results/e2e-full.json: a run of a selection keeps the results of the other tests. A
run that is interrupted writes no results.
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
"""Environment variable: when set, pytest collects the folder of this program."""
HERE = Path(__file__).parent
RESULTS = HERE.parents[2] / "benchmarks/results/e2e-full.json"


class ResultRecorder:
    """A pytest plugin that collects the result of each test."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the report of one phase of a test."""
        name = report.nodeid.rpartition("/")[2]
        case = self.cases.setdefault(name, {"case": name, "seconds": 0.0, "problem": ""})
        case["seconds"] = round(float(str(case["seconds"])) + report.duration, 1)
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash is not None else report.longreprtext
            case["problem"] = f"{report.outcome}: {why.strip().partition(chr(10))[0]}"


def _saved_cases() -> list[dict[str, object]]:
    """Return the cases in the results file."""
    cases: list[dict[str, object]] = json.loads(RESULTS.read_text())["figures"]["cases"] if RESULTS.exists() else []
    return cases


def main() -> None:
    """Run the tests; exit with the code of pytest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/e2e-full.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options, more = parser.parse_known_args()
    time_limit.limit("e2e.pods.full", options.timeout)
    os.environ[VARIABLE] = "1"
    recorder = ResultRecorder()
    code = pytest.main(["-q", "-p", "no:randomly", *(more or [str(HERE.parent)])], plugins=[recorder])
    if code == pytest.ExitCode.INTERRUPTED:
        sys.exit(int(code))  # the results of some tests are missing
    known = {case["case"]: case for case in _saved_cases()} if more else {}
    cases = [case for _, case in sorted((known | recorder.cases).items())]
    bad = sum(bool(case["problem"]) for case in cases)
    figures = {"cases": cases, "seconds": round(sum(float(str(case["seconds"])) for case in cases), 1)}
    report("e2e-full", figures, {"not_passed": target(bad, "<=", 0)}, options.json)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
