"""Kills the processes of a pod with SIGKILL, as a crash or the kernel does: without a notice before."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tools.cluster.client import Object

PAUSE = "pause"
"""The process that holds a pod's namespaces: not one of its containers."""


def kill_containers(pod: Object) -> None:
    """Kill all processes of a pod's containers.

    Raises:
        RuntimeError: the pod has none on this machine.
    """
    kill_processes(processes(pod))


def processes(pod: Object) -> list[int]:
    """Return the process ids of a pod's containers.

    Raises:
        RuntimeError: the pod has none on this machine.
    """
    uid = pod["metadata"]["uid"]
    found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cgroup") if _is_of(path, uid)]
    if not found:
        raise RuntimeError(f"pod {pod['metadata']['name']} has no processes on this machine")
    return found


def kill_processes(found: Sequence[int]) -> None:
    """Kill processes, also if some have ended."""
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_of(cgroups: Path, uid: str) -> bool:
    try:
        return f"pod{uid}" in cgroups.read_text() and cgroups.with_name("comm").read_text().strip() != PAUSE
    except OSError:  # it has ended
        return False
