"""Runs cases of the matrix, many in one run, several runs at once: python -m e2e.faults.run_cases DIRECTORY [NAME...].

A case passes when the run applies another batch after it. A run passes when it succeeds and its ledger is correct (see
ledger_checks); otherwise all its cases fail. Prints JSON: name of the case → problem, empty if it passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.fakes.fork_server import ForkServer
from e2e.fakes.harness import IMPORTS, make_job
from e2e.faults.cases import Case, all_cases
from e2e.faults.disk import BALLAST, small_disk
from e2e.faults.environment import FaultEnvironment
from e2e.faults.ledger_checks import check
from rljob.api.models import RLJob

log = logging.getLogger(__name__)

CASES_PER_RUN = 24
STEPS_PER_CASE = 2
"""Most cases need one; those for which none is left are tried in the next run."""
RUNS_AT_ONCE = 6
CASE_TIMEOUT_SECONDS = 120.0
"""For one case, from arming the fault to the next applied batch."""
DISK_BYTES = 24 << 20
ENDING_PHASES = ("suspend", "shutdown")
"""Phases in which the trainer ends before the fault, or because of it."""
OUT_OF_STEPS = "the run ended before the fault was injected"

JOB_KINDS: list[dict[str, Any]] = [
    {"alpha": 0},
    {
        "alpha": 1,
        "scheduling": {"redundancy": {"groups": 1, "members": 1}, "onDeadline": "regenerate"},
        "weightSync": {"inFlight": "abort", "timeoutSeconds": 0.5},
    },
    {
        "alpha": 0,
        "evaluation": {"everySteps": 4, "problems": 4},
        "weightSync": {"inFlight": "abort", "timeoutSeconds": 0.5},
    },
    {"alpha": 2, "scheduling": {"redundancy": {"groups": 2, "members": 0}, "onDeadline": "wait"}},
]
"""Kinds of jobs; the runs use them in turn."""


def job_of(kind: dict[str, Any], steps: int) -> RLJob:
    """Return a small job."""
    changes = {"weightSync": {"timeoutSeconds": 0.5}, **kind}
    alpha = changes.pop("alpha")
    training = {"steps": steps, "promptsPerStep": 2, "samplesPerPrompt": 3, "maxStaleness": alpha}
    return make_job(training=training, checkpoints={"everySteps": 2, "keep": 2}, **changes)


class CaseRunner:
    """Runs cases and collects their outcomes.

    Args:
        cases: in the order in which they are tried.
        directory: runs get directories in it.
        fork_server: starts the components.
    """

    def __init__(self, cases: Sequence[Case], directory: Path, fork_server: ForkServer) -> None:
        self.outcomes: dict[str, str] = {}
        self._directory = directory
        self._fork_server = fork_server
        self._slots = asyncio.Semaphore(RUNS_AT_ONCE)
        self._runs = 0
        ends = [case for case in cases if case.phase == "shutdown"]
        others = [case for case in cases if case.phase != "shutdown"]
        self._case_batches = [batch for some in (others, ends) for batch in _case_batches(some)]

    async def run(self) -> None:
        """Try all cases."""
        async with asyncio.TaskGroup() as tasks:
            for batch in self._case_batches:
                tasks.create_task(self._run_all(batch))

    async def _run_all(self, cases: list[Case]) -> None:
        """Try all of ``cases``: a run without progress is stopped, and another run tries the remaining cases."""
        while cases:
            async with self._slots:
                tried = await self._one_run(cases)
            cases = cases[tried:]

    async def _one_run(self, cases: list[Case]) -> int:
        """Try cases in one run until it ends or makes no progress; return the number of tried cases."""
        number, self._runs = self._runs, self._runs + 1
        storage = self._directory / f"run-{number}"
        storage.mkdir(parents=True)
        shutdown = cases[0].phase == "shutdown"
        steps = 2 if shutdown else STEPS_PER_CASE * len(cases) + 4
        tried = 0
        began = time.monotonic()
        with small_disk(storage, DISK_BYTES) if cases[0].fault == "full" else contextlib.nullcontext():
            job = job_of(JOB_KINDS[number % len(JOB_KINDS)], steps)
            environment = FaultEnvironment(job, storage, self._fork_server)
            try:
                async with environment:
                    for case in cases:
                        tried += 1
                        if shutdown and tried > 1:
                            await environment.resume(job_of(JOB_KINDS[number % len(JOB_KINDS)], steps + tried - 1))
                        problem = await _try(environment, case)
                        if problem is None and tried > 1:  # no step is left for it: the next run tries it
                            tried -= 1
                            break
                        self.outcomes[case.name] = OUT_OF_STEPS if problem is None else problem
                        if problem:
                            break
                    else:
                        await _finish(environment)
                if not self.outcomes[cases[tried - 1].name]:
                    check(environment)
            except Exception as error:  # noqa: BLE001 (every error is the outcome of these cases)
                for case in cases[:tried]:
                    self.outcomes[case.name] = f"the run in {storage} ({tried} cases): {error!r}"
            if any(self.outcomes[case.name] for case in cases[:tried]):
                shutil.copytree(storage, f"{storage}-failed", ignore=shutil.ignore_patterns(BALLAST))
        log.info(
            "run %d: %d cases in %.1f s, restarts %s", number, tried, time.monotonic() - began, environment.restarts
        )
        return tried


async def _try(environment: FaultEnvironment, case: Case) -> str | None:
    """Inject the fault of one case and wait for progress of the run.

    Returns:
        The problem, or an empty string; None: the run applied its last batch before the fault.
    """
    log.debug("%s", case.name)
    injecting = asyncio.create_task(environment.inject_at(case.moment, lambda: case.inject(environment)))
    try:
        async with asyncio.timeout(CASE_TIMEOUT_SECONDS):
            if case.phase == "start":
                environment.kill_9(case.moment.component)  # the restarted component registers
            if case.phase == "suspend":
                await _suspend_until(environment, injecting)
            if case.phase not in ENDING_PHASES and not await _injected_before_the_end(environment, injecting):
                return None
            await injecting
            if case.phase == "shutdown":
                await environment.ended("trainer")
                await environment.succeeded()
            else:
                await environment.until_applied(environment.applied + 1)
    except TimeoutError:
        when = "after the fault" if injecting.done() and not injecting.cancelled() else "before the fault"
        return f"the run in {environment.storage} makes no progress {when}; {await environment.describe()}"
    return ""


async def _injected_before_the_end(environment: FaultEnvironment, injecting: asyncio.Task[None]) -> bool:
    """Wait until the fault is injected or the run has ended; return whether it was injected."""
    ended = asyncio.create_task(environment.until_applied(sys.maxsize))  # returns when the trainer has ended
    try:
        await asyncio.wait({injecting, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if not injecting.done():
        injecting.cancel()
        return False
    return True


async def _finish(environment: FaultEnvironment) -> None:
    """Wait for the end of the run while it makes progress."""
    while not environment.has_ended("trainer"):
        async with asyncio.timeout(CASE_TIMEOUT_SECONDS):
            await environment.until_applied(environment.applied + 1)
    await environment.ended("trainer")


async def _suspend_until(environment: FaultEnvironment, injecting: asyncio.Task[None]) -> None:
    """Suspend and resume the run until the fault is injected: a version that already has a checkpoint gets no other."""
    while not injecting.done():
        await environment.suspend()
        await environment.resume(environment.job)
        if not injecting.done():
            await environment.until_applied(environment.applied + 1)


def _case_batches(cases: Sequence[Case]) -> list[list[Case]]:
    """Return batches of cases, one per run, shuffled with a fixed seed so that a run has many victims and moments."""
    batches = []
    for disk in (False, True):
        some = [case for case in cases if (case.fault == "full") == disk]
        random.Random(1).shuffle(some)
        batches += [some[i : i + CASES_PER_RUN] for i in range(0, len(some), CASES_PER_RUN)]
    return batches


def main() -> None:
    """Run the cases named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.INFO, format="%(asctime)s %(message)s")
    for chatty in ("aiohttp", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    cases = [case for case in all_cases() if not options.names or case.name in options.names]

    async def run() -> dict[str, str]:
        with contextlib.closing(ForkServer(*IMPORTS, "e2e.faults.short_times")) as fork_server:
            runner = CaseRunner(cases, options.directory, fork_server)
            await runner.run()
            return runner.outcomes

    json.dump(asyncio.run(run()), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
