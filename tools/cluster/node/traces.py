"""Lists what a cluster could leave on the machine, for tests that compare before and after."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tools.cluster.node import cgroups
from tools.cluster.node.system import run

SETTINGS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
PLACES = (
    "/etc/cni/net.d",
    "/opt/containerd",
    "/run/containerd",
    "/run/netns",
    "/run/rljob",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)
"""Default directories of the programs of a cluster."""
_BUILDERS = ("/var/lib/containers/", "/rljob/images/")
"""Mounts below these are of buildah and Podman, which may build images at the same time."""


def traces(cluster: str) -> dict[str, set[str]]:
    """Return the traces of each kind on the machine; cgroups, links and routes only of ``cluster``.

    Other programs may run on the machine at the same time, including other clusters.
    """
    kinds: dict[str, Callable[[], set[str]]] = {
        "mounts": _mounts,
        "links": lambda: {line for line in run("ip", "-oneline", "link").splitlines() if cluster in line},
        "routes": lambda: {line for line in run("ip", "route").splitlines() if cluster in line},
        "rules": lambda: {line for line in run("iptables-save").splitlines() if line[:1] not in "#:"},
        "cgroups": lambda: {str(path) for found in cgroups.hierarchies() for path in found.glob(f"**/{cluster}/**/")},
        "settings": lambda: {f"{name}={Path('/proc/sys', name).read_text().strip()}" for name in SETTINGS},
        "files": lambda: {place for place in PLACES if Path(place).exists()},
    }
    return {kind: found() for kind, found in kinds.items()}


def _mounts() -> set[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line for line in lines if not any(builders in line for builders in _BUILDERS)}


def processes(init: int) -> set[int]:
    """Return the process ids of ``init`` and its descendants, also in nested PID namespaces."""
    found = {init}
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
