"""Paths of the cluster's files, as the machine and as the cluster sees them, and shared names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.cluster.build import cache_directory

USUAL = "node"
"""The cluster of a machine; others beside it are for the tests of clusters themselves."""
API_PORT = 6443
INSIDE = Path("/run/rljob")
"""Where the cluster sees the cache directory, wherever that is."""
SOCKET = Path("/run/containerd/containerd.sock")


@dataclass(frozen=True)
class Place:
    """The files of one cluster below a directory that is called as the cluster."""

    root: Path

    @property
    def name(self) -> str:
        """Of the node, its root in the tree of cgroups, its link to the machine, and its kubeconfig's context."""
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
        """What pods keep on persistent volumes, a directory for each."""
        return self.state / "volumes"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.state / "admin.kubeconfig"

    @property
    def ready(self) -> Path:
        """A file that is there once the cluster can be used."""
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
    """Return where the machine has the files of a cluster."""
    return Place(cache_directory() / cluster)


def inside(cluster: str) -> Place:
    """Return where the cluster sees them."""
    return Place(INSIDE / cluster)
