"""Puts an agent together from what its process was told, and ends it on a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

from rljob.protocol.environment import PartEnvironment
from rljob.protocol.link import RefusedError
from rljob.rollout.adapters import ADAPTERS
from rljob.rollout.agent import Agent
from rljob.rollout.supervisor import EngineProcess, EngineStartError

log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """Nothing that a restart of the agent could mend."""


def build(environment: PartEnvironment) -> Agent:
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
    return Agent(pool, start_engine, environment.coordinator, environment.token)


async def serve(environment: PartEnvironment) -> None:
    """Run the agent until it is drained or SIGTERM or SIGINT arrives.

    Raises:
        ValueError: see :func:`build`.
        GivenUpError: the engine cannot start, or the coordinator refuses the agent.
    """
    running = asyncio.ensure_future(build(environment).run())
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, running.cancel)
    try:
        await running
    except* (EngineStartError, RefusedError) as group:
        raise GivenUpError(str(group.exceptions[0])) from None
    except* asyncio.CancelledError:
        log.info("stopped")
