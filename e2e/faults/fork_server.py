"""Starts components in milliseconds: a process that has imported all of them forks one for each request.

A forked component is an ordinary process that can be killed and stopped. Only its imports are saved, which take most of
the time of a restart. Time constants that the fault matrix waits for are at most a tenth of their production values.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rljob.coordinator import message_router, weight_publisher
from rljob.protocol import coordinator_link, heartbeat
from rljob.runner import scoring

PING_SECONDS = 0.4
DETECTION_SECONDS = 2 * PING_SECONDS + 0.4
"""After this time all components detect a silent peer: two pings, the grace of a connection, and a margin."""

COMMANDS = {
    "coordinator": "rljob.coordinator.main",
    "runner": "rljob.runner.main",
    "agent": "e2e.fakes.engine",
    "trainer": "e2e.fakes.trainer",
    "reward": "e2e.fakes.reward",
}
IMPORTED_LATER = (
    "rljob.coordinator.serve",
    "rljob.runner.app",
    "rljob.runner.data.reasoning_gym_source",
    "uvicorn.protocols.http.h11_impl",
    "uvloop",
    "websockets.server",
    "pydantic.v1",
    "encodings.idna",
)
"""Modules that components import at their start."""


@dataclass
class Child:
    """A component's process."""

    pid: int
    ended: asyncio.Future[int]  # exit code, as subprocess gives it

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended.done():
            os.kill(self.pid, number)


class ForkServer:
    """The test's side of the forking process. Use :meth:`start` inside ``async with``."""

    async def __aenter__(self) -> ForkServer:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "e2e.faults.fork_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        self._requested: list[asyncio.Future[Child]] = []
        self._children: dict[int, Child] = {}
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading

    async def start(self, component: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Start a component that appends its output to ``log``."""
        assert self._process.stdin is not None
        self._requested.append(asyncio.get_running_loop().create_future())
        order = {
            "component": component,
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log),
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self._requested[-1]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            reply = json.loads(line)
            if "code" in reply:
                self._children.pop(reply["pid"]).ended.set_result(reply["code"])
            else:
                child = Child(reply["pid"], asyncio.get_running_loop().create_future())
                self._children[child.pid] = child
                self._requested.pop(0).set_result(child)


# --- the forking process ----------------------------------------------------------------------------------------------


def _import_all() -> None:
    for module in (*COMMANDS.values(), *IMPORTED_LATER):
        import_module(module)
    gc.freeze()  # otherwise a child's garbage collection copies the pages of all imported modules
    coordinator_link.PING_SECONDS = PING_SECONDS
    coordinator_link.LAST_BACKOFF_SECONDS = 0.1
    message_router.RECONNECT_SECONDS = 0.2
    weight_publisher.GRACE_SECONDS = 0.5
    scoring.FIRST_BACKOFF_SECONDS, scoring.LAST_BACKOFF_SECONDS = 0.02, 0.1
    heartbeat.BEAT_SECONDS = 0.1


def _fork(order: dict[str, Any], ours: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for descriptor in ours:
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        sys.argv = [order["component"], *order["arguments"]]
        import_module(COMMANDS[order["component"]]).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code)


def main() -> None:
    """Fork on request until standard input is closed; then kill the remaining children."""
    _import_all()
    wake, woken = os.pipe()
    for descriptor in (wake, woken):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    out = os.dup(1)
    pending = b""

    def reply(**fields: int) -> None:
        os.write(out, json.dumps(fields).encode() + b"\n")

    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line), [0, out, wake, woken])
                living.add(pid)
                reply(pid=pid)
        while living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            living.discard(pid)
            reply(pid=pid, code=os.waitstatus_to_exitcode(status))
    for pid in living:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
