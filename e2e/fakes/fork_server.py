"""Starts Python programs in milliseconds: a process that has imported their modules forks one for each request.

A forked program is an ordinary process that can be killed and stopped. Only its imports are saved, which take most of
the time of a start.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
RLJOB_IMPORTS = ("rljob.cli.typer_app", "rljob.cli.cluster_commands", "rljob.local.local_run")
"""Modules of the commands of rljob."""


@dataclass
class Child:
    """A forked program."""

    pid: int
    ended: concurrent.futures.Future[int] = field(default_factory=concurrent.futures.Future)
    """Its result is the exit code."""

    @property
    def returncode(self) -> int | None:
        """Exit code, as subprocess gives it; None while it runs."""
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        """Wait for its end; return the exit code."""
        return await asyncio.shield(asyncio.wrap_future(self.ended))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The forking process. Its children are killed when it is closed and when this process ends.

    Args:
        modules: are imported once, before the first fork.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "e2e.fakes.fork_server", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        self._lock = threading.Lock()
        self._requested: deque[concurrent.futures.Future[Child]] = deque()
        self._children: dict[int, Child] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Kill the remaining children."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def start(
        self, program: Sequence[object], environment: Mapping[str, str], out: str | Path, err: str | Path
    ) -> concurrent.futures.Future[Child]:
        """Start a program in the current directory; return its process as soon as it exists.

        Args:
            program: ``-m``, the name of a module with a function ``main``, and arguments; or a file and arguments.
            environment: the whole environment.
            out: standard output is appended to this file, or written to this pipe (see :func:`descriptor`).
            err: as ``out``, for standard error.
        """
        assert self._process.stdin is not None
        order = {
            "program": list(map(str, program)),
            "environment": dict(environment),
            "out": str(out),
            "err": str(err),
            "directory": os.getcwd(),
        }
        requested: concurrent.futures.Future[Child] = concurrent.futures.Future()
        with self._lock:
            self._requested.append(requested)
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return requested

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            if "code" in reply:
                self._children.pop(reply["pid"]).ended.set_result(reply["code"])
            else:
                child = self._children[reply["pid"]] = Child(reply["pid"])
                requested = self._requested.popleft()
                if requested.set_running_or_notify_cancel():
                    requested.set_result(child)
                else:
                    child.kill()


@functools.cache
def shared_fork_server(*modules: str) -> ForkServer:
    """Return the server that has imported ``modules``, for all tests of this process; it is closed at the end."""
    server = ForkServer(*modules)
    atexit.register(server.close)
    return server


def descriptor(number: int) -> str:
    """Return the path of a file descriptor of this process, for another process."""
    return f"/proc/{os.getpid()}/fd/{number}"


class ForkedCommand:
    """A forked program with pipes for its text output, used like :class:`subprocess.Popen`.

    Args:
        server: forks it.
        program: as for :meth:`ForkServer.start`.
        environment: is added to that of this process.
    """

    def __init__(self, server: ForkServer, program: Sequence[object], environment: Mapping[str, str]) -> None:
        (out, write_out), (err, write_err) = pipes = os.pipe(), os.pipe()
        started = server.start(program, os.environ | environment, descriptor(write_out), descriptor(write_err))
        self._child = started.result()
        for _, write in pipes:
            os.close(write)
        self.pid = self._child.pid
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._child.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._child.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code."""
        return self._child.ended.result(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read and close the pipes that are open, and wait for the end; return what was read."""
        with concurrent.futures.ThreadPoolExecutor(2) as readers:
            out, err = readers.map(_rest, (self.stdout, self.stderr), timeout=timeout)
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._child.send_signal(number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._child.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._child.kill()


def _rest(pipe: TextIO) -> str:
    if pipe.closed:
        return ""
    with pipe:
        return pipe.read()


def rljob_command(program: Sequence[object], environment: Mapping[str, str]) -> ForkedCommand:
    """Start a program that uses the command line of rljob; see :class:`ForkedCommand`."""
    return ForkedCommand(shared_fork_server(*RLJOB_IMPORTS), program, environment)


# --- the forking process ----------------------------------------------------------------------------------------------


def _become(order: dict[str, Any], out: int, err: int) -> Callable[[], object]:
    """Turn a fork into the ordered process; return its program."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"], PYTHONHASHSEED="0")  # which is true: a fork cannot have another one
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    name, *arguments = order["program"]
    if name == "-m":
        name, *arguments = arguments
        sys.argv = [name, *arguments]
        main: Callable[[], object] = import_module(name).main
        return main
    sys.argv = [name, *arguments]
    return lambda: runpy.run_path(name, run_name="__main__")


def _opened(path: str) -> int:
    """Open a file of an order; output is lost if its disk is full."""
    flags = os.O_WRONLY | os.O_APPEND
    with contextlib.suppress(OSError):
        return os.open(path, flags | os.O_CREAT, 0o644)
    return os.open(os.devnull, flags)


def _serve() -> Callable[[], object] | None:
    """Fork on request until standard input is closed, then kill the children; in a fork, return its program."""
    wake, woken = os.pipe()
    for number in (wake, woken):
        os.set_blocking(number, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    pending = b""

    def reply(**fields: int) -> None:
        os.write(1, json.dumps(fields).encode() + b"\n")

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
                order = json.loads(line)
                files = [_opened(order[name]) for name in ("out", "err")]
                pid = os.fork()
                if pid == 0:
                    return _become(order, *files)
                for file in files:
                    os.close(file)
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
    return None


if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()  # otherwise a child's garbage collection copies the pages of all imported modules
    if (forked := _serve()) is not None:
        forked()  # ends as a program does: threads are joined, output is flushed
