"""Exec probes of processes without a server. A probe reads the files that the process writes.

The kubelet starts a probe every few seconds in every pod, so this module imports few modules:

    python -m rljob.protocol.health_probe alive SECONDS     whether the process's event loop has run within SECONDS
    python -m rljob.protocol.health_probe ready             whether the process can do its work

The files remain when a container restarts in its pod, so a probe ignores files older than the container.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

HEARTBEAT = "RLJOB_HEARTBEAT"
READY = "RLJOB_READY"


def record_ready(ready: bool) -> None:
    """Record in the file of RLJOB_READY whether this process is ready. Do nothing if the variable is not set.

    The file exists while the process is ready, and contains the time of the call in seconds since the boot of the node.
    This clock is never set.
    """
    path = os.environ.get(READY)
    if not path:
        return
    try:
        if ready:
            Path(path).write_text(f"{time.clock_gettime(time.CLOCK_BOOTTIME)}")
        else:
            Path(path).unlink(missing_ok=True)
    except OSError as error:  # the process itself works; the reader of the file decides
        sys.stderr.write(f"{path} cannot be written: {error}\n")


def is_alive(beat: float, started: float, now: float, timeout: float) -> bool:
    """Return whether a process counts as alive.

    Args:
        beat: Unix time of the last heartbeat; 0 if there is none.
        started: Unix time of the process's start. An older heartbeat is from the previous container.
        now: Unix time.
        timeout: maximum time without a heartbeat, in seconds.
    """
    return beat <= started or now - beat <= timeout


def is_ready(recorded: float, started: float) -> bool:
    """Return whether a process is ready.

    Args:
        recorded: time at which the process recorded that it is ready, in seconds since boot; 0: not recorded.
        started: time of the process's start, in seconds since boot.
    """
    return recorded > started


def _last_beat() -> float:
    try:
        return os.stat(os.environ[HEARTBEAT]).st_mtime
    except (KeyError, OSError):
        return 0.0


def _ready_time() -> float:
    try:
        return float(Path(os.environ[READY]).read_text())
    except (KeyError, OSError, ValueError):  # ValueError: the file is being written
        return 0.0


def _first_process_started() -> float:
    """Return the start of the container's first process, in seconds since the boot of the node."""
    ticks = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _node_started() -> float:
    """Return the boot time of the node as Unix time."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    """Exit with 0 if the process is alive or ready, else with 1 and a message on stderr."""
    match sys.argv[1:]:
        case ["alive", timeout]:
            beat = _last_beat()
            if not is_alive(beat, _node_started() + _first_process_started(), time.time(), float(timeout)):
                sys.exit(f"no heartbeat for {time.time() - beat:.0f} s")
        case ["ready"]:
            if not is_ready(_ready_time(), _first_process_started()):
                sys.exit("the process is starting or stopping")
        case _:
            sys.exit("usage: python -m rljob.protocol.health_probe alive SECONDS | ready")


if __name__ == "__main__":
    main()
