"""The agent of one engine: its link to the coordinator, and the life of its server.

The agent is in one of three states. *starting*: there is no server, or it is not healthy yet; the coordinator hears
heartbeats but no registration. *ready*: registered; it runs requests once it has weights a WeightAck spoke of.
*updating*: weights are on their way, or an update failed and the engine stays paused for the next.

A server that dies is started again with back-off, under a new instance without weights. What it had in hand is
dropped: the new registration lists nothing as running. A Generate that was under way to the old instance is ignored
for the same reason: the coordinator takes it back when it reads the registration.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from rljob.api.models import Rollout
from rljob.protocol.link import Link
from rljob.protocol.messages import (
    Abort,
    AckCompletions,
    Completions,
    Drain,
    EngineHeartbeat,
    Generate,
    PrepareWeights,
    RegisterEngine,
    RestartEngine,
    ToAgent,
    WeightAck,
    WeightFailed,
)
from rljob.rollout.adapters.base import Adapter
from rljob.rollout.requests import RequestTable
from rljob.rollout.supervisor import EngineProcess, EngineStartError
from rljob.rollout.updates import GRACE_SECONDS, UpdateError, WeightUpdater

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
FAILED_STARTS = 3
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
FORGIVEN_AFTER_SECONDS = 60.0  # a server that lived so long starts the back-off anew


class DrainedError(Exception):
    """Everything in hand is done, as Drain asked: the agent ends."""


class Agent:
    """One engine's agent.

    Args:
        pool: the manifest's entry the engine belongs to.
        adapter: the kind of engine.
        coordinator: its address.
        token: the role's token.
    """

    def __init__(self, pool: Rollout, adapter: Adapter, coordinator: str, token: str) -> None:
        self._pool = pool
        self._adapter = adapter
        self._link = Link(coordinator, "agent", token, ToAgent, self._register)
        self._state = "starting"
        self._instance = ""
        self._weights = (-1, -1)  # lineage, version
        self._unsaid: WeightAck | WeightFailed | None = None
        self._restarts = 0
        self._engine: EngineProcess | None = None
        self._updater: WeightUpdater | None = None
        self._updates: set[asyncio.Task[None]] = set()
        self._update_lock = asyncio.Lock()
        self._restart_wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._requests = RequestTable(pool.max_concurrency, self._link.send, self._spawn, self._check_engine)

    async def run(self) -> None:
        """Serve until drained.

        Raises:
            EngineStartError: the server failed to start FAILED_STARTS times in a row.
            RefusedError: the coordinator refuses this agent for good.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._supervise())
                tasks.create_task(self._listen())
                tasks.create_task(self._beat())
        except* DrainedError:
            log.info("drained")
        finally:
            if self._engine is not None:
                await self._engine.stop()

    # --- the server ---------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failures, backoff = 0, FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            self._engine = await EngineProcess.start(self._adapter)
            try:
                await self._engine.wait_healthy()
            except EngineStartError as error:
                failures += 1
                if failures == FAILED_STARTS:
                    raise
                reason = str(error)
            else:
                log.info("engine healthy after %.1f s", time.monotonic() - began)
                failures = 0
                reason = await self._serve(self._engine)
            log.warning("%s; it is started again", reason)
            await self._engine.kill()
            self._engine = None
            self._restarts += 1
            backoff = FIRST_BACKOFF_SECONDS if time.monotonic() - began > FORGIVEN_AFTER_SECONDS else backoff
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _serve(self, engine: EngineProcess) -> str:
        """Serve from a healthy server until it ends or has to; return why."""
        self._instance = f"{self._pool.name}-{secrets.token_hex(4)}"
        self._weights, self._unsaid = (-1, -1), None
        self._updater = WeightUpdater(engine.client)
        self._restart_wanted.clear()
        self._requests.attach(engine.client)
        self._set_state("ready")
        for message in self._register():
            self._link.send(message)
        self._ready.set()
        ended = asyncio.create_task(engine.wait_ended())
        wanted = asyncio.create_task(self._restart_wanted.wait())
        try:
            await asyncio.wait({ended, wanted}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else "the engine server has to go"
        finally:
            ended.cancel()
            wanted.cancel()
            self._weights, self._updater = (-1, -1), None
            self._ready.clear()
            for update in self._updates:
                update.cancel()
            self._requests.detach()
            self._set_state("starting")

    async def _check_engine(self) -> bool:
        """Return whether the server lives on after it failed a request; have it restarted if it does not."""
        engine = self._engine
        if engine is not None and await engine.client.healthy():
            return True
        self._restart_wanted.set()
        return False

    # --- the link -----------------------------------------------------------------------------------------------------

    def _register(self) -> list[Any]:
        """Return what to say first on a connection, or when a new server is ready."""
        lineage, version = self._weights
        messages: list[Any] = [
            RegisterEngine(
                self._instance,
                self._pool.name,
                self._pool.max_concurrency,
                self._pool.max_model_length,
                lineage,
                version,
                self._requests.in_hand(),
            )
        ]
        unacknowledged = self._requests.unacknowledged()
        if unacknowledged:
            messages.append(Completions(unacknowledged))
        if self._unsaid is not None:
            messages.append(self._unsaid)
            self._unsaid = None
        messages.append(self._heartbeat())
        return messages

    async def _listen(self) -> None:
        await self._ready.wait()
        async for message in self._link.messages():
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case Generate():
                if self._weights[1] >= 0:  # else it was meant for the server before this one
                    self._requests.generate(message)
            case AckCompletions():
                self._requests.acknowledge(message.parts)
            case Abort():
                self._requests.abort(message.parts, message.discard)
            case PrepareWeights():
                update = self._spawn(self._update_weights(message, self._updater))
                self._updates.add(update)
                update.add_done_callback(self._updates.discard)
            case RestartEngine():
                log.warning("restart of the engine asked for: %s", message.reason)
                self._restart_wanted.set()
            case Drain():
                self._spawn(self._drain())

    async def _update_weights(self, message: PrepareWeights, updater: WeightUpdater | None) -> None:
        if updater is None:
            return  # the registration of the server that is starting supersedes it
        async with self._update_lock:
            self._set_state("updating")
            self._requests.hold()
            try:
                answer: WeightAck | WeightFailed = await updater.run(message)
                self._weights = (message.lineage, message.version)
            except UpdateError as error:
                answer = WeightFailed(message.update, str(error))
                log.warning("update %d to version %d failed: %s", message.update, message.version, error)
            self._say(answer)
            if isinstance(answer, WeightFailed) and not await self._responsive():
                self._restart_wanted.set()
            elif not updater.tainted:
                self._set_state("ready")
                self._requests.release()

    async def _responsive(self) -> bool:
        engine = self._engine
        if engine is None:
            return False
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                return await engine.client.responsive()
        except TimeoutError:
            return False

    async def _drain(self) -> None:
        await self._requests.wait_empty()
        raise DrainedError

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._link.send(self._heartbeat())

    def _heartbeat(self) -> EngineHeartbeat:
        return EngineHeartbeat(self._state, self._requests.running, self._requests.waiting, self._restarts)

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._link.send(self._heartbeat())

    def _say(self, answer: WeightAck | WeightFailed) -> None:
        """Tell how an update ended, now or with the next registration."""
        if self._link.connected:
            self._link.send(answer)
        else:
            self._unsaid = answer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)
