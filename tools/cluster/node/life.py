"""Starts, finds and stops the machine's cluster from outside.

A process that starts or stops the cluster holds the lock `door`. The cluster's processes hold the lock `life`, which
shows whether a cluster runs even if the starting process was killed. The next start removes the remains of a killed
cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.cluster import build
from tools.cluster.node import cgroups, configs, machine, network
from tools.cluster.node.place import Place
from tools.cluster.node.settings import Settings
from tools.cluster.processes import tail

READY_SECONDS = 180.0
_GONE_SECONDS = 30.0
_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
_ROOT = Path(__file__).parents[3]
_children: list[subprocess.Popen[bytes]] = []
"""Children of this process, which it has to reap."""
_log = logging.getLogger(__name__)
POD_MEMORY = "RLJOB_NODE_POD_MEMORY_GIB"
"""Variable: memory for all pods together. Beyond it the kubelet evicts pods, as on a node without memory."""


class NoClusterError(RuntimeError):
    """No cluster runs, or it has exited."""


def start(place: Place, tether: int | None = None) -> bool:
    """Start the cluster unless one runs, without waiting for it; return whether it was started.

    ``tether``: the read end of a pipe; the cluster ends when the write end is closed.

    Raises:
        MachineError: the cluster cannot run on this machine.
    """
    machine.prepare(place.root)
    programs = {name: build.ensure(name).name for name in ("controlplane", "coredns", "pause")}
    with _exclusive(place):
        life = place.lock.open("w")
        with life:
            if not _try_lock(life.fileno()):
                return False
            _remove_remains(place)
            link = network.free(place.name)
            settings = Settings(
                cluster=place.root.name,
                cache=str(build.cache_directory()),
                plugins=str(machine.plugins()),
                address=link.cluster,
                prefix=link.prefix,
                tether=tether,
                pod_memory=_pod_memory(),
                **programs,
            )
            _launch(place, settings, life.fileno(), link)
    return True


def _pod_memory() -> int | None:
    """Return the bytes that RLJOB_NODE_POD_MEMORY_GIB grants to all pods together; None: it is not set.

    Raises:
        MachineError: it is not a number between 1 and the memory of the machine.
    """
    given = os.environ.get(POD_MEMORY)
    if not given:
        return None
    most = configs.machine_memory() // 2**30
    if not given.isdecimal() or not 1 <= int(given) <= most:
        raise machine.MachineError(f"{POD_MEMORY}: must be a number of GiB between 1 and {most}, not {given!r}")
    return int(given) * 2**30


def _launch(place: Place, settings: Settings, life: int, link: network.Link) -> None:
    place.state.mkdir()
    place.content.mkdir(exist_ok=True)
    inside = ("tini", "--", sys.executable, "-m", "tools.cluster.node.supervisor", settings.text())
    with place.log.open("ab") as log:
        process = subprocess.Popen(
            ("unshare", *_NAMESPACES, *inside),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": machine.PATH, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"},
            pass_fds=[life, *([] if settings.tether is None else [settings.tether])],
            start_new_session=True,
        )
    _children.append(process)
    try:
        init = _child(process, place)
        place.running.write_text(json.dumps({"init": init, "born": _start_time(init)}))
        network.connect(link, init)
    except BaseException:  # including Ctrl-C: an unregistered init would never be stopped
        process.kill()  # the init is killed with it
        raise


def _child(process: subprocess.Popen[bytes], place: Place) -> int:
    """Return the process id of the init that unshare has forked."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if found := children.read_text().split():
                return int(found[0])
        time.sleep(0.005)
    raise NoClusterError(f"the cluster's namespaces could not be created: {tail(place.log)}")


def running(place: Place) -> int | None:
    """Return the process id of the living cluster's init, or None."""
    try:
        found = json.loads(place.running.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found["init"] if _start_time(found["init"]) == found["born"] else None


def wait(place: Place, seconds: float = READY_SECONDS) -> None:
    """Wait until the running cluster can be used.

    Raises:
        NoClusterError: no cluster runs, or it has exited; the message has the end of its log.
        TimeoutError: it is not ready in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        if running(place) is None:
            cause = (
                f"the end of the log of the last one:\n{tail(place.log)}" if place.log.exists() else "none was started"
            )
            raise NoClusterError(f"no cluster runs; {cause}")
        if place.ready.exists():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster is not ready within {seconds:g} s; see {place.state}")
        time.sleep(0.05)


def stop(place: Place) -> bool:
    """Kill the cluster and remove its remains; return whether one ran."""
    if not place.root.exists():
        return False
    with _exclusive(place), place.lock.open("w") as life:
        init = running(place)
        if init is not None:
            _kill(init)
        deadline = time.monotonic() + _GONE_SECONDS
        while not _try_lock(life.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster does not exit; a process holds {place.lock}")
            time.sleep(0.02)
        _remove_remains(place)
    return init is not None


def _kill(init: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)  # the kernel kills the other processes of its namespace first
    deadline = time.monotonic() + _GONE_SECONDS
    while alive(init):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {init}, the cluster's init, does not exit")
        time.sleep(0.02)


def _remove_remains(place: Place) -> None:
    """Remove the remains of a cluster that has exited."""
    for child in [found for found in _children if found.poll() is not None]:
        _children.remove(child)
    network.disconnect(place.name)
    cgroups.remove(place.name)
    shutil.rmtree(place.state, ignore_errors=True)
    place.running.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(place: Place) -> Iterator[None]:
    place.root.mkdir(parents=True, exist_ok=True)
    with place.door.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks, which differs from that of a later process with its id."""
    fields = _stat(pid)
    return fields[19] if fields else None


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, starting with the state (proc_pid_stat(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
