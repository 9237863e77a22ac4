"""The zygote: a process that forks one or two confined processes for each run, and reaps them.

The service starts it with an empty environment and no descriptor but its socket. It has one thread. It never reads the
source, the input or the output of a run: they are descriptors, which it passes on. Messages of the service: a request
(JSON with the descriptors), or any other message during a run to end the run. The answer is JSON: ``ends`` has the wait
status and the CPU seconds of each process, ``why`` the reason if the zygote ended the run.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rljob.rewards.sandbox import run_roles
from rljob.rewards.sandbox.confinement import FAILURE, Confinement
from rljob.rewards.sandbox.scratch_directory import ScratchExceededError, check_use, empty

TICK_SECONDS = 0.02
MAX_THREADS = 64
MAX_WAITING = 5
"""How many times its limit a run may wait for a CPU of a busy machine, beside its own time."""
MAX_REQUEST = 1 << 16
PRELOADED = (
    *("bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string"),
    *("threading", "typing"),
)
"""Modules that many programs import. Each megabyte of the zygote makes every fork slower, so others are not here."""


class Zygote:
    """Forks and supervises runs, one at a time.

    Args:
        config: ``socket``: descriptor. ``read``, ``scratch``, ``filtered``: of :class:`Confinement`. ``modules``: to
            load beside PRELOADED. ``path``: directories of packages.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._scratch: str = config["scratch"]
        self._pid = os.getpid()
        self._reserve_low_descriptors()
        self._connection = socket.socket(fileno=_high(config["socket"]))
        self._ended, wake = (_high(end) for end in os.pipe())
        self._failures, self._failure = (_high(end) for end in os.pipe())
        for end in (self._ended, wake, self._failures):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._confinements = {
            with_files: Confinement(config["read"], self._scratch if with_files else "", config["filtered"])
            for with_files in ((False, True) if self._scratch else (False,))
        }

    def _reserve_low_descriptors(self) -> None:
        """Keep the first descriptors for the runs: those that arrive get higher numbers."""
        null = os.open("/dev/null", os.O_RDWR)
        os.set_inheritable(null, False)
        for low in range(FAILURE + 1):
            try:
                os.fstat(low)
            except OSError:
                os.dup2(null, low)
        if null > FAILURE:
            os.close(null)

    def serve(self) -> None:
        """Serve requests until the service closes the socket."""
        os.dup2(0, 2)  # what fails before is in the log of the service; a run cannot write there
        self._connection.send(b"{}")
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._connection, MAX_REQUEST, 16)
            if not message:
                return
            if message[:1] != b"{":  # ends a run that has ended by itself
                continue
            try:
                answer = self._run(json.loads(message), descriptors)
            except OSError as error:  # no process left, no memory
                answer = {"error": str(error)}
            self._connection.send(json.dumps(answer).encode())

    def _run(self, request: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        pids: list[int] = []
        try:
            for process in request["processes"]:
                pids.append(self._fork(process, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if len(pids) < len(request["processes"]):
                self._kill(pids)
        watch = _Watch(self._scratch, request)
        try:
            ends = self._supervise(pids, watch)
        finally:
            if self._scratch:
                empty(self._scratch)
        with contextlib.suppress(BlockingIOError):
            return {"error": os.read(self._failures, 4096).decode()}
        return {"ends": ends, "why": watch.why}

    def _fork(self, process: dict[str, Any], descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.dup2(self._failure, FAILURE)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for low, index in process["descriptors"].items():
                os.dup2(descriptors[index], int(low))
            os.chdir(self._scratch if process["files"] else "/")
            role: Callable[..., None] = run_roles.ROLES[process["role"]]
            arguments = run_roles.read_arguments(process)
            self._confinements[process["files"]].enter(self._pid, process["limits"])
            os.close(FAILURE)
        except BaseException as error:  # noqa: BLE001 nothing may return into the copy of the zygote's loop
            os.write(FAILURE, f"a process cannot be confined: {error!r}".encode())
            os._exit(1)
        try:
            role(**arguments)
        finally:
            os._exit(1)

    def _supervise(self, pids: list[int], watch: _Watch) -> list[list[float]]:
        """Wait until the first process has ended; then end the other one. Returns status and CPU seconds of each."""
        ends: dict[int, list[float]] = {}
        waiting = select.poll()
        waiting.register(self._ended, select.POLLIN)
        waiting.register(self._connection, select.POLLIN)
        while pids[0] not in ends:
            _reap(pids, ends)
            if pids[0] in ends:
                break
            ready = [descriptor for descriptor, _ in waiting.poll(TICK_SECONDS * 1000)]
            if self._ended in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ended, 4096)
            if self._connection.fileno() in ready:
                if not self._connection.recv(MAX_REQUEST):
                    self._kill(pids)
                    sys.exit(0)
                watch.why = "ended"
            if not ready:
                watch.look(pids)
            if watch.why or watch.late(pids):
                break
        self._kill([pid for pid in pids if pid not in ends])
        for pid in pids:
            if pid not in ends:
                ends[pid] = _end_of(os.wait4(pid, 0))
        return [ends[pid] for pid in pids]

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Watch:
    """What a run may use that no limit of the kernel bounds: time, threads, files."""

    def __init__(self, scratch: str, request: dict[str, Any]) -> None:
        self.why = ""
        self._scratch = scratch
        self._processes = request["processes"]
        self._seconds = request["seconds"]
        self._start = time.monotonic()

    def late(self, pids: Sequence[int]) -> bool:
        """Whether the run has used its time, without that in which its processes waited for a CPU."""
        passed = time.monotonic() - self._start
        if passed >= self._seconds and passed - sum(map(_waited, pids)) >= self._seconds:
            self.why = "time"
        if passed >= self._seconds * (1 + MAX_WAITING):
            self.why = "time"
        return bool(self.why)

    def look(self, pids: Sequence[int]) -> None:
        for pid, process in zip(pids, self._processes, strict=True):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/task").st_nlink - 2 > MAX_THREADS:
                    self.why = "threads"
            if process["files"]:
                try:
                    check_use(self._scratch, pid, process["limits"]["files"])
                except ScratchExceededError:
                    self.why = "files"


def _waited(pid: int) -> float:
    """Return the seconds for which a process was ready to run and had no CPU; 0 where the kernel does not say it."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _reap(pids: Sequence[int], ends: dict[int, list[float]]) -> None:
    for pid in pids:
        if pid not in ends:
            ended = os.wait4(pid, os.WNOHANG)
            if ended[0]:
                ends[pid] = _end_of(ended)


def _end_of(ended: tuple[int, int, Any]) -> list[float]:
    return [ended[1], ended[2].ru_utime + ended[2].ru_stime]


def _high(descriptor: int) -> int:
    """Move a descriptor out of the numbers that runs use."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(descriptor)
    return moved


def _offer_to_the_oom_killer() -> None:
    """Let the kernel kill this process and its children first when memory is short, not the service."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def main(config: str) -> None:
    """Serve as the zygote that ``config`` (JSON) describes."""
    settings = json.loads(config)
    _offer_to_the_oom_killer()
    zygote = Zygote(settings)
    sys.path.extend(settings["path"])
    for module in (*PRELOADED, *settings["modules"]):
        importlib.import_module(module)
    sys.argv = ["solution.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # of the module site, which is not loaded
    os.environ.clear()  # Python itself sets LC_CTYPE
    compile("0", "first", "exec")  # the first call makes the types of syntax trees, which takes a millisecond
    gc.collect()
    gc.freeze()
    try:
        zygote.serve()
    finally:
        if settings["scratch"]:
            with contextlib.suppress(OSError):  # it is a mount of bubblewrap
                os.rmdir(settings["scratch"])
