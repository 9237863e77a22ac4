"""Requirements of the cluster on the machine: root, Linux, some Debian packages, a file system for images."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "tini": "tini",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
"""Program → Debian package."""
PLUGINS = ("bridge", "host-local", "loopback", "portmap")
PLUGIN_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOCK_SECONDS = 120
_log = logging.getLogger(__name__)


class MachineError(RuntimeError):
    """The cluster cannot run on this machine; the message has the remedy."""


def prepare(cache: Path) -> None:
    """Ensure that the cluster can run here, with its files below ``cache``.

    Raises:
        MachineError: the cluster cannot run here.
    """
    if platform.system() != "Linux" or os.geteuid() != 0:
        raise MachineError("the cluster needs root on Linux, for namespaces, mounts and interfaces: run it with sudo")
    _packages()
    if _file_system(cache) == "overlay":
        raise MachineError(
            f"{cache} is on an overlay file system, on which images cannot be unpacked: set XDG_CACHE_HOME to a "
            "directory on a disk, for example a volume of this container"
        )
    if not Path("/proc/sys/net/bridge").exists():
        subprocess.run(["modprobe", "br_netfilter"], capture_output=True)
    if not Path("/proc/sys/net/bridge").exists():
        raise MachineError(
            "Services need the kernel's module br_netfilter, and it cannot be loaded: load it, or use "
            "a kernel that has it"
        )


def plugins() -> Path:
    """Return the directory of the CNI plugins.

    Raises:
        MachineError: they are not installed.
    """
    for directory in PLUGIN_DIRECTORIES:
        if all((directory / name).exists() for name in PLUGINS):
            return directory
    raise MachineError("the cluster needs CNI plugins: install Debian's containernetworking-plugins")


def missing() -> list[str]:
    """Return the Debian packages that are missing."""
    found = {package for name, package in PROGRAMS.items() if shutil.which(name, path=PATH) is None}
    try:
        plugins()
    except MachineError:
        found.add("containernetworking-plugins")
    return sorted(found)


def _packages() -> None:
    packages = missing()
    if not packages:
        return
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise MachineError(f"the cluster needs these system packages (Debian's names): {names}")
    _log.info("installing system packages: %s", names)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    apt = ("apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={_LOCK_SECONDS}")
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            [*apt, *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise MachineError(
                f"the cluster needs these system packages (Debian's names): {names}; apt-get {command[0]} failed: "
                f"{done.stderr.strip()[-1000:]}"
            )


def _file_system(directory: Path) -> str:
    """Return the type of the file system that ``directory`` is on."""
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True, check=True)
    return "overlay" if done.stdout.strip() in ("overlayfs", "overlay") else done.stdout.strip()
