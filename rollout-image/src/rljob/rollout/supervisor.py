"""The engine's server process: starts it, watches it, keeps the end of its log, and kills it with its children.

The server leads a session and a process group. The kernel kills it when the agent dies, and :meth:`EngineProcess.kill`
kills the whole group. This module does not depend on the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rljob.protocol.child_signals import signal_child
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.free_port import free_port
from rljob.protocol.parent_death import die_with_parent
from rljob.rollout import exit_diagnosis
from rljob.rollout.adapters.base import Adapter, EngineClient, Launch
from rljob.rollout.temp_dirs import ServerTempDir, remove_orphans

log = logging.getLogger(__name__)

TAIL_LINES = 40
KEPT_LINES = 1000  # the first error can precede many lines of subsequent errors
LINE_CHARACTERS = 2000
LINE_BYTES = 1 << 20
FINAL_SECONDS = 10.0
"""After a server was healthy, only errors in the last FINAL_SECONDS of its log explain its end."""
HEALTH_POLL_SECONDS = 0.1
SHARED_MEMORY_SECONDS = 3.0
"""Time between looks at the shared memory of a server."""
LOOK_SECONDS = 2.0
"""Limit of the last look, before the server is killed."""
STOP_SECONDS = 3.0


class EngineStartError(Exception):
    """The server ended before it was healthy, or before it received weights.

    Args:
        reason: one sentence.
        last_lines: of its log.
        permanent: another start would fail too: the server refuses its settings, or its program is missing.
        killed: see :attr:`EngineProcess.killed`.
    """

    def __init__(self, reason: str, last_lines: str, permanent: bool = False, killed: bool = False) -> None:
        super().__init__(reason)
        self.last_lines = last_lines
        self.permanent = permanent
        self.killed = killed


class EngineProcess:
    """One server, from start to end. Made by :meth:`start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        adapter: Adapter,
        client: EngineClient,
        temp_dir: ServerTempDir,
        access: tuple[str, str],
    ) -> None:
        self.client = client
        self.url, self.key = access
        self._adapter = adapter
        self._temp_dir = temp_dir
        self._process = process
        self._oom_kills = exit_diagnosis.oom_kills()
        self._healthy = False
        self._tail: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)  # monotonic time, line
        self._forwarding = asyncio.create_task(self._forward_output())
        self._noting = asyncio.create_task(self._note_shared_memory())

    @classmethod
    async def start(cls, adapter: Adapter, launch_at: Callable[[int, str], Launch] | None = None) -> EngineProcess:
        """Start a server on a free loopback port, with a new key; ``launch_at``: instead of the adapter's ``launch``.

        Raises:
            OSError: the machine has no disk space, or cannot create another process.
            EngineStartError: the program does not exist or is not executable.
        """
        remove_orphans()
        port, key = free_port(), secrets.token_urlsafe(32)
        launch = (launch_at or adapter.launch)(port, key)
        temp_dir = ServerTempDir()
        environment = dict(os.environ, TMPDIR=str(temp_dir.path))  # so that its sockets and files are removed with it
        environment.pop("RLJOB_TOKEN", None)  # only the agent talks to the coordinator
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
                preexec_fn=partial(die_with_parent, os.getpid()),
                limit=LINE_BYTES,
            )
        except (FileNotFoundError, PermissionError) as error:
            temp_dir.remove()
            raise EngineStartError(f"the engine server cannot be started: {error}", "", permanent=True) from None
        except OSError:
            temp_dir.remove()
            raise
        log.info("engine server started: pid %d, port %d", process.pid, port)
        return cls(process, adapter, adapter.connect(port, key), temp_dir, (f"http://127.0.0.1:{port}", key))

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def killed(self) -> bool:
        """Whether another process has killed the server, and not the kernel for lack of memory. Its settings are not
        the cause then."""
        return self._process.returncode == -signal.SIGKILL and not self._out_of_memory()

    def _out_of_memory(self) -> bool:
        return exit_diagnosis.oom_kills() > self._oom_kills

    async def wait_healthy(self) -> None:
        """Return when the server is healthy.

        Raises:
            EngineStartError: the server ended first.
        """
        while self._process.returncode is None:
            if await self.client.healthy():
                self._healthy = True
                await self._temp_dir.note_shared_memory(self.pid)
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), HEALTH_POLL_SECONDS)
        reason = await self.wait_ended()
        permanent = self._process.returncode == CONFIGURATION_ERROR
        raise EngineStartError(reason, self.last_lines(), permanent, self.killed)

    def last_lines(self) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(line for _, line in list(self._tail)[-TAIL_LINES:])

    async def wait_ended(self) -> str:
        """Wait until the server has ended; return how it ended, with the error in its log."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a child of the server may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._forwarding), 1.0)
        return self.explain(exit_diagnosis.describe_end(code, self._out_of_memory()))

    def explain(self, end: str) -> str:
        """Return ``end`` with the error that the adapter finds in the log."""
        since = time.monotonic() - FINAL_SECONDS if self._healthy else 0.0
        error = self._adapter.find_error(line for written, line in self._tail if written >= since)
        return f"{end}: {error}" if error else end

    async def stop(self) -> None:
        """Send SIGTERM; kill the server's process group after STOP_SECONDS."""
        if self._process.returncode is None:
            signal_child(self._process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Kill the server's process group, close its client, and remove its directory and its shared memory."""
        self._noting.cancel()
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._temp_dir.note_shared_memory(self.pid)
        except (TimeoutError, RuntimeError) as error:  # RuntimeError: no thread can be started
            reason = str(error) or f"the look at it took {LOOK_SECONDS:g} s"
            log.warning("shared memory of the engine's server may stay below /dev/shm: %s", reason)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self.client.close()
        with contextlib.suppress(TimeoutError):  # a child in another session may hold the pipe open
            await asyncio.wait_for(self._forwarding, 1.0)
        await asyncio.to_thread(self._temp_dir.remove)

    async def _note_shared_memory(self) -> None:
        while True:
            await asyncio.sleep(SHARED_MEMORY_SECONDS)
            with contextlib.suppress(RuntimeError):  # no thread can be started: at the next look
                await self._temp_dir.note_shared_memory(self.pid)

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
            with contextlib.suppress(OSError):  # if the disk of the log is full, the server must still not block
                sys.stderr.write(text)
