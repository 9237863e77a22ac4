"""`rljob run`: runs the components of one job as processes of this machine, from start to end.

The initializer runs first, then all components at once, each under a supervisor. The coordinator's status is polled and
shown until the run succeeds or fails, a component cannot be kept alive, or a user interrupts. When :func:`run_job`
returns, no process of the run is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from rljob.api.models import RLJob
from rljob.local import commands, gpu_assignment, processes, run_initializer
from rljob.local.commands import LocalContext
from rljob.local.component_supervisor import RestartBackoff, Supervisor
from rljob.local.errors import CliError, Interrupted
from rljob.local.outage import SILENCE_SECONDS, age_note, outage
from rljob.local.plot import draw_plot
from rljob.local.processes import Interrupt, ProcessCommand
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import Screen
from rljob.local.snapshot import INITIALIZING, ComponentState, RunSnapshot
from rljob.local.snapshot_view import WARNING, checkpoint_line, summary
from rljob.local.stop import ask_to_suspend
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.gpus import Gpu, find_gpus
from rljob.protocol.initializer_stamp import mark_used
from rljob.protocol.run_status import RunStatus, decode_status

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""Longest time for one answer of the coordinator."""
LAST_WORD_SECONDS = 2.0
"""A component may have ended because the run failed: longest wait for the coordinator to report that."""
ENDING = "writing a checkpoint"
TERMINAL = ("Succeeded", "Failed", "Suspended")

Planner = Callable[[RLJob, LocalContext], list[ProcessCommand]]


def run_job(
    job: RLJob,
    manifest: bytes,
    directory: Path,
    screen: Screen,
    planner: Planner = commands.components,
    backoff: RestartBackoff | None = None,
) -> list[str]:
    """Run ``job`` in ``directory`` to its end; return the result as lines of text.

    Args:
        job: resolved and checked by :mod:`rljob.local.job_checks`.
        manifest: the file as given, kept for the record.
        directory: the run directory, new or of an earlier run of the same job.
        screen: where the run is shown.
        planner: returns the commands of the components; tests replace some.
        backoff: waits between restarts.

    Raises:
        CliError: the run could not start or failed.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP.
    """
    run_directory = RunDirectory(directory)
    with run_directory.opened(job, manifest) as resumed:
        status = run_directory.status()
        if resumed and status and status.state == "Succeeded" and status.progress.step >= job.spec.training.steps:
            return ["this run has already succeeded", *summary(_ended(job, run_directory, status))]
        gpus = find_gpus()
        with screen, processes.reaper(run_directory.path):
            run = LocalRun(job, run_directory, screen, planner, backoff, gpus)
            if assigned := gpu_assignment.describe(gpu_assignment.gpus_of(job, gpus)):
                screen.note(assigned)
            if run_directory.made_private:
                screen.note(f"{run_directory.path} was readable by other users; now only you can read it")
            if resumed:
                screen.note(f"resuming the run in {run_directory.path}")
            try:
                status = asyncio.run(run.execute())
            except CliError as error:
                if error.exit_code == CONFIGURATION_ERROR and not resumed and not run.trained:
                    run_directory.mark_refused()
                raise
        if problem := draw_plot(status, run_directory.path, job.metadata.name):
            screen.note(f"the plot of the reward could not be drawn: {problem}")
        return summary(_ended(job, run_directory, status))


def _ended(job: RLJob, directory: RunDirectory, status: RunStatus) -> RunSnapshot:
    """Return the snapshot of a run that has ended."""
    place = {"directory": str(directory.path)}
    return RunSnapshot(place, job.metadata.name, False, status.state.lower(), status.message, status)


class LocalRun:
    """One `rljob run`: its supervisors, its screen and its interrupts."""

    def __init__(
        self,
        job: RLJob,
        directory: RunDirectory,
        screen: Screen,
        planner: Planner,
        backoff: RestartBackoff | None,
        gpus: tuple[Gpu, ...] = (),
    ) -> None:
        self._job = job
        self._directory = directory
        self._screen = screen
        self._planner = planner
        self._backoff = backoff
        self._gpus = gpus
        self._supervisors: list[Supervisor] = []
        self._last_exits: dict[str, str] = {}  # component or engine → how it ended last
        self._status: RunStatus | None = None  # the coordinator's newest
        before = directory.status()
        self._warnings = _count_warnings(before) if before is not None else 0  # noted by this or an earlier `rljob run`
        self._phase = "starting"  # shown until there is a status
        self._ending = ""  # shown when the run is ending
        self._started = time.monotonic()
        self._answered = 0.0  # monotonic time of the coordinator's last answer

    @property
    def trained(self) -> bool:
        """Whether a batch was applied, by the newest status."""
        return self._status is not None and self._status.progress.step > 0

    async def execute(self) -> RunStatus:
        """Run the job to its end; return its status if it succeeded."""
        person = Interrupt()
        self._directory.tell("run", "started")
        with _signals(person):
            self._showing = asyncio.create_task(self._show())
            try:
                self._phase = INITIALIZING
                await run_initializer.initialize(self._job, self._directory, person)
                self._phase = "starting"
                return self._success(await self._run_components(person))
            except (Interrupted, CliError) as end:
                self._record(end)
                raise
            finally:
                self._showing.cancel()

    def _success(self, status: RunStatus) -> RunStatus:
        """Return the last status if the run succeeded, else raise."""
        if status.state == "Suspended":
            raise Interrupted(checkpoint_line(status, self._directory.path))
        if status.state == "Failed":
            raise CliError(f"the run failed: {status.message or status.reason}", log=self._log_of(status))
        return status

    async def _run_components(self, person: Interrupt) -> RunStatus:
        """Supervise all components until the run ends, then stop them; return the last status."""
        mark_used(self._directory.path)
        ports = self._directory.ports(commands.servers(self._job))
        here = LocalContext(self._directory.path, ports, self._directory.tokens(), self._gpus)
        ending = Interrupt()
        ending.kill = person.kill  # a second Ctrl-C during the grace of the components
        policy = self._job.spec.failure_policy
        self._supervisors = [
            Supervisor(command, self._directory.path, policy, self._tell, self._backoff)
            for command in self._planner(self._job, here)
        ]
        watching = asyncio.create_task(self._watch(here))
        stopped = asyncio.create_task(person.stop.wait())
        keeping = [asyncio.create_task(supervisor.run(ending)) for supervisor in self._supervisors]
        try:
            ends = {watching, self._showing, *keeping}
            await asyncio.wait({*ends, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in ends):
                await self._suspend(person, here, ends)
            if any(task.done() for task in keeping):  # perhaps because the run failed: report that
                await asyncio.wait({watching}, timeout=LAST_WORD_SECONDS)
        finally:
            self._ending = "stopping"
            ending.stop.set()
            results = await asyncio.gather(*keeping, return_exceptions=True)
            for task in (watching, stopped):
                task.cancel()
        if watching.done() and not watching.cancelled():
            return watching.result()
        if person.stop.is_set():
            raise Interrupted
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._showing.result()  # a dead screen ends the run
        raise AssertionError("a run ends by its status, an interrupt, its screen, or a component that cannot be kept")

    async def _suspend(self, person: Interrupt, here: LocalContext, ends: Collection[asyncio.Task[Any]]) -> None:
        """Wait for a checkpoint if anything was trained; not beyond any of ``ends``, a second Ctrl-C, or the grace."""
        ended = asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        grace = asyncio.sleep(self._job.spec.suspend_grace_seconds)
        await processes.first(self._save(here), ended, person.kill.wait(), grace)

    async def _save(self, here: LocalContext) -> None:
        """Ask the coordinator to suspend, until it has; return at once if nothing was trained."""
        async with _session(here.tokens["owner"]) as session:
            self._status = await _get_status(session, here.coordinator_url) or self._status
        if not self.trained:  # by a fresh status: the first step may be newer than the last poll
            return
        self._ending = ENDING
        self._screen.note(f"{ENDING}; Ctrl-C again stops at once")
        await ask_to_suspend(here.coordinator_url, here.tokens["owner"])

    async def _watch(self, here: LocalContext) -> RunStatus:
        """Poll the coordinator's status until the run ends; return the last one."""
        async with _session(here.tokens["owner"]) as session:
            while True:
                status = await _get_status(session, here.coordinator_url)
                if status is not None:
                    self._answered = time.monotonic()
                    if self._status is None or self._status.state != status.state:
                        self._directory.tell("run", status.state, step=status.progress.step)
                    self._status = status
                    self._note_engines(status)
                    self._note_warnings(status)
                    if status.state in TERMINAL:
                        return status
                    self._refuse_overtime(status)
                await asyncio.sleep(POLL_SECONDS)

    def _refuse_overtime(self, status: RunStatus) -> None:
        """End a run that exceeds spec.activeDeadlineSeconds over all its starts; its checkpoints stay."""
        deadline = self._job.spec.active_deadline_seconds
        if deadline is not None and status.progress.seconds >= deadline:
            kept = checkpoint_line(status, self._directory.path)
            raise CliError(
                f"spec.activeDeadlineSeconds: the run has been up for {deadline} s; {kept}; raise it to continue"
            )

    async def _show(self) -> None:
        while True:
            self._screen.show(self._snapshot())
            await asyncio.sleep(POLL_SECONDS)

    def _snapshot(self) -> RunSnapshot:
        """Return the state of the run as this process knows it."""
        status, state, message, detail, note = self._status, self._ending or self._phase, "", "", ""
        if status is None and not self._ending:
            message = outage(self._directory.path, silent=False)
        elif status is not None and not self._ending:
            silence = time.monotonic() - self._answered
            silent = silence > SILENCE_SECONDS and status.state not in TERMINAL
            state, message = status.state.lower(), outage(self._directory.path, silent) or status.message
            note = age_note(silence) if silent else ""
        if not self._supervisors:
            detail = processes.last_line(processes.log_path(self._directory.path, run_initializer.NAME))
        components = [
            ComponentState(
                component.name, component.state, component.restarts, self._last_exits.get(component.name, "")
            )
            for component in self._supervisors
        ]
        place, seconds = {"directory": str(self._directory.path)}, time.monotonic() - self._started
        return RunSnapshot(
            place, self._job.metadata.name, True, state, message, status, components, seconds, detail, note
        )

    def _tell(self, subject: str, event: str, **details: Any) -> None:
        """Record an event of a component; show a restart on the screen, with the last line of the log. Of restarts on a
        full disk, which repeat until there is room, only the first is shown."""
        if event == "restarting" and details["code"] > 0:
            details["cause"] = processes.last_line(processes.log_path(self._directory.path, subject))
        self._directory.tell(subject, event, **details)
        if event == "restarting":
            before, now = self._last_exits.get(subject), processes.describe_restart(details)
            self._last_exits[subject] = now
            if now != before or "full" not in details:
                self._screen.note(f"{subject} {now}; restarting it")

    def _note_engines(self, status: RunStatus) -> None:
        """Show once that an engine server exited; its agent restarts it, unless it has failed."""
        for component in status.components:
            if (
                component.role == "agent"
                and component.message
                and self._last_exits.get(f"engine {component.instance}") != component.message
            ):
                self._last_exits[f"engine {component.instance}"] = component.message
                restarting = "" if component.state == "failed" else "; restarting it"
                self._screen.note(f"engine of {component.instance}: {component.message}{restarting}")

    def _note_warnings(self, status: RunStatus) -> None:
        """Show and record each warning of the coordinator once."""
        for warning in status.warnings[max(0, self._warnings - status.earlier_warnings) :]:
            self._directory.tell("coordinator", "warning", message=warning)
            self._screen.note(f"{WARNING}: {warning}")
        self._warnings = max(self._warnings, _count_warnings(status))

    def _record(self, end: Interrupted | CliError) -> None:
        """Record why the run ended; on a full disk the command only reports it."""
        with contextlib.suppress(OSError):
            if isinstance(end, CliError):
                self._directory.tell("run", "failed", message=end.sentence)
            else:
                self._directory.tell("run", "suspended" if end.checkpoint else "interrupted")

    def _log_of(self, status: RunStatus) -> str:
        """Return the end of the log of the component that the failure names, else of the coordinator."""
        text = f"{status.reason} {status.message}".lower()
        names = [component.name for component in self._supervisors]
        concerned = next((name for name in names if name.partition("-")[0] in text), "coordinator")
        return processes.tail(processes.log_path(self._directory.path, concerned))


def _session(token: str) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS), headers=headers)


def _count_warnings(status: RunStatus) -> int:
    """Return the number of all warnings of a run."""
    return status.earlier_warnings + len(status.warnings)


async def _get_status(session: aiohttp.ClientSession, url: str) -> RunStatus | None:
    """Return the coordinator's status, or None while it does not answer."""
    try:
        async with session.get(f"{url}/v1/status") as response:
            return decode_status(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


@contextlib.contextmanager
def _signals(interrupt: Interrupt) -> Iterator[None]:
    """While inside, SIGINT, SIGTERM and SIGHUP go to ``interrupt``."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
