"""A run for fault injection: its components are processes behind a proxy, which are restarted when they exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from e2e.fakes.fork_server import Child, ForkServer
from e2e.fakes.harness import COMMANDS, TOKENS, Harness
from e2e.faults import disk
from e2e.faults.proxy import Moment, Proxy, Trigger
from rljob.api.models import RLJob
from rljob.local import watchdog
from rljob.protocol import health_probe
from rljob.protocol import trainer_protocol as m

COMPONENTS = ("coordinator", "runner", "reward", "agent", "trainer")
ARGUMENTS = {"agent": ["--seconds-per-token", "0.001", "--max-concurrency", "16"]}
HANG_SECONDS = 1.0
RESTART_SECONDS = 0.03
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02


class FaultEnvironment(Harness):
    """See module. Use inside ``async with``.

    Args:
        job: the resolved manifest.
        storage: the run directory.
        fork_server: starts the components.
    """

    def __init__(self, job: RLJob, storage: Path, fork_server: ForkServer) -> None:
        super().__init__(job, storage)
        (storage / "logs").mkdir(exist_ok=True)
        (storage / "heartbeats").mkdir(exist_ok=True)
        self.applied = 0  # batches that the trainer has reported as applied
        self._fork_server = fork_server
        self._children: dict[str, Child] = {}
        self.proxy = Proxy(self.coordinator_url, self.reward_urls, self._on_message)

    async def __aenter__(self) -> FaultEnvironment:
        await self.proxy.__aenter__()
        for component in COMPONENTS:
            await self.start(component, *ARGUMENTS.get(component, []))
        while len(self._children) < len(COMPONENTS):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
            for task in self._tasks.values():
                if task.done():
                    task.result()  # raises the error that prevented the start
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for component in COMPONENTS:
            self._end(component)
        await asyncio.wait(self._tasks.values(), timeout=GRACE_SECONDS)
        for component in COMPONENTS:
            self._children[component].kill()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.proxy.__aexit__()

    def variables(self, component: str) -> dict[str, str]:
        """Return the environment variables of a component; it connects to others through the proxy only."""
        return super().variables(component) | {
            "RLJOB_COORDINATOR": self.proxy.url,
            "RLJOB_REWARD_URLS": json.dumps(self.proxy.reward_urls),
            health_probe.HEARTBEAT: str(self._heartbeat(component)),
        }

    # --- waiting ---

    async def inject_at(self, moment: Moment, inject: Callable[[], None]) -> None:
        """Call ``inject`` at ``moment`` and wait for the call."""
        trigger = self.proxy.trigger = Trigger(moment, inject)
        await trigger.injected.wait()

    def has_ended(self, component: str) -> bool:
        """Return whether a component has ended and is not restarted."""
        return self._tasks[component].done()

    async def until_applied(self, batches: int) -> None:
        """Wait until this number of batches is applied, or the trainer has ended because the run is over."""
        while self.applied < batches and not self._tasks["trainer"].done():
            self._changed.clear()
            await self._changed.wait()

    async def succeeded(self) -> None:
        """Wait until the coordinator reports Succeeded."""
        while (await self._request("get", "/v1/status")).get("state") != "Succeeded":
            await asyncio.sleep(POLL_SECONDS)

    async def describe(self) -> str:
        """Return the state of the run for an assertion message."""
        ended = [
            f"{component}: {task.exception() or 'ended'}" for component, task in self._tasks.items() if task.done()
        ]
        status = await self._request("get", "/v1/status")
        shown = {name: status.get(name) for name in ("state", "message", "progress", "queues", "components")}
        return f"no longer restarted: {ended}; status: {json.dumps(shown)}"

    async def _request(self, method: str, path: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Send a request to the coordinator; return the status that it answers, or an empty one without an answer."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2), headers=headers) as session:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.request(method, self.coordinator_url + path) as response:
                    status: dict[str, Any] = await response.json()
                    return status
        return {}

    def _on_message(self, component: str, message: Any) -> None:
        if isinstance(message, m.StepDone) and message.step >= self.applied:
            self.applied = message.step + 1
            self._changed.set()

    # --- components ---

    async def resume(self, job: RLJob) -> None:
        """Resume with a job that may have more steps, as the same `rljob run` command does."""
        self.job = job
        await self._replace_manifest()
        before = self._children["coordinator"]
        self._end("coordinator")
        # Wait for its exit; otherwise it would report the end of the run again to the trainer and to _is_over.
        if await before.wait() == 0:  # else _keep restarts it like a killed one
            await self.start("coordinator")
        if self._tasks["trainer"].done():
            await self.start("trainer")

    async def suspend(self) -> None:
        """Request suspension until the run is suspended, as `rljob stop` does."""
        headers = {"Authorization": f"Bearer {TOKENS['owner']}"}
        while (await self._request("post", "/v1/suspend", headers)).get("state") not in ("Suspended", "Succeeded"):
            await asyncio.sleep(POLL_SECONDS)

    async def _replace_manifest(self) -> None:
        """Replace job.json at once: a restarting component may read it at this moment."""
        manifest = self.storage / "job.json.new"
        while True:
            try:
                manifest.write_text(self.job.model_dump_json(by_alias=True))
            except OSError:  # the disk is full for a while
                await asyncio.sleep(POLL_SECONDS)
            else:
                break
        manifest.replace(self.storage / "job.json")

    def _end(self, component: str) -> None:
        child = self._children.get(component)
        if child is not None:
            child.send_signal(signal.SIGCONT)
            child.terminate()

    def _heartbeat(self, component: str) -> Path:
        return self.storage / "heartbeats" / component

    async def _keep(self, component: str, arguments: tuple[str, ...]) -> None:
        """Restart a component whenever it dies or hangs, until it exits with 0; a trainer until the run is over."""
        while not self._stopping:
            self.restarts[component] += 1
            with contextlib.suppress(OSError):  # on a full disk the file of the previous process remains
                watchdog.reset(self._heartbeat(component))
            log = self.storage / "logs" / f"{component}.log"
            program, environment = [*COMMANDS[component], *arguments], os.environ | self.variables(component)
            child = await asyncio.wrap_future(self._fork_server.start(program, environment, log, log))
            self._children[component] = child
            self._changed.set()
            if self._stopping:
                self._end(component)
            watching = asyncio.create_task(self._watch(component, child))
            code = await child.wait()
            watching.cancel()
            is_done = code == 0 and (component != "trainer" or await self._is_over())
            self._changed.set()
            if is_done:
                return
            if code == 2:
                raise RuntimeError(f"{component} exited with 2; the end of its log: {log.read_text()[-400:]!r}")
            await asyncio.sleep(RESTART_SECONDS)

    async def _is_over(self) -> bool:
        """Return whether the coordinator reports a final state. The trainer's exit does not imply it: a trainer of a
        suspended run may still be exiting when the run is resumed, and the coordinator that sent Stop may have died.
        `rljob run` also restarts the trainer until the coordinator reports the end of the run."""
        return (await self._request("get", "/v1/status")).get("state") in ("Succeeded", "Failed")

    async def _watch(self, component: str, child: Child) -> None:
        """Kill a hanging component, by the same rule as the supervisor."""
        detector = watchdog.HangDetector(HANG_SECONDS, time.monotonic())
        heartbeat = self._heartbeat(component)
        while not detector.observe(time.monotonic(), heartbeat.stat().st_mtime_ns, _is_stopped(child.pid)):
            await asyncio.sleep(HANG_SECONDS / 10)
        child.kill()

    # --- faults ---

    def kill_9(self, component: str) -> None:
        """Kill a component with SIGKILL."""
        self._children[component].kill()

    def stop(self, component: str, seconds: float | None) -> None:
        """Send SIGSTOP, and SIGCONT after ``seconds`` unless it is None."""
        child = self._children[component]
        child.send_signal(signal.SIGSTOP)
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, child.send_signal, signal.SIGCONT)

    def cut(self, component: str) -> None:
        """Break a component's connections."""
        self.proxy.cut(component)

    def fill_disk(self, seconds: float) -> None:
        """Fill the disk of the run directory for ``seconds``."""
        disk.fill(self.storage)
        asyncio.get_running_loop().call_later(seconds, disk.empty, self.storage)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"T")
    return False
