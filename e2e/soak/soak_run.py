"""One run of the soak: `rljob run` behind a proxy, into which faults are injected one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from e2e.faults.proxy import Proxy, Trigger
from e2e.soak.fault import Fault, FaultError
from e2e.soak.plan import FAMILIES, steps_until_restart
from e2e.soak.results import Outcome, RunResult
from e2e.soak.rljob_process import POLL_SECONDS, RljobProcess
from rljob.protocol import trainer_protocol as m

NEW_BATCHES = 2
"""Batches that the run must apply after a fault, besides the maxStaleness ones that may have been sampled before it."""
RECOVERY_SECONDS = 180.0
"""Longest time for them, for a moment to come, and for the start and the end of the run."""
AHEAD_STEPS = 5
"""Batches after which the run is slowed down while a fault lasts: the number of its steps is planned."""
BESIDE_SECONDS = 10.0
"""Between faults that are injected while another one lasts."""
VICTIM_SECONDS = 60.0
"""Longest time until a process that was just killed is there again, and listens."""
END_SECONDS = 45.0
"""Kept free before the deadline for the end of the run."""
MORE_STEPS = 30
"""Steps added when all steps were trained before all faults were injected."""


class SoakRun:
    """See module.

    Args:
        manifest: of the run.
        staleness: maxStaleness of the manifest.
        directory: of the run.
        seed: of everything random in it.
        out: file for the output of `rljob run`.
    """

    def __init__(self, manifest: Path, staleness: int, directory: Path, seed: int, out: Path) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.stopped = psutil.Process()  # the last victim of SIGSTOP
        self.trainer_registered = asyncio.Event()
        self.registered_step = 0
        self.proxy = Proxy("http://127.0.0.1:1", {"sums": "http://127.0.0.1:1"}, self._on_message)
        self.rljob = RljobProcess(manifest, directory, out, self.proxy)
        self._batches = staleness + NEW_BATCHES
        self._applied = 0  # batches
        self._stepped = asyncio.Event()
        self._steps = 1  # of the manifest
        self._limit = 1  # batches, after which the run is slowed down
        self._audits: list[str] = []  # result of each, empty if clean

    async def run(self, faults: list[Fault], deadline: float, result: RunResult) -> None:
        """Start the run, inject ``faults`` until ``deadline`` (monotonic time), and wait for its end.

        Returns after the first fault that the run does not survive.
        """
        async with self.proxy:
            try:
                self._steps = steps_until_restart(faults)
                with result.checking("the run starts"):
                    await self.start()
                    async with asyncio.timeout(RECOVERY_SECONDS):
                        await self._until_applied(1)
                for i, fault in enumerate(faults):
                    if result.failed or time.monotonic() + fault.expected + END_SECONDS > deadline:
                        break
                    if fault.family == "restart":
                        self._steps = max(self._steps, self._applied + steps_until_restart(faults[i + 1 :]))
                    result.add(*await self._inject(fault))
                if not result.failed:
                    with result.checking("the run ends"):
                        await self._finish()
            finally:
                result.end(self._applied, self._audits)
                await self.rljob.stop()

    # --- one fault ---

    async def _inject(self, fault: Fault) -> list[Outcome]:
        """Inject a fault and the faults beside it, wait until the run has recovered; return the outcome of each."""
        begun: list[tuple[Fault, float]] = []
        over, problem = time.monotonic(), ""
        try:
            await self._last(fault, begun)
            over = time.monotonic()
            await self._recover()
        except TimeoutError:
            problem = f"its moment or the next {self._batches} batches did not come within {RECOVERY_SECONDS:g} s"
        except FaultError as error:
            problem = str(error)
        except Exception:  # noqa: BLE001 a defect of the soak: the results so far and the directory are kept
            problem = traceback.format_exc()
        if problem:
            problem += f"\n{self.rljob.tail()}"
        recovered = time.monotonic()
        return [
            Outcome(each.family, each.name, recovered - max(over, began), problem)
            for each, began in begun or [(fault, over)]
        ]

    async def _last(self, fault: Fault, begun: list[tuple[Fault, float]]) -> None:
        """Inject a fault and those beside it, and return when it is over; add each to ``begun`` with its time."""
        self._slow_down_at(self._applied + AHEAD_STEPS)
        await asyncio.sleep(fault.delay)
        await self._begin(fault)
        begun.append((fault, time.monotonic()))
        self._slow_down_at(self._applied + AHEAD_STEPS)
        finishing = asyncio.ensure_future(FAMILIES[fault.family].finish(self, fault))
        try:
            for other in fault.beside:
                await asyncio.wait({finishing}, timeout=BESIDE_SECONDS)
                await self._begin(other)
                begun.append((other, time.monotonic()))
            await finishing
        finally:
            finishing.cancel()
            await asyncio.wait({finishing})

    async def _begin(self, fault: Fault) -> None:
        """Inject a fault at its moment, or as soon as there is its victim."""
        begin = FAMILIES[fault.family].begin
        if fault.moment is None:
            deadline = time.monotonic() + VICTIM_SECONDS
            while True:
                try:
                    return begin(self, fault)
                except FaultError:
                    if time.monotonic() > deadline:
                        raise
                await asyncio.sleep(POLL_SECONDS)  # another process starts the victim
        self._slow_down_at(sys.maxsize)
        injected = False

        def inject() -> None:
            nonlocal injected
            with contextlib.suppress(FaultError):  # the victim is just being replaced: the next such moment
                begin(self, fault)
                injected = True

        async with asyncio.timeout(RECOVERY_SECONDS):
            while not injected:
                trigger = self.proxy.trigger = Trigger(fault.moment, inject)
                await self.until(trigger.injected)

    async def _recover(self) -> None:
        wanted = self._applied + self._batches
        self._slow_down_at(wanted)
        async with asyncio.timeout(RECOVERY_SECONDS):
            await self._until_applied(wanted)

    def victim(self, fault: Fault) -> psutil.Process:
        """Return the process to which a fault happens.

        Raises:
            FaultError: there is none.
        """
        found = self.rljob.find(fault.victim, fault.replica)
        if found is None:
            raise FaultError(f"there is no process {fault.victim}")
        return found

    # --- the life of the run ---

    async def start(self) -> None:
        """Start or resume the run."""
        self.trainer_registered.clear()
        await self.rljob.start(self._steps)

    async def audit(self) -> None:
        """Run `rljob audit`.

        Raises:
            FaultError: it is not clean.
        """
        self._audits.append(await self.rljob.audit())
        if self._audits[-1]:
            raise FaultError(f"the audit is not clean: {self._audits[-1]}")

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event of the run.

        Raises:
            FaultError: the run exited before, and not because all steps were trained.
        """
        while not event.is_set():
            waiting = asyncio.ensure_future(event.wait())
            await asyncio.wait({waiting, self.rljob.exited}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                if code := self.rljob.exited.result():
                    raise FaultError(f"the run exited with code {code}")
                self._steps = self._applied + MORE_STEPS
                await self.start()

    async def _until_applied(self, batches: int) -> None:
        while self._applied < batches:
            self._stepped.clear()
            await self.until(self._stepped)

    def _slow_down_at(self, batches: int) -> None:
        """Slow the run down once it has applied this number of batches."""
        self._limit = batches
        (self.proxy.full_speed.set if self._applied < batches else self.proxy.full_speed.clear)()

    async def _finish(self) -> None:
        """Wait until the run has trained every step; check how it ended and what it left."""
        self._slow_down_at(sys.maxsize)
        async with asyncio.timeout(RECOVERY_SECONDS):
            code = await asyncio.shield(self.rljob.exited)
        status = json.loads((self.directory / "status.json").read_bytes())
        ended = (code, status["state"], status["progress"]["step"])
        if ended != (0, "Succeeded", self._steps):
            raise FaultError(f"exit code, state and step are {ended}, not {(0, 'Succeeded', self._steps)}")
        await self.rljob.wait_clean()
        await self.audit()

    def _on_message(self, component: str, message: Any) -> None:
        if isinstance(message, m.StepDone) and message.step >= self._applied:
            self._applied = message.step + 1
            self._stepped.set()
            self._slow_down_at(self._limit)
        elif isinstance(message, m.RegisterTrainer) and message.incarnation == 0:
            self.registered_step = message.step
            self.trainer_registered.set()
