"""Ray on one host of an engine that spans hosts: a child process that runs KubeRay's command.

The head's host runs the agent besides, which starts the engine's server once all hosts have joined. The server asks Ray
for the workers. All connections of Ray inside the engine have a token (RAY_AUTH_TOKEN_PATH), so other pods of the job
cannot use it. If Ray ends on a host, so does its process, and the operator replaces the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import metadata

from rljob.protocol.environment import RAY_AUTH_MODE, RAY_START, RAY_TOKEN_FILE
from rljob.protocol.parent_death import die_with_parent
from rljob.rollout.exit_diagnosis import describe_end, oom_kills

log = logging.getLogger(__name__)

OLDEST_RAY = (2, 52)
"""The first version of Ray that refuses connections without the token."""
RAY_PROGRAM = "ray.scripts.scripts"
TRY_SECONDS = 1.0
TEMPORARY_DIRECTORY = "/tmp"
HOST_IP = "VLLM_HOST_IP"
"""Variable of vLLM's processes: the address at which those of other hosts reach them."""


class RayEndedError(Exception):
    """Ray has ended on this host."""


class RayNode:
    """Ray on this host, from start to end. Made by :meth:`start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._oom_kills = oom_kills()

    @classmethod
    async def start(cls, host: str) -> RayNode:
        """Start Ray.

        Args:
            host: address of this pod.

        Raises:
            ValueError: this pod cannot run Ray with a token; see :func:`ray_command`.
        """
        command = ray_command(os.environ, host)
        process = await asyncio.create_subprocess_exec(
            *command,
            env=ray_environment(os.environ, host),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        log.info("Ray started: pid %d", process.pid)
        return cls(process)

    async def wait_ended(self) -> str:
        """Wait until Ray has ended; return how."""
        code = await self._process.wait()
        return describe_end(code, oom_kills() > self._oom_kills, "Ray")

    async def stop(self) -> None:
        """Kill Ray and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def ray_command(environment: Mapping[str, str], host: str) -> list[str]:
    """Return the command that starts Ray in this pod: that of KubeRay, with the address of the pod.

    Raises:
        ValueError: KubeRay has not set its command, Ray is missing or too old, or there is no token.
    """
    given = shlex.split(environment.get(RAY_START, ""))
    if given[:2] != ["ray", "start"]:
        raise ValueError(f"{RAY_START} is not the command that starts Ray; KubeRay sets it in the pods of a RayCluster")
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"hosts: Ray is not installed in this image; use one with ray {_text(OLDEST_RAY)} or later")
    version = metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_RAY:
        raise ValueError(
            f"hosts: Ray {version} of this image cannot check the token of its connections; use an image with ray "
            f"{_text(OLDEST_RAY)} or later"
        )
    if environment.get(RAY_AUTH_MODE) != "token" or not environment.get(RAY_TOKEN_FILE):
        raise ValueError(f"{RAY_AUTH_MODE} is not token, or {RAY_TOKEN_FILE} is not set; the operator sets both")
    return [sys.executable, "-m", RAY_PROGRAM, *given[1:], f"--node-ip-address={host}"]


def ray_environment(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables of Ray's processes, which the workers of the engine inherit."""
    kept = {name: value for name, value in environment.items() if name not in ("RLJOB_TOKEN", "RLJOB_TOKEN_FILE")}
    return kept | {
        HOST_IP: host,
        "TMPDIR": TEMPORARY_DIRECTORY,  # the server has a directory of its own, which other hosts do not have
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would kill workers before the kernel does
    }


async def wait_joined(hosts: int) -> None:
    """Return when Ray on so many hosts has joined this host's."""
    while True:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rljob.rollout.ray_hosts",
            str(hosts),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            if await process.wait() == 0:
                return
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()
        await asyncio.sleep(TRY_SECONDS)


async def while_ray_runs(host: str, hosts: int, run: Callable[[], Awaitable[None]]) -> None:
    """Start Ray, wait for all hosts, and run ``run``.

    Args:
        host: address of this pod.
        hosts: of the engine.
        run: what to do then. It is cancelled if Ray ends.

    Raises:
        ValueError: see :meth:`RayNode.start`.
        RayEndedError: Ray has ended.
    """
    node = await RayNode.start(host)

    async def wait_and_run() -> None:
        log.info("waiting until %d hosts have joined", hosts)
        await wait_joined(hosts)
        await run()

    running, ended = asyncio.ensure_future(wait_and_run()), asyncio.ensure_future(node.wait_ended())
    try:
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        else:
            raise RayEndedError(ended.result())
    finally:
        for task in (running, ended):
            task.cancel()
        await asyncio.gather(running, ended, return_exceptions=True)
        await node.stop()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
