"""Code of a sample that blocks its runner, or ends it, fails its sample and no other; lost machines fail none."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from select import select
from typing import Any

import pytest
from world import job

from rljob.coordinator.run import Run
from rljob.coordinator.trajectory import Trajectory
from rljob.protocol.runner_protocol import RunnerEnd
from rljob.runner.context import Context
from rljob.runner.driver import RunnerDriver
from rljob.runner.loops import Loop
from rljob.runner.loops.single_turn import single_turn
from rljob.runner.process_record import ProcessRecord, read_end
from rljob.runner.sample_tasks import RECORD_BYTES, RunningSample, read_record
from rljob.scheduling.groups import Cause
from rljob.simulation.memory_link import MemoryLink
from rljob.simulation.simulated_engine import EngineModel
from rljob.simulation.simulated_run import Outcome, SimulatedCluster, SimulatedRun
from rljob.simulation.virtual_time import run_in_virtual_time

# --- what a process records -------------------------------------------------------------------------------------------

FORKS = """import os, sys
from rljob.protocol.parent_death import set_parent_death_signal
from rljob.runner import process_record, sample_tasks  # takes most of a second: once for all processes
for line in sys.stdin:
    if not os.fork():
        set_parent_death_signal()
        try:
            exec(line.encode().decode("unicode_escape"))
        finally:
            os._exit(1)
    _, status = os.wait()
    print(status, flush=True)
"""
PROCESS = """import asyncio, ctypes, os, re, sys, time
from rljob.runner.process_record import recording
from rljob.runner.sample_tasks import Owner, make_task, start_for

async def tool():
    {code}

async def loop():
    await asyncio.gather(tool())

async def other():
    try:
        await asyncio.sleep(600)
    finally:
        open({beat!r} + ".cancelled", "w").close()

async def main():
    async with recording({beat!r}, {late}) as record:
        asyncio.get_running_loop().set_task_factory(make_task)
        owner = Owner.of(record.running, "g7.3", 1 << 40)
        others = start_for(Owner.of(record.running, "g7.4", 1), other())
        {first}
        await start_for(owner, loop())

open({beat!r}, "w").write(str(os.getpid()))
asyncio.run(main())
os._exit(0)
"""
BUSY = "os.rename({beat!r}, {beat!r} + '.busy')\n    while True: pass"
CHILD = "child = os.fork()\n    if not child: ctypes.string_at(0)\n    os.waitpid(child, 0)\n    "
BLOCKED = r"it blocked the event loop of its runner for 0\.\d+ s, in "


class Process:
    """A process in which ``code`` runs in a task of sample g7.3, under lease 1 << 40."""

    def __init__(self, forks: subprocess.Popen[str], path: Path, code: str, late: float, first: str = "pass") -> None:
        self.beat = path / "beat"
        self._traceback, self._busy = path / "beat.traceback", path / "beat.busy"
        program = PROCESS.format(code=code, beat=str(self.beat), late=late, first=first)
        assert forks.stdin is not None and forks.stdout is not None
        self._status = forks.stdout
        forks.stdin.write(program.replace("{beat!r}", repr(str(self.beat))).encode("unicode_escape").decode() + "\n")
        forks.stdin.flush()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when a condition is true or the process has ended."""
        while not (condition() or select([self._status], [], [], 0.005)[0]):
            pass

    @property
    def traced(self) -> bool:
        return self._traceback.exists() and self._traceback.stat().st_size > 0

    @property
    def busy(self) -> bool:
        return self._busy.exists()

    def kill(self) -> int:
        """Kill the process; return its status when it has ended."""
        if not select([self._status], [], [], 0)[0]:
            os.kill(int((self._busy if self.busy else self.beat).read_text()), signal.SIGKILL)
        return int(self._status.readline())


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("code", "late", "how"),
    [
        ("time.sleep(600)", 0.05, BLOCKED + r"tool \(<string>:6\)$"),
        ("re.match('(a+)+$', 40 * 'a' + 'b')", 0.05, BLOCKED + "match "),
        ("ctypes.string_at(0)", 60.0, r"it crashed its runner \(Segmentation fault\), in string_at "),
    ],
    ids=["blocks", "holds the interpreter", "crashes"],
)
def test_the_next_process_knows_whose_code_ended_this_one(
    forks: subprocess.Popen[str], tmp_path: Path, code: str, late: float, how: str
) -> None:
    process = Process(forks, tmp_path, code, late)
    process.wait_for(lambda: process.traced)
    process.kill()
    end = read_end(str(process.beat), late)
    assert end is not None and (end.sample, end.lease) == ("g7.3", 1 << 40)
    assert re.match(how, end.how), end.how


@pytest.mark.parametrize(
    ("code", "late", "first"),
    [
        (BUSY, 60.0, "pass"),
        (CHILD + BUSY, 60.0, "pass"),
        ("await asyncio.sleep(600)", 0.05, "asyncio.get_running_loop().call_later(0.01, time.sleep, 600)"),
        ("pass", 60.0, "pass"),
    ],
    ids=["killed", "killed after its child crashed", "blocked by other code", "ends"],
)
def test_a_process_that_a_sample_did_not_end_names_no_sample(
    forks: subprocess.Popen[str], tmp_path: Path, code: str, late: float, first: str
) -> None:
    process = Process(forks, tmp_path, code, late, first)
    process.wait_for(lambda: process.traced or process.busy)
    process.kill()
    assert read_end(str(process.beat), late) is None


@pytest.mark.parametrize(("before", "blamed"), [(59.0, True), (31.0, True), (29.0, False), (0.0, False), (-9.0, False)])
def test_a_sample_is_blamed_for_a_late_event_loop_if_it_had_it_for_half_of_the_time(
    tmp_path: Path, before: float, blamed: bool
) -> None:
    """``before``: seconds from the begin of its code to the last traceback. Thousands of samples that each compute for
    some milliseconds make the event loop late, too."""
    record = bytearray(RECORD_BYTES)
    RunningSample(record).replace(b"7 g7.3")
    owner = read_record(bytes(record))
    assert owner is not None
    (tmp_path / "beat.sample").write_bytes(record)
    (tmp_path / "beat.traceback").write_text("Timeout (0:01:00)!\n")
    os.utime(tmp_path / "beat.traceback", (0, owner.since + before))
    assert (read_end(str(tmp_path / "beat"), 60.0) is not None) == blamed


def test_tasks_that_are_cancelled_with_the_process_end_as_usual(forks: subprocess.Popen[str], tmp_path: Path) -> None:
    process = Process(forks, tmp_path, "await asyncio.sleep(0)", 60.0)
    process.wait_for(lambda: False)
    assert process.kill() == 0 and (tmp_path / "beat.cancelled").exists()


def test_a_process_that_was_late_and_runs_again_has_no_traceback(forks: subprocess.Popen[str], tmp_path: Path) -> None:
    process = Process(forks, tmp_path, "time.sleep(0.1)\n    await asyncio.sleep(600)", 0.02)
    process.wait_for(lambda: process.traced)
    process.wait_for(lambda: not process.traced)
    assert process.kill() == signal.SIGKILL
    assert read_end(str(process.beat), 0.02) is None


# --- what the coordinator does with it --------------------------------------------------------------------------------


class FaultyRun(SimulatedRun):
    """A run with one runner, whose process :meth:`restart` ends."""

    def __init__(self, loop: Loop) -> None:
        self.failures: list[tuple[str, str]] = []
        around = SimulatedCluster([("main", EngineModel(2))] * 2, lambda request: 1.0, lambda batch: 1.0, loop=loop)
        super().__init__(job(4, 1, 2, 2), around, prepare=self._prepare)
        self.record = bytearray(RECORD_BYTES)
        self.before: RunnerEnd | None = None
        self.lives = 0

    def _prepare(self, run: Run) -> None:
        failed = run.outcomes.failed

        def record(trajectory: Trajectory, reason: str, cause: Cause) -> None:
            self.failures.append((trajectory.sample.id, reason))
            failed(trajectory, reason, cause)

        run.outcomes.failed = record  # type: ignore[method-assign]

    def _runner(self, number: int) -> RunnerDriver:
        self.lives += 1
        self.driver = super()._runner(self.lives)
        self.driver._record = ProcessRecord(RunningSample(self.record), self.before)
        return self.driver

    @property
    def link(self) -> MemoryLink:
        """Of the runner; one that is cut stays so, as that of a process that has ended."""
        assert isinstance(self.driver._link, MemoryLink)
        return self.driver._link

    async def restart(self, before: RunnerEnd | None) -> None:
        """End the process and start the next one."""
        self.driver.close()
        self.link.cut()
        await asyncio.sleep(0.1)
        self.before = before
        self.serving = asyncio.create_task(self._runner(0).run())

    async def with_faults(self, faults: Coroutine[Any, Any, None]) -> Outcome:
        """Run to the end."""
        self.injecting = asyncio.create_task(faults)
        return await self.run()


def test_a_sample_that_ends_its_runner_fails_alone() -> None:
    """In this test a process that ends is replaced, as its loop cannot end the process of the test."""
    ends: asyncio.Queue[RunnerEnd] = asyncio.Queue()

    async def loop(context: Context) -> Any:
        turn = await context.generate(context.prompt.token_ids)
        if context.sample == "g0.0":
            owner = read_record(bytes(run.record))
            assert owner is not None
            leases.add(owner.lease)
            ends.put_nowait(RunnerEnd(owner.sample, owner.lease, "it crashed its runner"))
            await asyncio.Event().wait()
        return await context.score("", turn.finish)

    async def faults() -> None:
        while True:
            await run.restart(await ends.get())

    run, leases = FaultyRun(loop), set()
    outcome = run_in_virtual_time(run.with_faults(faults()))
    reason = "its loop ended 3 processes of runners; the last time it crashed its runner"
    assert run.failures == [("g0.0", reason)] and (run.lives, len(leases)) == (4, 3)
    assert outcome.ends["trained"] == 4 * 2 * 2 and not any(name.startswith("g0.") for name in outcome.trained)


def test_runners_that_are_lost_otherwise_fail_no_sample() -> None:
    """However often: the machines of a cluster end, and its processes are killed."""

    async def faults() -> None:
        for _ in range(20):
            await asyncio.sleep(0.3)
            await run.restart(None)

    run = FaultyRun(single_turn)
    outcome = run_in_virtual_time(run.with_faults(faults()))
    assert run.lives > 10 and not run.failures and outcome.ends["trained"] == 4 * 2 * 2


def test_a_report_that_a_runner_repeats_counts_once() -> None:
    async def faults() -> None:
        await asyncio.sleep(0.5)
        lease = run.driver._trajectories["g0.0"].lease
        await run.restart(RunnerEnd("g0.0", lease, "it crashed its runner"))
        for _ in range(5):
            await asyncio.sleep(0.1)
            run.link.cut()
            run.link.connect()

    run = FaultyRun(single_turn)
    outcome = run_in_virtual_time(run.with_faults(faults()))
    assert run.lives == 2 and not run.failures and outcome.ends["trained"] == 4 * 2 * 2
