"""The engine's server as a process: started, watched, its last words kept, killed with everything it started.

The server leads a process group of its own. It dies with the agent whatever kills the agent (see
``protocol.parent_death``), and :meth:`EngineProcess.kill` leaves nothing of the group behind.
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
import time
from collections import deque

from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.rollout import exit_diagnosis
from rljob.rollout.adapters.base import Adapter, EngineClient
from rljob.rollout.temp_dirs import ServerTempDir, remove_orphans

log = logging.getLogger(__name__)

TAIL_LINES = 40
KEPT_LINES = 1000  # the first error comes before pages of what follows from it
LINE_CHARACTERS = 2000
LINE_BYTES = 1 << 20
FINAL_SECONDS = 10.0
"""What a server that was healthy wrote in its last seconds tells why it ended; older errors did not end it."""
HEALTH_POLL_SECONDS = 0.1
STOP_SECONDS = 3.0


class EngineStartError(Exception):
    """The server ended before it was healthy, or before it served anything.

    Args:
        reason: one sentence.
        last_lines: of its log.
        hopeless: it refuses its settings: starting it again would end the same.
    """

    def __init__(self, reason: str, last_lines: str, hopeless: bool = False) -> None:
        super().__init__(reason)
        self.last_lines = last_lines
        self.hopeless = hopeless


class EngineProcess:
    """One server, from start to end. Made by :meth:`start`."""

    def __init__(self, process: asyncio.subprocess.Process, client: EngineClient, temp_dir: ServerTempDir) -> None:
        self.client = client
        self._process = process
        self._temp_dir = temp_dir
        self._oom_kills = exit_diagnosis.oom_kills()
        self._healthy = False
        self._tail: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)  # monotonic time, line
        self._forwarding = asyncio.create_task(self._forward_output())

    @classmethod
    async def start(cls, adapter: Adapter) -> EngineProcess:
        """Start a server on a free port of loopback, with a key of its own.

        Raises:
            OSError: the machine has no room for it.
        """
        remove_orphans()
        port, key = _free_port(), secrets.token_urlsafe(32)
        launch = adapter.launch(port, key)
        temp_dir = ServerTempDir()
        environment = dict(os.environ, TMPDIR=str(temp_dir.path))  # its sockets and files go with it
        environment.pop("RLJOB_TOKEN", None)  # the server has no business with the coordinator
        for name, value in launch.environment.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                limit=LINE_BYTES,
            )
        except OSError:
            temp_dir.remove()
            raise
        log.info("engine server started: pid %d, port %d", process.pid, port)
        return cls(process, adapter.connect(port, key), temp_dir)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def wait_healthy(self) -> None:
        """Return when the server serves.

        Raises:
            EngineStartError: it ended instead.
        """
        while self._process.returncode is None:
            if await self.client.healthy():
                self._healthy = True
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), HEALTH_POLL_SECONDS)
        reason = await self.wait_ended()
        raise EngineStartError(reason, self.last_lines(), self._process.returncode == CONFIGURATION_ERROR)

    def last_lines(self) -> str:
        """Return the end of what the server wrote."""
        return "\n".join(line for _, line in list(self._tail)[-TAIL_LINES:])

    async def wait_ended(self) -> str:
        """Return how the server ended, and the error it named, once it has."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a child of it may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._forwarding), 1.0)
        return self.explain(exit_diagnosis.describe_end(code, exit_diagnosis.oom_kills() > self._oom_kills))

    def explain(self, end: str) -> str:
        """Return how it ended together with the first error that its log names for it."""
        since = time.monotonic() - FINAL_SECONDS if self._healthy else 0.0
        error = exit_diagnosis.first_error(line for written, line in self._tail if written >= since)
        return f"{end}: {error}" if error else end

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
        with contextlib.suppress(TimeoutError):  # a child in a session of its own may hold the pipe open
            await asyncio.wait_for(self._forwarding, 1.0)
        self._temp_dir.remove()

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
            self._tail.append((time.monotonic(), text.rstrip("\n")[:LINE_CHARACTERS]))
            with contextlib.suppress(OSError):  # the disk of the log is full: the server must not wait for it
                sys.stderr.write(text)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
