"""Puts an agent together from what its process was told, and ends it on a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

from rljob.protocol.coordinator_link import RefusedError
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.heartbeat import beating
from rljob.rollout.adapters import ADAPTERS
from rljob.rollout.agent import Agent
from rljob.rollout.supervisor import EngineProcess, EngineStartError

log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """Nothing that a restart of the agent could mend."""


class MachineError(Exception):
    """This machine cannot start a server now: no room on its disk, no more processes."""


def build(environment: ComponentEnvironment) -> Agent:
    """Return the agent of the pool that the environment names.

    Raises:
        ValueError: there is no such pool, or no model where the manifest says.
    """
    spec = environment.job.spec
    pool = next((pool for pool in spec.rollouts if pool.name == environment.name), None)
    if pool is None:
        raise ValueError(f"RLJOB_NAME: there is no pool called {environment.name!r}; name an entry of rollouts")
    source = next(model.source for model in spec.models if model.name == pool.model)
    model = environment.path(source)
    if not (model / "config.json").is_file():
        raise ValueError(f"models: {model} holds no Hugging Face model (no config.json); check source {source!r}")
    start_engine = partial(EngineProcess.start, ADAPTERS[pool.engine](pool, model))
    return Agent(pool, start_engine, environment.coordinator, environment.token, environment.instance)


async def serve(environment: ComponentEnvironment) -> None:
    """Run the agent until it is drained, or SIGTERM or SIGINT arrives and what it has is handed back; a second signal
    ends it at once.

    Raises:
        ValueError: see :func:`build`.
        GivenUpError: the engine cannot start, or the coordinator refuses the agent.
        MachineError: the machine cannot start it now.
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
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, end)
    given_up: GivenUpError | MachineError | None = None  # raised in an except* clause it would come in a group
    try:
        with beating():
            await running
    except* EngineStartError as group:
        error = group.exceptions[0]
        assert isinstance(error, EngineStartError)
        log.error("the last lines of the engine server:\n%s", error.last_lines)
        given_up = GivenUpError(f"rollouts: pool {environment.name!r} cannot start its engine: {error}")
    except* OSError as group:
        given_up = MachineError(f"pool {environment.name!r} cannot start its engine: {group.exceptions[0]}")
    except* RefusedError as group:
        given_up = GivenUpError(str(group.exceptions[0]))
    except* asyncio.CancelledError:
        log.info("stopped")
    if given_up is not None:
        raise given_up
