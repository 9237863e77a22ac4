"""The cluster's view of the machine's files: everything except directories that it writes to."""

from __future__ import annotations

import os
from pathlib import Path

from tools.cluster.node.place import INSIDE, Place
from tools.cluster.node.system import run

HIDDEN = ("/run", "/var/lib", "/var/log")
"""Private directories of the cluster, in memory."""
TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Machine-wide settings that a kubelet would change → the values that it expects."""


def set_up(cache: Path, place: Place, name_server: str) -> None:
    """Mount the cluster's private directories in its mount namespace; ``cache`` appears at INSIDE."""
    run("mount", "--make-rshared", "/")  # containers must see volumes that the kubelet mounts
    handle = os.open(cache, os.O_PATH)  # the path may be below a directory that is hidden next
    for path in HIDDEN:
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", path)
    INSIDE.mkdir()
    run("mount", "--no-canonicalize", "--bind", f"/proc/{os.getpid()}/fd/{handle}", str(INSIDE))
    os.close(handle)
    _bind_directory(place.state / "kubelet", Path("/var/lib/kubelet"))
    _bind_directory(place.state / "pods", Path("/var/log/pods"))
    _name_server(place.state / "resolv.conf", name_server)
    _tunables(place.state / "tunables")


def _bind_directory(source: Path, target: Path) -> None:
    source.mkdir()
    target.mkdir()
    run("mount", "--bind", str(source), str(target))


def _name_server(file: Path, address: str) -> None:
    """Make the node use only the cluster's name server."""
    file.write_text(f"nameserver {address}\n")
    target = Path(os.path.realpath("/etc/resolv.conf"))
    if not target.exists():  # it was below /run
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    run("mount", "--bind", str(file), str(target))


def _tunables(directory: Path) -> None:
    """Show the kubelet the expected values, so that it does not change these machine-wide settings."""
    for name, value in TUNABLES.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        if (target := Path("/proc/sys", name)).exists():
            run("mount", "--bind", str(file), str(target))
