"""The whole test run, in phases that leave no core idle: python -m e2e.phases. It ends with how long each took.

    checks      style, types, layers
    two by two  all tests that need neither an API server nor a cluster, on two processes, a file at a time
    builds      what is left to wait for: Kubernetes' programs and the images are built beside what comes before
    API server  the tests on a real API server, on three processes with one each: they wait more than they compute, so
                that nothing runs beside them
    pods        the tests in a real cluster, alone

A few files with a failed test are run once more, whole and alone on the machine: a test that passes in one of its two
runs is unsteady, is named at the end, and fails nothing. Two cores that others use too make that of a test that waits
for real parts now and then.

With arguments it is pytest with these arguments, one test after the other, once everything is built.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
CHECKS = ("lint", "types", "layers")
BUILDS = ("programs", "images")
API_SERVER, PODS = "e2e/integration", "e2e/pods"
WORKERS, API_SERVERS = 2, 3
TESTS_FAILED, NOTHING_SELECTED = 1, 5  # pytest's exit codes
NICENESS = 10
LAST_LINES = 60
MOST_UNSTEADY = 3
"""Files with failed tests that are tried again: more of them are no accident."""


class Phases:
    """Runs phases one after the other and knows how long they took, and which of them were not well."""

    def __init__(self) -> None:
        self.took: list[tuple[str, float, bool]] = []
        self.unsteady: set[str] = set()  # tests that passed in one of two runs

    def run(self, name: str, work: Callable[[], bool]) -> bool:
        """Run ``work``, which says whether it went well; return what it says."""
        _say(f"==> {name}")
        began = time.monotonic()
        well = work()
        self.took.append((name, time.monotonic() - began, well))
        return well

    def summary(self) -> str:
        """Return a table of the phases."""
        lines = [f"{name:12}{_clock(seconds):>8}{'' if well else '  failed'}" for name, seconds, well in self.took]
        lines += [f"unsteady: {test}" for test in sorted(self.unsteady)]
        return "\n".join([*lines, f"{'all':12}{_clock(sum(seconds for _, seconds, _ in self.took)):>8}"])


def main(arguments: Sequence[str]) -> int:
    """Run all phases, or pytest with ``arguments``; return the exit code."""
    phases = Phases()
    with tempfile.TemporaryFile("w+") as log:
        if not phases.run("checks", lambda: _make(CHECKS)):
            return 1
        builds = _start_builds(log)
        try:
            if arguments:
                well = phases.run("builds", lambda: _wait(builds, log)) and phases.run(
                    "tests", lambda: _pytest(*arguments)
                )
            else:
                well = _all(phases, builds, log)
        finally:
            builds.terminate()
            builds.wait()
    _say(phases.summary())
    return 0 if well else 1


def _all(phases: Phases, builds: subprocess.Popen[str], log: IO[str]) -> bool:
    elsewhere = [f"--ignore={folder}" for folder in (API_SERVER, PODS)]
    well = _tests(phases, "two by two", *_spread(WORKERS, "loadfile"), *elsewhere)
    if not phases.run("builds", lambda: _wait(builds, log)):
        return False
    # Test by test, as every process has its control plane anyway.
    well &= _tests(phases, "API server", *_spread(API_SERVERS, "loadgroup"), API_SERVER)
    return _tests(phases, "pods", PODS) and well


def _tests(phases: Phases, name: str, *arguments: str) -> bool:
    """Run tests, and once more the files of those that failed where they are few."""
    failed: set[str] = set()
    if phases.run(name, lambda: _pytest(*arguments, failed=failed)):
        return True
    files = sorted({test.partition("::")[0] for test in failed})
    if not 0 < len(files) <= MOST_UNSTEADY:
        return False

    def once_more() -> bool:
        again: set[str] = set()
        well = _pytest(*files, failed=again) or bool(again and not again & failed)
        phases.unsteady |= failed ^ again
        return well

    return phases.run(f"once more: {' '.join(files)}", once_more)


def _spread(workers: int, how: str) -> list[str]:
    """Return pytest's arguments for tests that ``workers`` processes share out, what is longest first."""
    return ["-n", str(workers), "--dist", how, "--no-loadscope-reorder"]


def _make(targets: Sequence[str]) -> bool:
    return subprocess.run(["make", "--no-print-directory", *targets], cwd=ROOT).returncode == 0


def _pytest(*arguments: str, failed: set[str] | None = None) -> bool:
    """Run pytest; return whether all went well. The tests that did not are added to ``failed``, of a run to its end."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
        done = subprocess.run(command, cwd=ROOT)
        noted = Path(cache) / "v/cache/lastfailed"
        if failed is not None and done.returncode == TESTS_FAILED and noted.exists():
            failed.update(json.loads(noted.read_text()))
    return done.returncode in (0, NOTHING_SELECTED)


def _start_builds(log: IO[str]) -> subprocess.Popen[str]:
    command = ["nice", f"-n{NICENESS}", "make", "--no-print-directory", *BUILDS]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)


def _wait(builds: subprocess.Popen[str], log: IO[str]) -> bool:
    well = builds.wait() == 0
    if not well:
        log.seek(0)
        _say("".join(log.readlines()[-LAST_LINES:]))
    return well


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
