"""Paths of the cluster's files, as the machine and as the cluster sees them, and shared names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.cluster.build import cache_directory

USUAL = "node"
"""Name of a machine's cluster; tests of clusters use other names."""
API_PORT = 6443
INSIDE = Path("/run/rljob")
"""Path of the cache directory in the cluster."""
SOCKET = Path("/run/containerd/containerd.sock")


@dataclass(frozen=True)
class Place:
    """The files of one cluster, below a directory with the name of the cluster."""

    root: Path

    @property
    def name(self) -> str:
        """Name of the node, its cgroup, its link to the machine, and the context of its kubeconfig."""
        return f"rljob-{self.root.name}"

    @property
    def state(self) -> Path:
        """Files of one start of the cluster: logs, certificates, objects, volumes. The next start deletes them."""
        return self.root / "state"

    @property
    def content(self) -> Path:
        """Images, packed and unpacked, kept for all starts of the cluster."""
        return self.root / "containerd"

    @property
    def volumes(self) -> Path:
        """Persistent volumes, a directory for each."""
        return self.state / "volumes"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.state / "admin.kubeconfig"

    @property
    def ready(self) -> Path:
        """A file that exists when the cluster is ready."""
        return self.state / "ready"

    @property
    def log(self) -> Path:
        """Log of the supervisor."""
        return self.state / "supervisor.log"

    @property
    def running(self) -> Path:
        """The running init process, as JSON."""
        return self.root / "running.json"

    @property
    def lock(self) -> Path:
        """Locked by the cluster while it runs."""
        return self.root / "life.lock"

    @property
    def door(self) -> Path:
        """Locked by the process that starts or stops the cluster."""
        return self.root / "door.lock"


def outside(cluster: str = USUAL) -> Place:
    """Return the paths of a cluster's files on the machine."""
    return Place(cache_directory() / cluster)


def inside(cluster: str) -> Place:
    """Return the paths of a cluster's files inside the cluster."""
    return Place(INSIDE / cluster)
