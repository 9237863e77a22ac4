"""The zygote: a process that forks one or two confined processes for each run, and reaps them.

The service starts it with an empty environment and no descriptor but its socket. It has one thread. It never reads the
source, the input or the output of a run: they are descriptors, which it passes on. Messages of the service: a request
(JSON with the descriptors); during a run ``late WAITED PASSED``, when the time of its sample is nearly over, of which
PASSED seconds have passed and earlier runs have waited WAITED seconds for a CPU; or any other message, which ends the
run. The answer is JSON: ``ends`` has the wait status and the CPU seconds of each process, ``why`` the reason if the
zygote ended the run, ``waited`` and ``slept`` the seconds for which a run that took longer than a tick waited for a CPU
and needed none.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rljob.rewards.sandbox import run_roles
from rljob.rewards.sandbox.confinement import FAILURE, Confinement
from rljob.rewards.sandbox.run_watch import MOST, STARVED, RunWatch
from rljob.rewards.sandbox.scratch_directory import empty

TICK_SECONDS = 0.02
MAX_REQUEST = 1 << 16
MAX_DESCRIPTORS = 16
PRELOADED = (
    *("bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string"),
    *("threading", "typing"),
)
"""Modules that many programs import. Each megabyte of the zygote makes every fork slower, so others are not here."""
_INT = struct.Struct("=i")


class Zygote:
    """Forks and supervises runs, one at a time.

    Args:
        config: ``socket``: descriptor. ``read``, ``scratch``, ``filtered``: of :class:`Confinement`. ``modules``: to
            load beside PRELOADED. ``path``: directories of packages.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.after_fork: list[Callable[[], None]] = []
        """Called in each forked process."""
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
        self._waiting = select.poll()
        self._waiting.register(self._ended, select.POLLIN)
        self._waiting.register(self._connection, select.POLLIN)
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
        """Serve requests until the service closes the socket.

        Each run is a fork, after which the first use of any page of memory here copies it or takes a fault. So what
        happens for each run uses few objects of Python.
        """
        os.dup2(0, 2)  # what fails before is in the log of the service; a run cannot write there
        self._connection.send(b"{}")
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT.size)
        while True:
            message, ancillary, _, _ = self._connection.recvmsg(MAX_REQUEST, space)
            if not message:
                return
            if message[:1] != b"{":  # ends a run that has ended by itself
                continue
            descriptors = [number for _, _, data in ancillary for (number,) in _INT.iter_unpack(data)]
            try:
                answer = self._run(_parsed(message), descriptors)
            except OSError as error:  # no process left, no memory
                answer = json.dumps({"error": str(error)})
            self._connection.send(answer.encode())

    def _run(self, request: dict[str, Any], descriptors: Sequence[int]) -> str:
        pids: list[int] = []
        processes = request["processes"]
        try:
            for process in processes:
                pids.append(self._fork(process, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if len(pids) < len(processes):
                self._kill(pids)
        try:
            ends, why, waited, slept = self._supervise(pids, request)
        finally:
            if self._scratch:
                empty(self._scratch)
        for status, _ in ends:
            if status:
                with contextlib.suppress(BlockingIOError):
                    return json.dumps({"error": os.read(self._failures, 4096).decode()})
        return f'{{"ends": {ends}, "why": "{why}", "waited": {waited}, "slept": {slept}}}'  # lists of numbers are JSON

    def _fork(self, process: dict[str, Any], descriptors: Sequence[int]) -> int:
        calls = self._confinements[process["files"]].prepare(process["limits"])
        pid = os.fork()
        if pid:
            return pid
        try:
            os.dup2(self._failure, FAILURE)
            for hook in self.after_fork:
                hook()
            signal.set_wakeup_fd(-1)
            for low, index in process["descriptors"].items():
                os.dup2(descriptors[index], int(low))
            os.chdir(self._scratch if process["files"] else "/")
            role: Callable[..., None] = run_roles.ROLES[process["role"]]
            arguments = run_roles.read_arguments(process)
            self._confinements[process["files"]].enter(self._pid, calls)
            os.close(FAILURE)
        except BaseException as error:  # noqa: BLE001 nothing may return into the copy of the zygote's loop
            os.write(FAILURE, f"a process cannot be confined: {error!r}".encode())
            os._exit(1)
        try:
            role(**arguments)
        finally:
            os._exit(1)

    def _supervise(self, pids: list[int], request: dict[str, Any]) -> tuple[list[list[float]], str, float, float]:
        """Wait until the first process has ended; then end the other one.

        Returns:
            Status and CPU seconds of each, the reason to end the run, if there was one, and for how many seconds it
            waited for a CPU, and slept.
        """
        ends: dict[int, list[float]] = {}
        start, watch, why, waited = time.monotonic(), None, "", 0.0
        while True:
            ready = self._waiting.poll(TICK_SECONDS * 1000)
            for descriptor, _ in ready:
                if descriptor == self._ended:
                    os.read(descriptor, 4096)
                elif message := self._connection.recv(MAX_REQUEST):
                    watch = watch or RunWatch(self._scratch, request, start)
                    why = _why_ended(message, watch.waited(pids))
                else:
                    self._kill(pids)
                    sys.exit(0)
            if watch:
                waited = watch.waited(pids, running=False)  # of processes that are not reaped
            _reap(pids, ends)
            if pids[0] in ends or why:
                break
            watch = watch or RunWatch(self._scratch, request, start)
            if why := watch.reason(pids, look=not ready):
                break
        if len(ends) < len(pids):
            self._kill([pid for pid in pids if pid not in ends])
            for pid in pids:
                if pid not in ends:
                    ends[pid] = _end_of(os.wait4(pid, 0))
        return [ends[pid] for pid in pids], why, waited, watch.slept if watch else 0.0

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@functools.lru_cache(maxsize=16)
def _parsed(message: bytes) -> dict[str, Any]:
    """Return a request. Those of one sandbox are nearly all the same."""
    request: dict[str, Any] = json.loads(message)
    return request


def _why_ended(message: bytes, waited: float) -> str:
    """Return why a message of the service ends a run that has waited for a CPU for ``waited`` seconds; empty: it does
    not."""
    words = message.split()
    if words[0] != b"late":
        return "ended"
    return STARVED if float(words[1]) + waited >= float(words[2]) * MOST else ""


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


def _load_without_hooks(modules: Sequence[str]) -> list[Callable[[], None]]:
    """Import modules without what they have Python call in a forked process; return it, except for locks of threads.

    The zygote has one thread, so nothing holds a lock when it forks. The hook of ``threading`` would make all locks
    again in each run, which takes a quarter of its time.
    """
    hooks: list[Callable[[], None]] = []

    def register(*, after_in_child: Callable[[], None] | None = None, **_: Any) -> None:
        if after_in_child is not None and after_in_child.__module__ != "threading":
            hooks.append(after_in_child)

    original, os.register_at_fork = os.register_at_fork, register
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        os.register_at_fork = original
    return hooks


def main(config: str) -> None:
    """Serve as the zygote that ``config`` (JSON) describes."""
    settings = json.loads(config)
    _offer_to_the_oom_killer()
    zygote = Zygote(settings)
    sys.path.extend(settings["path"])
    modules = (*PRELOADED, *settings["modules"])
    if settings["filtered"]:
        zygote.after_fork = _load_without_hooks(modules)
    else:  # a program can fork
        for module in modules:
            importlib.import_module(module)
    sys.argv = ["solution.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # of the module site, which is not loaded
    os.environ.clear()  # Python itself sets LC_CTYPE
    run_roles.rehearse()
    for hook in zygote.after_fork * run_roles.REHEARSALS:
        hook()
    gc.collect()
    gc.freeze()
    try:
        zygote.serve()
    finally:
        if settings["scratch"]:
            with contextlib.suppress(OSError):  # it is a mount of bubblewrap
                os.rmdir(settings["scratch"])
