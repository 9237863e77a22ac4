"""The other hosts of an engine that spans hosts: Ray, which starts the engine's workers here.

The pod is ready when Ray has joined the head. It ends when Ray ends, so that the engine is replaced.
"""

import asyncio
import signal

from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.health_probe import record_ready
from rljob.protocol.heartbeat import beating
from rljob.protocol.model_cache import read_model
from rljob.rollout.ray_node import RayEndedError, while_ray_runs

LEAVING_SECONDS = 15.0
"""On SIGTERM the host works on for this time, in which the agent on the head's host hands back its requests."""


async def work(environment: ComponentEnvironment) -> None:
    """Run Ray until SIGTERM, and then for LEAVING_SECONDS, or until it ends.

    Raises:
        ValueError: there is no such pool, its model cannot be downloaded, or this pod cannot run Ray
            (:meth:`~rljob.rollout.ray_node.RayNode.start`).
        ModelUnavailableError: the download of the model failed and may be repeated.
        RayEndedError: Ray has ended, and not because of SIGTERM.
    """
    pool = next((pool for pool in environment.job.spec.rollouts if pool.name == environment.name), None)
    if pool is None:
        raise ValueError(f"RLJOB_NAME: there is no pool called {environment.name!r}; name an entry of rollouts")
    await asyncio.to_thread(read_model, environment, pool.model)  # the workers on this host read it
    leaving = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, leaving.set)
    running = asyncio.ensure_future(while_ray_runs(environment.host, 1, _serve))
    stopping = asyncio.ensure_future(leaving.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        record_ready(False)
        await asyncio.wait({running}, timeout=LEAVING_SECONDS)
    finally:
        running.cancel()
        stopping.cancel()
    try:
        await running
    except (asyncio.CancelledError, RayEndedError):
        if not leaving.is_set():
            raise


async def _serve() -> None:
    record_ready(True)
    with beating():
        await asyncio.Event().wait()
