"""The agent's process: builds the agent of a pool, or the engine of a frozen one, and ends it on a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from typing import Protocol

from rljob.protocol.coordinator_link import RefusedError
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.heartbeat import beating
from rljob.protocol.model_cache import read_model
from rljob.rollout.adapters.load_adapter import load_adapter, serving
from rljob.rollout.agent import Agent
from rljob.rollout.frozen_engine import FrozenEngine
from rljob.rollout.ray_node import RayEndedError, while_ray_runs
from rljob.rollout.supervisor import EngineProcess, EngineStartError

log = logging.getLogger(__name__)


class FatalStartError(Exception):
    """A failure that a restart of the agent cannot correct."""


class ResourceError(Exception):
    """This machine cannot start a server now: its disk is full, no further process can be created, or something kills
    the server."""


class EngineService(Protocol):
    """What this process runs."""

    async def run(self) -> None:
        """Serve until cancelled."""

    async def leave(self) -> None:
        """Hand back the requests in flight, or finish them."""


class AcrossHosts:
    """A service whose engine has several hosts: it runs while Ray runs on this one, and begins when all have joined."""

    def __init__(self, service: EngineService, host: str, hosts: int) -> None:
        self._service, self._host, self._hosts = service, host, hosts

    async def run(self) -> None:
        """Serve until cancelled; errors: see :func:`~rljob.rollout.ray_node.while_ray_runs`."""
        await while_ray_runs(self._host, self._hosts, self._service.run)

    async def leave(self) -> None:
        """See :class:`EngineService`."""
        await self._service.leave()


def build(environment: ComponentEnvironment) -> EngineService:
    """Return the agent of the pool that the environment names; of a frozen pool its engine.

    Raises:
        ValueError: there is no such pool, its engine cannot be loaded, or its model is missing or cannot be downloaded.
        ModelUnavailableError: the download of its model failed and may be repeated.
    """
    spec = environment.job.spec
    index = next((i for i, pool in enumerate(spec.rollouts) if pool.name == environment.name), None)
    if index is None:
        raise ValueError(f"RLJOB_NAME: there is no pool called {environment.name!r}; name an entry of rollouts")
    pool = spec.rollouts[index]
    source = next(model.source for model in spec.models if model.name == pool.model)
    model = read_model(environment, pool.model)
    if not (model / "config.json").is_file():
        raise ValueError(f"models: {model} holds no Hugging Face model (no config.json); check source {source!r}")
    adapter = load_adapter(spec, index, model)
    stall_seconds = environment.job.spec.failure_policy.stall_seconds
    if pool.frozen:
        start_frozen = partial(EngineProcess.start, adapter, serving(adapter, spec, index).launch_frozen)
        service: EngineService = FrozenEngine(pool, start_frozen, environment.listen, environment.token, stall_seconds)
    else:
        start_engine = partial(EngineProcess.start, adapter)
        token, instance = environment.token, environment.instance
        service = Agent(pool, start_engine, environment.coordinator, token, stall_seconds, instance)
    return service if pool.hosts == 1 else AcrossHosts(service, environment.host, pool.hosts)


async def serve(environment: ComponentEnvironment) -> None:
    """Run the agent until SIGTERM or SIGINT, then hand back its requests; a second signal ends it at once.

    Raises:
        FatalStartError: the engine cannot start, or the coordinator rejects the agent.
        ValueError: see :func:`build`; or this pod cannot connect the hosts of its engine.
        ResourceError: the machine cannot start the engine now, or the connection of its hosts has ended.
        ModelUnavailableError: see :func:`build`.
    """
    agent = build(environment)
    running = asyncio.ensure_future(agent.run())
    leaving: list[asyncio.Task[None]] = []

    async def leave() -> None:
        await agent.leave()
        running.cancel()

    def end() -> None:
        if leaving:
            running.cancel()
        leaving.append(asyncio.create_task(leave()))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    failure: FatalStartError | ResourceError | None = None  # raising it in an except* clause would wrap it in a group
    try:
        with beating():
            await running
    except* EngineStartError as group:
        error = group.exceptions[0]
        assert isinstance(error, EngineStartError)
        log.error("the last lines of the engine server:\n%s", error.last_lines)
        sentence = f"pool {environment.name!r} cannot start its engine: {error}"
        elsewhere = isinstance(agent, AcrossHosts) and not error.permanent  # another host may be the cause
        failure = ResourceError(sentence) if error.killed or elsewhere else FatalStartError(f"rollouts: {sentence}")
    except* OSError as group:
        failure = ResourceError(f"pool {environment.name!r} cannot start its engine: {group.exceptions[0]}")
    except* RayEndedError as group:
        failure = ResourceError(f"an engine of pool {environment.name!r} has ended: {group.exceptions[0]}")
    except* RefusedError as group:
        failure = FatalStartError(str(group.exceptions[0]))
    except* asyncio.CancelledError:
        log.info("stopped")
    if failure is not None:
        raise failure
