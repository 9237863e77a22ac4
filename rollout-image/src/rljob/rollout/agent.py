"""The agent of one engine: its link to the coordinator, and the lifecycle of its server.

The agent is in one of three states. *starting*: there is no server, or it is not healthy yet; the coordinator receives
heartbeats and the reason why the previous server ended, but no registration. *ready*: registered; it runs requests once
it has sent a WeightAck. *updating*: an update is in progress, or it failed and left the engine paused for the next one.

On SIGTERM the agent is *leaving*: it accepts no request and aborts those it has, so that another engine continues from
their tokens.

A server that dies is restarted with back-off, as a new instance without weights. Its requests are dropped: the new
registration lists no running request, so the coordinator dispatches them again. A Generate that was sent to the old
instance is ignored for the same reason: the coordinator takes it back when it reads the registration.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import (
    HEARTBEAT_SECONDS,
    Abort,
    AckCompletions,
    EngineCrashed,
    EngineHeartbeat,
    Forget,
    Generate,
    PrepareWeights,
    RegisterEngine,
    RestartEngine,
    SamplingParams,
    ToAgent,
    WeightAck,
    WeightFailed,
)
from rljob.protocol.coordinator_link import CoordinatorLink
from rljob.protocol.health_probe import record_ready
from rljob.protocol.known_tensors import KnownTensors
from rljob.rollout.adapters.base import EngineError, engine_errors
from rljob.rollout.engine_restarts import FLUSH_SECONDS, EngineRestarts
from rljob.rollout.requests import RequestTable
from rljob.rollout.supervisor import EngineProcess, EngineStartError
from rljob.rollout.weight_update import GRACE_SECONDS, UpdateError, WeightUpdater

log = logging.getLogger(__name__)

LEAVING_SECONDS = 5.0  # to hand back all requests


NO_WEIGHTS = (-1, -1, "")  # lineage, version, digest


class Agent:
    """One engine's agent.

    Args:
        pool: the manifest's entry of the engine.
        start_engine: starts a server of the pool.
        coordinator: its URL.
        token: the role's token.
        stall_seconds: a server that generates no token for this long, although it has requests, is replaced.
        pod: name of the agent's pod; empty outside a cluster.
    """

    def __init__(
        self,
        pool: Rollout,
        start_engine: Callable[[], Awaitable[EngineProcess]],
        coordinator: str,
        token: str,
        stall_seconds: float,
        pod: str = "",
    ) -> None:
        self._pool = pool
        self._stall_seconds = stall_seconds
        self._pod = pod
        self._link = CoordinatorLink(coordinator, "agent", token, ToAgent, self._register)
        self._state = "starting"
        self._instance = ""
        self._weights = NO_WEIGHTS
        self._served = False  # whether this server has received weights
        self._unsent_result: WeightAck | WeightFailed | None = None
        self._restarts = 0
        self._crash: EngineCrashed | None = None  # of the previous server
        self._servers = EngineRestarts(start_engine, self._serve, self._report)
        self._updater: WeightUpdater | None = None
        self._updates: set[asyncio.Task[None]] = set()
        self._update_lock = asyncio.Lock()
        self._updates_begun = 0
        self._tensors = KnownTensors()
        self._replace_requested: asyncio.Future[tuple[str, bool]] | None = None
        """Reason of the replacement, and whether the server failed by itself."""
        self._requests = RequestTable(pool.max_concurrency, self._link.send, self._spawn, self._check_engine)

    async def leave(self) -> None:
        """Accept no more requests and hand back all requests; return when the coordinator has acknowledged them, or
        after LEAVING_SECONDS."""
        if self._state == "starting":
            return
        record_ready(False)
        self._set_state("leaving")
        self._requests.hold()
        self._requests.abort(self._requests.unfinished(), discard=False)
        try:
            async with asyncio.timeout(LEAVING_SECONDS):
                emptied = asyncio.create_task(self._requests.wait_empty())
                while self._link.connected and not emptied.done():
                    await asyncio.wait({emptied}, timeout=FLUSH_SECONDS)
                emptied.cancel()
        except TimeoutError:
            log.warning("not all requests could be handed back; the coordinator dispatches them again")

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            EngineStartError: see :meth:`EngineRestarts.run`.
            RefusedError: the coordinator rejects this agent permanently.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._servers.run())
                tasks.create_task(self._listen())
                tasks.create_task(self._send_heartbeats())
                tasks.create_task(self._watch_generation())
        finally:
            await self._servers.stop()

    # --- the server ---------------------------------------------------------------------------------------------------

    def _report(self, reason: str, last_lines: str, starting: bool, final: bool) -> None:
        """Send EngineCrashed now, and on every connection until the next server is ready."""
        self._restarts += 1
        self._crash = EngineCrashed(self._pool.name, reason, last_lines, self._restarts, starting, final)
        self._link.send(self._crash)

    async def _serve(self, engine: EngineProcess) -> str:
        """Serve from a healthy server until it ends or is replaced; return the reason.

        Raises:
            EngineStartError: the server failed by itself before it received weights; counts as a failed start.
        """
        self._instance = f"{self._pool.name}-{secrets.token_hex(4)}"
        self._unsent_result = None
        self._updater = WeightUpdater(engine.client)
        self._replace_requested = asyncio.get_running_loop().create_future()
        self._requests.attach(engine.client)
        self._state = "ready"
        record_ready(True)
        for message in self._register():
            self._link.send(message)
        ended = asyncio.create_task(engine.wait_ended())
        either: set[asyncio.Future[Any]] = {ended, self._replace_requested}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            served, self._served = self._served, False
            self._weights, self._updater = NO_WEIGHTS, None
            for update in self._updates:
                update.cancel()
            self._requests.detach()
            record_ready(False)
            self._set_state("starting")
        reason, own_fault = (ended.result(), True) if ended.done() else self._replace_requested.result()
        if own_fault and not served:
            sentence = f"{reason} (it had not received weights yet)"
            raise EngineStartError(sentence, engine.last_lines(), killed=engine.killed)
        return reason

    def _request_replacement(self, reason: str, own_fault: bool) -> None:
        """Request the replacement of the server."""
        if self._replace_requested is not None and not self._replace_requested.done():
            self._replace_requested.set_result((reason, own_fault))

    async def _check_engine(self) -> bool:
        """Return whether the server is healthy after it failed a request; request its replacement if not."""
        engine = self._servers.engine
        if engine is not None and await engine.client.healthy():
            return True
        reason = "the engine inside the server is dead"
        self._request_replacement(reason if engine is None else engine.explain(reason), own_fault=True)
        return False

    # --- the link -----------------------------------------------------------------------------------------------------

    def _register(self) -> list[Any]:
        """Return the first messages of a connection, which are also sent when a new server is ready."""
        messages: list[Any] = []
        if self._state != "starting":
            lineage, version, digest = self._weights
            messages.append(
                RegisterEngine(
                    self._instance,
                    self._pool.name,
                    self._pool.max_concurrency,
                    self._pool.max_model_length,
                    lineage,
                    version,
                    self._requests.unfinished(),
                    digest,
                    self._pod,
                )
            )
        elif self._crash is not None:
            messages.append(self._crash)
        messages += self._requests.unacknowledged()
        if self._unsent_result is not None:
            messages.append(self._unsent_result)
            self._unsent_result = None
        messages.append(self._heartbeat())
        return messages

    async def _listen(self) -> None:
        async for message in self._link.messages():
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case Generate():
                if self._served and self._state != "leaving":  # else it was sent to the previous server
                    self._requests.generate(message)
            case Forget():
                self._requests.forget(message.contexts)
            case AckCompletions():
                self._requests.acknowledge(message.request_ids)
            case Abort():
                self._requests.abort(message.request_ids, message.discard)
            case PrepareWeights() if message.engine in ("", self._instance):
                self._prepare(message)
            case RestartEngine():
                self._request_replacement(f"the coordinator replaces the engine: {message.reason}", own_fault=False)

    def _prepare(self, message: PrepareWeights) -> None:
        """Begin an update. Of parameters that were sent before the message has only the digest."""
        parameters = self._tensors.of(message.tensors, message.parameters)
        if parameters is None:
            self._send_result(WeightFailed(message.update, "the coordinator did not send the list of tensors"))
            return
        message.parameters = parameters
        update = self._spawn(self._update_weights(message, self._updater))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def _update_weights(self, message: PrepareWeights, updater: WeightUpdater | None) -> None:
        if updater is None:
            return  # the registration of the next server supersedes the update
        async with self._update_lock:
            self._updates_begun += 1
            self._set_state("updating")
            self._requests.hold()
            try:
                ack = await updater.run(message)
                answer: WeightAck | WeightFailed = ack
                self._weights, self._served = (ack.lineage, ack.version, ack.digest), True
            except UpdateError as error:
                answer = WeightFailed(message.update, str(error))
                self._weights = NO_WEIGHTS if updater.tainted else self._weights
                log.warning("update %d to version %d failed: %s", message.update, message.version, error)
            self._send_result(answer)
            if isinstance(answer, WeightFailed) and not await self._is_usable():
                return
            if not updater.tainted:
                self._set_state("ready")
                self._requests.release()

    async def _is_usable(self) -> bool:
        """Return whether the engine is usable after a failed update; request its replacement if not."""
        engine = self._servers.engine
        if engine is None or not await self._check_engine():
            return False
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                if await engine.client.responsive():
                    return True
        except TimeoutError:
            pass
        self._request_replacement("the engine does not answer after a failed update", own_fault=False)
        return False

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._link.send(self._heartbeat())

    async def _watch_generation(self) -> None:
        """Replace a server that answers, but does not generate. A long response is no stall: if no request has ended
        during half of ``stall_seconds``, the server must generate one token in the other half."""
        half, number = self._stall_seconds / 2, 0
        while True:
            await asyncio.sleep(half / 4)
            if self._requests.seconds_without_progress < half or self._state != "ready":
                continue
            number += 1
            await self._probe_generation(f"watch-{number}", half)

    async def _probe_generation(self, name: str, seconds: float) -> None:
        engine, updates = self._servers.engine, self._updates_begun
        if engine is None:
            return
        try:
            async with asyncio.timeout(seconds):
                with engine_errors():
                    await engine.client.generate(name, self._requests.a_token, SamplingParams(1.0, 1, [], 0))
            self._requests.note_progress()
        except TimeoutError:
            if engine is self._servers.engine and updates == self._updates_begun and self._state == "ready":
                limit = f"{self._stall_seconds:g} s (failurePolicy.stallSeconds)"
                self._request_replacement(f"the engine answered, but generated no token for {limit}", own_fault=True)
        except EngineError:
            await self._check_engine()

    def _heartbeat(self) -> EngineHeartbeat:
        return EngineHeartbeat(self._state, self._requests.running, self._requests.waiting, self._restarts)

    def _set_state(self, state: str) -> None:
        if state != self._state and self._state != "leaving":
            self._state = state
            self._link.send(self._heartbeat())

    def _send_result(self, answer: WeightAck | WeightFailed) -> None:
        """Send the result of an update, now or with the next registration."""
        if self._link.connected:
            self._link.send(answer)
        else:
            self._unsent_result = answer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)
