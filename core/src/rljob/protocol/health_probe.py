"""Exec probes of processes without a server, answered from the files that the process touches.

It starts every few seconds in every pod, so it imports few modules:

    python -m rljob.protocol.health_probe alive SECONDS     whether its event loop has run within SECONDS
    python -m rljob.protocol.health_probe ready             whether it can do its work

Files outlive a container that restarts in its pod, so files older than the container are ignored.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

HEARTBEAT = "RLJOB_HEARTBEAT"
READY = "RLJOB_READY"


def say_ready(ready: bool) -> None:
    """Record whether this process is ready, in the file of RLJOB_READY: it exists while the process is ready, and holds
    the seconds since the boot of the node, a clock that is never set. Does nothing when the variable is not set."""
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


def is_alive(beat: float, started: float, now: float, patience: float) -> bool:
    """Whether a process counts as alive.

    Args:
        beat: wall clock of its last heartbeat; 0 when there is none.
        started: wall clock of its start; an older heartbeat is of the previous container, whose files are kept.
        now: wall clock.
        patience: maximum of seconds without a heartbeat.
    """
    return beat <= started or now - beat <= patience


def is_ready(said: float, started: float) -> bool:
    """Whether a process is ready that recorded it at ``said`` (0: not recorded) and started at ``started``."""
    return said > started


def _last_beat() -> float:
    try:
        return os.stat(os.environ[HEARTBEAT]).st_mtime
    except (KeyError, OSError):
        return 0.0


def _said_ready() -> float:
    try:
        return float(Path(os.environ[READY]).read_text())
    except (KeyError, OSError, ValueError):  # ValueError: it is being written
        return 0.0


def _first_process_started() -> float:
    """Return the start of the container's first process, in seconds since the boot of the node."""
    ticks = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _node_started() -> float:
    """Return the boot time of the node as wall clock."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    """Answer by the exit code: 0 yes, 1 no, with a sentence."""
    match sys.argv[1:]:
        case ["alive", patience]:
            beat = _last_beat()
            if not is_alive(beat, _node_started() + _first_process_started(), time.time(), float(patience)):
                sys.exit(f"no heartbeat for {time.time() - beat:.0f} s")
        case ["ready"]:
            if not is_ready(_said_ready(), _first_process_started()):
                sys.exit("the process is starting or stopping")
        case _:
            sys.exit("usage: python -m rljob.protocol.health_probe alive SECONDS | ready")


if __name__ == "__main__":
    main()
