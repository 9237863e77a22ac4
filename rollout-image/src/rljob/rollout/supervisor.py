"""The engine's server as a process: started, watched, its last words kept, killed with everything it started.

The server leads a process group of its own. It dies with the agent whatever kills the agent (see
``vllm_engine.parentage``), and :meth:`EngineProcess.kill` leaves nothing of the group behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections import deque

from rljob.rollout.adapters.base import Adapter, EngineClient

log = logging.getLogger(__name__)

TAIL_LINES = 40
LINE_BYTES = 1 << 20
HEALTH_POLL_SECONDS = 0.1
STOP_SECONDS = 3.0


class EngineStartError(Exception):
    """The server ended before it was healthy."""


class EngineProcess:
    """One server, from start to end. Made by :meth:`start`."""

    def __init__(
        self, process: asyncio.subprocess.Process, client: EngineClient, scratch: tempfile.TemporaryDirectory[str]
    ) -> None:
        self.client = client
        self._process = process
        self._scratch = scratch
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._forwarding = asyncio.create_task(self._forward_output())

    @classmethod
    async def start(cls, adapter: Adapter) -> EngineProcess:
        """Start a server on a free port of loopback, with a key of its own."""
        port, key = _free_port(), secrets.token_urlsafe(32)
        launch = adapter.launch(port, key)
        scratch = tempfile.TemporaryDirectory(prefix="rljob-engine-", ignore_cleanup_errors=True)
        environment = dict(os.environ, TMPDIR=scratch.name)  # its sockets and files go with it
        environment.pop("RLJOB_TOKEN", None)  # the server has no business with the coordinator
        for name, value in launch.environment.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        process = await asyncio.create_subprocess_exec(
            *launch.command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LINE_BYTES,
        )
        log.info("engine server started: pid %d, port %d", process.pid, port)
        return cls(process, adapter.connect(port, key), scratch)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def wait_healthy(self) -> None:
        """Return when the server serves.

        Raises:
            EngineStartError: it ended instead; its last lines are in the message.
        """
        while self._process.returncode is None:
            if await self.client.healthy():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), HEALTH_POLL_SECONDS)
        await self._forwarding
        raise EngineStartError(f"{self._how_it_ended()}; its last lines:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """Return the end of what the server wrote."""
        return "\n".join(self._tail)

    async def wait_ended(self) -> str:
        """Return how the server ended, once it has."""
        await self._process.wait()
        return self._how_it_ended()

    async def stop(self) -> None:
        """End the server, politely for a moment."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Kill the server's whole process group and clean up after it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self.client.close()
        await self._forwarding
        self._scratch.cleanup()

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        assert code is not None
        return (
            f"the engine server was killed by {signal.Signals(-code).name}"
            if code < 0
            else (f"the engine server exited with code {code}")
        )

    async def _forward_output(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line beyond LINE_BYTES was dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace")
            self._tail.append(text.rstrip("\n"))
            sys.stderr.write(text)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
