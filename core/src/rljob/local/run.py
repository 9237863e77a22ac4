"""`rljob run`: the parts of one job as processes of this machine, from start to end.

Initializer, then all parts at once, each under a supervisor; the coordinator's status is polled and shown until it says
that the run succeeded or failed, a part cannot be kept alive, or somebody interrupts. Whatever happens, nothing that
was started is left when :func:`run_job` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.local import initializer, plan, processes
from rljob.local.directory import RunDirectory
from rljob.local.errors import Interrupted, RunError
from rljob.local.plan import Surroundings
from rljob.local.processes import Command, Interrupt
from rljob.local.screen import Screen
from rljob.local.summary import draw_plot, summary
from rljob.local.supervisor import Backoff, Supervisor
from rljob.local.view import PartView, View
from rljob.protocol.status import RunStatus, decode_status

POLL_SECONDS = 0.5
TERMINAL = ("Succeeded", "Failed")

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
        job: as loaded; it is resolved here.
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
    job = _with_absolute_sources(resolve(job))
    _check_transport(job)
    initializer.check(job, run_directory)
    with run_directory.opened(job, manifest) as resumed:
        status = run_directory.status()
        if resumed and status and status.state == "Succeeded" and status.progress.step >= job.spec.training.steps:
            return ["this run has already succeeded", *summary(status, run_directory.path)]
        with screen, processes.guardian(run_directory.path):
            run = _Run(job, run_directory, screen, planner, backoff)
            if resumed:
                screen.note(f"resuming the run in {run_directory.path}")
            status = asyncio.run(run.execute())
        if problem := draw_plot(status, run_directory.path, job.metadata.name):
            screen.note(f"the plot of the reward could not be drawn: {problem}")
        return summary(status, run_directory.path)


def _check_transport(job: RLJob) -> None:
    if job.spec.weight_sync.transport == "nccl" and not Path("/dev/nvidiactl").exists():
        raise RunError(
            "spec.weightSync.transport: nccl needs NVIDIA GPUs and this machine has none; set auto or gloo", exit_code=2
        )


def _with_absolute_sources(job: RLJob) -> RLJob:
    """Return ``job`` with the paths of models made absolute, so that parts and later runs find the same."""
    for model in job.spec.models:
        if not model.source.startswith("job://"):
            model.source = str(Path(model.source).absolute())
    return job


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
        self._view = View(job.metadata.name, directory.path)

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
                status = await self._run_parts(person)
            finally:
                self._showing.cancel()
        self._directory.tell("run", status.state)
        if status.state == "Failed":
            raise RunError(f"the run failed: {status.message or status.reason}", log=self._log_of(status))
        return status

    async def _run_parts(self, person: Interrupt) -> RunStatus:
        """Supervise all parts until the run ends one way or the other, then stop them."""
        initializer.mark_used(self._directory)
        ports = self._directory.ports(plan.servers(self._job))
        here = Surroundings(self._directory.path, ports, self._directory.tokens())
        ending = Interrupt()
        ending.kill = person.kill  # a second Ctrl-C while parts are given time to end
        limit = self._job.spec.failure_policy.max_restarts
        self._supervisors = [
            Supervisor(command, self._directory.path, limit, self._tell, self._backoff)
            for command in self._planner(self._job, here)
        ]
        watching = asyncio.create_task(self._watch(here.coordinator_url))
        stopped = asyncio.create_task(person.stop.wait())
        keeping = [asyncio.create_task(supervisor.run(ending)) for supervisor in self._supervisors]
        try:
            await asyncio.wait({watching, stopped, self._showing, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._view.phase = "stopping"
            ending.stop.set()
            ends = await asyncio.gather(*keeping, return_exceptions=True)
            watching.cancel()
            stopped.cancel()
        if person.stop.is_set():
            raise Interrupted
        if watching.done():
            return watching.result()
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        self._showing.result()  # a dead screen ends the run
        raise AssertionError("a run ends by its status, a person, its screen, or a part that cannot be kept")

    async def _watch(self, url: str) -> RunStatus:
        """Poll the coordinator's status until the run ends; return the last one."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                status = await _get_status(session, url)
                if status is not None:
                    if self._view.status is None or self._view.status.state != status.state:
                        self._directory.tell("run", status.state, step=status.progress.step)
                    self._view.status = status
                    if status.state in TERMINAL:
                        return status
                await asyncio.sleep(POLL_SECONDS)

    async def _show(self) -> None:
        while True:
            self._view.parts = [PartView(part.name, part.state, part.restarts) for part in self._supervisors]
            initializing = not self._supervisors
            log = processes.log_path(self._directory.path, initializer.NAME)
            self._view.detail = processes.last_line(log) if initializing else ""
            self._screen.show(self._view)
            await asyncio.sleep(POLL_SECONDS)

    def _tell(self, subject: str, event: str, **figures: Any) -> None:
        """Record an event of a part; a death also goes to the screen."""
        self._directory.tell(subject, event, **figures)
        if event == "restarting":
            self._screen.note(f"{subject} {processes.describe_exit(figures['code'])}; restarting it")

    def _log_of(self, status: RunStatus) -> str:
        """Return the end of the log of the part that the failure names, else of the coordinator's."""
        said = f"{status.reason} {status.message}".lower()
        names = [part.name for part in self._supervisors]
        concerned = next((name for name in names if name.partition("-")[0] in said), "coordinator")
        return processes.tail(processes.log_path(self._directory.path, concerned))


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
