"""The cluster's cgroups, which the kernel does not remove with its namespaces."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

WEIGHTS = {"cpu.shares": "8192", "cpu.weight": "800"}
"""Eight times the default, because all pods together compete with each single process of the machine."""
_GONE_SECONDS = 10.0


def hierarchies(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Return the mount points of cgroups: one, or one for each controller (version 1)."""
    lines = [line.split() for line in mounts.read_text().splitlines()]
    return sorted({Path(fields[1]) for fields in lines if fields[2] in ("cgroup", "cgroup2")})


def make(name: str) -> None:
    """Create the kubelet's cgroup root."""
    found = hierarchies()
    if len(found) == 1:
        _enable_controllers(found[0])
    for hierarchy in found:
        (hierarchy / name).mkdir(exist_ok=True)
        for weight, value in WEIGHTS.items():
            if (file := hierarchy / name / weight).exists():
                file.write_text(value)


def _enable_controllers(root: Path) -> None:
    """Enable all controllers for cgroups below ``root`` (version 2), as the kubelet requires."""
    if not (root / "cgroup.controllers").exists():
        return
    for controller in (root / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # some cannot be enabled; the kubelet reports missing ones
            (root / "cgroup.subtree_control").write_text(f"+{controller}")


def remove(name: str) -> None:
    """Wait until the cgroup ``name`` and those below have no processes, and remove them."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := [path for path in hierarchies() if not _remove(path / name)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{left[0] / name} cannot be removed: processes of the cluster still run in it")
        time.sleep(0.05)


def _remove(root: Path) -> bool:
    """Try to remove a cgroup and those below; return whether the cgroup is removed."""
    for directory, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):  # busy, or already removed
            os.rmdir(directory)
    return not root.exists()
