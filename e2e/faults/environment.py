"""One run among faults: its components as processes behind a proxy, kept alive, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from e2e.fakes.harness import TOKENS, Harness
from e2e.faults import disk
from e2e.faults.fork_server import Child, ForkServer
from e2e.faults.proxy import Moment, Proxy, Trigger
from rljob.api.models import RLJob
from rljob.local import process_cleanup, watchdog
from rljob.protocol import health_probe
from rljob.protocol import messages as m

COMPONENTS = ("coordinator", "runner", "reward", "agent", "trainer")
ARGUMENTS = {"agent": ["--seconds-per-token", "0.001", "--max-concurrency", "16"]}
HANG_SECONDS = 1.0
RESTART_SECONDS = 0.03
GRACE_SECONDS = 5.0
ASK_SECONDS = 0.02


class FaultEnvironment(Harness):
    """See module. Use inside ``async with``.

    Args:
        job: the resolved manifest.
        storage: the run directory.
        fork_server: what starts the components.
    """

    def __init__(self, job: RLJob, storage: Path, fork_server: ForkServer) -> None:
        super().__init__(job, storage)
        (storage / "logs").mkdir(exist_ok=True)
        (storage / "heartbeats").mkdir(exist_ok=True)
        self.applied = 0  # batches that the trainer has said are applied
        self._fork_server = fork_server
        self._children: dict[str, Child] = {}
        self.proxy = Proxy(self.coordinator_url, self.reward_urls, self._hear)

    async def __aenter__(self) -> FaultEnvironment:
        await self.proxy.__aenter__()
        for component in COMPONENTS:
            await self.start(component, *ARGUMENTS.get(component, []))
        while len(self._children) < len(COMPONENTS):
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), ASK_SECONDS)
            for task in self._tasks.values():
                if task.done():
                    task.result()  # what kept it from starting is said, not waited for
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for component in COMPONENTS:
            self._end(component)
        await asyncio.wait(self._tasks.values(), timeout=GRACE_SECONDS)
        for component in COMPONENTS:
            self._children[component].signal(signal.SIGKILL)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.proxy.__aexit__()

    def variables(self, component: str) -> dict[str, str]:
        """Return the environment variables of a component, which reaches others through the proxy only."""
        return super().variables(component) | {
            "RLJOB_COORDINATOR": self.proxy.url,
            "RLJOB_REWARD_URLS": json.dumps(self.proxy.reward_urls),
            health_probe.HEARTBEAT: str(self._heartbeat(component)),
        }

    # --- waiting ---

    async def struck(self, moment: Moment, strike: Callable[[], None]) -> None:
        """Have ``strike`` called at ``moment``, and wait until it was."""
        trigger = self.proxy.trigger = Trigger(moment, strike)
        await trigger.struck.wait()

    def has_ended(self, component: str) -> bool:
        """Return whether a component ended for good."""
        return self._tasks[component].done()

    async def until_applied(self, batches: int) -> None:
        """Wait until so many batches are applied, or the trainer has ended because the run is over."""
        while self.applied < batches and not self._tasks["trainer"].done():
            self._news.clear()
            await self._news.wait()

    async def succeeded(self) -> None:
        """Wait until the coordinator says that the run is over."""
        while (await self._ask("get", "/v1/status")).get("state") != "Succeeded":
            await asyncio.sleep(ASK_SECONDS)

    async def describe(self) -> str:
        """Return how the run is, for a person."""
        ends = [f"{component}: {task.exception() or 'ended'}" for component, task in self._tasks.items() if task.done()]
        status = await self._ask("get", "/v1/status")
        shown = {name: status.get(name) for name in ("state", "message", "progress", "queues", "components")}
        return f"no longer kept alive: {ends}; status: {json.dumps(shown)}"

    async def _ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Return the status that the coordinator answers; empty when it does not."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2), headers=headers) as session:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.request(method, self.coordinator_url + path) as response:
                    status: dict[str, Any] = await response.json()
                    return status
        return {}

    def _hear(self, component: str, message: Any) -> None:
        if isinstance(message, m.StepDone) and message.step >= self.applied:
            self.applied = message.step + 1
            self._news.set()

    # --- components ---

    async def resume(self, job: RLJob) -> None:
        """Go on with a job that may have more steps, as the same command would that started it."""
        self.job = job
        (self.storage / "job.json").write_text(job.model_dump_json(by_alias=True))
        before = self._children["coordinator"]
        self._end("coordinator")
        # Its end is waited for, or the trainer would be told once more, and its keeper, that the run is over.
        if await asyncio.shield(before.ended) == 0:  # else its keeper starts it again, as one that was killed
            await self.start("coordinator")
        if self._tasks["trainer"].done():
            await self.start("trainer")

    async def suspend(self) -> None:
        """Ask the coordinator to stop until it has, as `rljob stop` does."""
        headers = {"Authorization": f"Bearer {TOKENS['operator']}"}
        while (await self._ask("post", "/v1/suspend", headers)).get("state") not in ("Suspended", "Succeeded"):
            await asyncio.sleep(ASK_SECONDS)

    def _end(self, component: str) -> None:
        child = self._children.get(component)
        if child is not None:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)

    def _heartbeat(self, component: str) -> Path:
        return self.storage / "heartbeats" / component

    async def _keep(self, component: str, arguments: tuple[str, ...]) -> None:
        """Restart a component whenever it dies or hangs, until it exits with 0; a trainer until the run is over."""
        while not self._stopping:
            self.restarts[component] += 1
            with contextlib.suppress(OSError):  # on a full disk it stays as the process before left it
                watchdog.reset(self._heartbeat(component))
            log = self.storage / "logs" / f"{component}.log"
            child = self._children[component] = await self._fork_server.start(
                component, arguments, self.variables(component), log
            )
            self._news.set()
            if self._stopping:
                self._end(component)
            watching = asyncio.create_task(self._watch(component, child))
            code = await asyncio.shield(child.ended)
            watching.cancel()
            is_done = code == 0 and (component != "trainer" or await self._is_over())
            self._news.set()
            if is_done:
                return
            if code == 2:
                raise RuntimeError(f"{component} ended with 2; see {log}")
            await asyncio.sleep(RESTART_SECONDS)

    async def _is_over(self) -> bool:
        """Return whether the coordinator says that the run is over for good. A trainer's end does not say so: when a
        suspended run is resumed it may still be on its way out, and the coordinator that told it to stop may have died.
        `rljob run` starts it again, too, until the coordinator says how the run ended."""
        return (await self._ask("get", "/v1/status")).get("state") in ("Succeeded", "Failed")

    async def _watch(self, component: str, child: Child) -> None:
        """Kill a component that has not moved for too long, by the supervisor's own rule."""
        stillness = watchdog.HangDetector(HANG_SECONDS, time.monotonic())
        beats = self._heartbeat(component)
        while not stillness.observe(time.monotonic(), beats.stat().st_mtime_ns, process_cleanup.is_stopped(child.pid)):
            await asyncio.sleep(HANG_SECONDS / 10)
        child.signal(signal.SIGKILL)

    # --- faults: each returns what ends it, if it does not end by itself ---

    def kill_9(self, component: str) -> None:
        """End a component as by kill -9."""
        self._children[component].signal(signal.SIGKILL)

    def stop(self, component: str, seconds: float | None) -> None:
        """Stop a component's process for ``seconds``, or for good."""
        child = self._children[component]
        child.signal(signal.SIGSTOP)
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, child.signal, signal.SIGCONT)

    def cut(self, component: str) -> None:
        """Break a component's connections."""
        self.proxy.cut(component)

    def fill_disk(self, seconds: float) -> None:
        """Leave no room in the run directory, for ``seconds``."""
        disk.fill(self.storage)
        asyncio.get_running_loop().call_later(seconds, disk.empty, self.storage)
