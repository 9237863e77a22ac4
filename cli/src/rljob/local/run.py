"""`rljob run`: the parts of one job as processes of this machine, from start to end.

Initializer, then all parts at once, each under a supervisor; the coordinator's status is polled and shown until it says
that the run succeeded or failed, a part cannot be kept alive, or somebody interrupts. Whatever happens, nothing that
was started is left when :func:`run_job` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rljob.api.models import RLJob
from rljob.local import initializer, logs, plan, processes
from rljob.local.directory import RunDirectory
from rljob.local.errors import Interrupted, RunError
from rljob.local.plan import Surroundings
from rljob.local.processes import Command, Interrupt
from rljob.local.screen import Screen
from rljob.local.summary import checkpoint_line, draw_plot, summary
from rljob.local.supervisor import Backoff, Supervisor
from rljob.local.suspension import ask_to_suspend
from rljob.local.view import PartView, View
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.initializer_stamp import mark_used
from rljob.protocol.status import RunStatus, decode_status

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""The coordinator is given so long to answer one question."""
LAST_WORD_SECONDS = 2.0
"""A part that ends may do so as the run has failed: the coordinator is given so long to say it."""
ENDING = "writing a checkpoint"
TERMINAL = ("Succeeded", "Failed", "Suspended")

Planner = Callable[[RLJob, Surroundings], list[Command]]


def run_job(
    job: RLJob,
    manifest: bytes,
    directory: Path,
    screen: Screen,
    planner: Planner = plan.parts,
    backoff: Backoff | None = None,
) -> list[str]:
    """Run ``job`` in ``directory`` to its end; return the result as lines for a person.

    Args:
        job: resolved and checked, see preflight.
        manifest: the file as given, kept for the record.
        directory: the run directory, new or of an earlier run of the same job.
        screen: where the run is shown.
        planner: gives the parts to run; tests put others in their place.
        backoff: waits between restarts.

    Raises:
        RunError: the run could not start or failed.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP.
    """
    run_directory = RunDirectory(directory)
    with run_directory.opened(job, manifest) as resumed:
        status = run_directory.status()
        if resumed and status and status.state == "Succeeded" and status.progress.step >= job.spec.training.steps:
            return ["this run has already succeeded", *summary(status, run_directory.path)]
        with screen, processes.guardian(run_directory.path):
            run = _Run(job, run_directory, screen, planner, backoff)
            if resumed:
                screen.note(f"resuming the run in {run_directory.path}")
            try:
                status = asyncio.run(run.execute())
            except RunError as error:
                if error.exit_code == CONFIGURATION_ERROR and not resumed and not run.trained:
                    run_directory.mark_refused()
                raise
        if problem := draw_plot(status, run_directory.path, job.metadata.name):
            screen.note(f"the plot of the reward could not be drawn: {problem}")
        return summary(status, run_directory.path)


class _Run:
    """One `rljob run`: what is shown, what is supervised, and who may interrupt."""

    def __init__(
        self, job: RLJob, directory: RunDirectory, screen: Screen, planner: Planner, backoff: Backoff | None
    ) -> None:
        self._job = job
        self._directory = directory
        self._screen = screen
        self._planner = planner
        self._backoff = backoff
        self._supervisors: list[Supervisor] = []
        self._deaths: dict[str, str] = {}  # part or engine → how it ended last
        self._view = View(job.metadata.name, directory.path)

    @property
    def trained(self) -> bool:
        """Whether a batch was applied, as far as is known."""
        return self._view.status is not None and self._view.status.progress.step > 0

    async def execute(self) -> RunStatus:
        """Run all of it; return the status of success."""
        person = Interrupt()
        self._directory.tell("run", "started")
        with _signals(person):
            self._showing = asyncio.create_task(self._show())
            try:
                self._view.phase = "running the initializer"
                await initializer.initialize(self._job, self._directory, person)
                self._view.phase = "starting"
                return self._success(await self._run_parts(person))
            except (Interrupted, RunError) as end:
                self._record(end)
                raise
            finally:
                self._showing.cancel()

    def _success(self, status: RunStatus) -> RunStatus:
        """Return the last status if it is a success."""
        if status.state == "Suspended":
            raise Interrupted(checkpoint_line(status, self._directory.path))
        if status.state == "Failed":
            raise RunError(f"the run failed: {status.message or status.reason}", log=self._log_of(status))
        return status

    async def _run_parts(self, person: Interrupt) -> RunStatus:
        """Supervise all parts until the run ends one way or the other, then stop them."""
        mark_used(self._directory.path)
        ports = self._directory.ports(plan.servers(self._job))
        here = Surroundings(self._directory.path, ports, self._directory.tokens())
        ending = Interrupt()
        ending.kill = person.kill  # a second Ctrl-C while parts are given time to end
        policy = self._job.spec.failure_policy
        self._supervisors = [
            Supervisor(command, self._directory.path, policy, self._tell, self._backoff)
            for command in self._planner(self._job, here)
        ]
        watching = asyncio.create_task(self._watch(here.coordinator_url))
        stopped = asyncio.create_task(person.stop.wait())
        rotating = asyncio.create_task(logs.keep_short(self._directory.path))
        keeping = [asyncio.create_task(supervisor.run(ending)) for supervisor in self._supervisors]
        try:
            ends = {watching, self._showing, *keeping}
            await asyncio.wait({*ends, stopped, rotating}, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in ends):
                await self._suspend(person, here, ends)
            if any(task.done() for task in keeping):  # perhaps because the run failed, and that is what to tell
                await asyncio.wait({watching}, timeout=LAST_WORD_SECONDS)
        finally:
            self._view.ending = "stopping"
            ending.stop.set()
            results = await asyncio.gather(*keeping, return_exceptions=True)
            for task in (watching, stopped, rotating):
                task.cancel()
        if watching.done() and not watching.cancelled():
            return watching.result()
        if person.stop.is_set():
            raise Interrupted
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._showing.result()  # a dead screen ends the run
        raise AssertionError("a run ends by its status, a person, its screen, or a part that cannot be kept")

    async def _suspend(self, person: Interrupt, here: Surroundings, ends: Collection[asyncio.Task[Any]]) -> None:
        """Have a checkpoint written before everything ends, if anything was trained; any of ``ends`` ends that too, as
        do a second Ctrl-C and the end of the grace."""
        ended = asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        grace = asyncio.sleep(self._job.spec.suspend_grace_seconds)
        await processes.first(self._save(here), ended, person.kill.wait(), grace)

    async def _save(self, here: Surroundings) -> None:
        """Ask for a checkpoint and the end until the run has ended; return at once if nothing was trained."""
        async with _session() as session:
            self._view.status = await _get_status(session, here.coordinator_url) or self._view.status
        if not self.trained:  # by a fresh status: the first steps may have come since the last look
            return
        self._view.ending = ENDING
        self._screen.note(f"{ENDING}; Ctrl-C again stops at once")
        await ask_to_suspend(here.coordinator_url, here.tokens["operator"])

    async def _watch(self, url: str) -> RunStatus:
        """Poll the coordinator's status until the run ends; return the last one."""
        async with _session() as session:
            while True:
                status = await _get_status(session, url)
                if status is not None:
                    if self._view.status is None or self._view.status.state != status.state:
                        self._directory.tell("run", status.state, step=status.progress.step)
                    self._view.status = status
                    self._note_engines(status)
                    if status.state in TERMINAL:
                        return status
                    self._refuse_overtime(status)
                await asyncio.sleep(POLL_SECONDS)

    def _refuse_overtime(self, status: RunStatus) -> None:
        """End a run that has been up too long, over all its starts; what it has saved stays."""
        deadline = self._job.spec.active_deadline_seconds
        if deadline is not None and status.progress.seconds >= deadline:
            kept = checkpoint_line(status, self._directory.path)
            raise RunError(
                f"spec.activeDeadlineSeconds: the run has been up for {deadline} s; {kept}; raise it to go on"
            )

    async def _show(self) -> None:
        while True:
            self._view.parts = [
                PartView(part.name, part.state, part.restarts, self._deaths.get(part.name, ""))
                for part in self._supervisors
            ]
            initializing = not self._supervisors
            log = processes.log_path(self._directory.path, initializer.NAME)
            self._view.detail = processes.last_line(log) if initializing else ""
            self._screen.show(self._view)
            await asyncio.sleep(POLL_SECONDS)

    def _tell(self, subject: str, event: str, **figures: Any) -> None:
        """Record an event of a part; a death also goes to the screen, with what it said last."""
        if event == "restarting" and figures["code"] > 0:
            figures["cause"] = processes.last_line(processes.log_path(self._directory.path, subject))
        self._directory.tell(subject, event, **figures)
        if event == "restarting":
            self._deaths[subject] = processes.describe_death(figures)
            self._screen.note(f"{subject} {self._deaths[subject]}; restarting it")

    def _note_engines(self, status: RunStatus) -> None:
        """Say it once when an engine server died: its agent restarts it."""
        for part in status.parts:
            if part.role == "agent" and part.message and self._deaths.get(f"engine {part.instance}") != part.message:
                self._deaths[f"engine {part.instance}"] = part.message
                self._screen.note(f"engine of {part.instance}: {part.message}; restarting it")

    def _record(self, end: Interrupted | RunError) -> None:
        """Record why the run ended; not on a full disk, which the person is told about anyway."""
        with contextlib.suppress(OSError):
            if isinstance(end, RunError):
                self._directory.tell("run", "failed", message=end.sentence)
            else:
                self._directory.tell("run", "suspended" if end.checkpoint else "interrupted")

    def _log_of(self, status: RunStatus) -> str:
        """Return the end of the log of the part that the failure names, else of the coordinator's."""
        said = f"{status.reason} {status.message}".lower()
        names = [part.name for part in self._supervisors]
        concerned = next((name for name in names if name.partition("-")[0] in said), "coordinator")
        return processes.tail(processes.log_path(self._directory.path, concerned))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))


async def _get_status(session: aiohttp.ClientSession, url: str) -> RunStatus | None:
    """Return the coordinator's status, or None while it does not answer."""
    try:
        async with session.get(f"{url}/v1/status") as response:
            return decode_status(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def _signals(interrupt: Interrupt) -> Iterator[None]:
    """While inside, signals that ask to end go to ``interrupt``."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
