"""The layers of isolation that this machine offers, found by using each of them, and bubblewrap's command.

A pod at Kubernetes' restricted level has Landlock and seccomp, and no namespaces of its own. Where namespaces are open,
bubblewrap stands around each zygote too. The limits of the kernel (memory, CPU, size of files) are always present.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rljob.rewards.sandbox import landlock, syscall_filter

BUBBLEWRAP, LANDLOCK, SECCOMP = "bubblewrap", "landlock", "seccomp"
LAYERS = (BUBBLEWRAP, LANDLOCK, SECCOMP)
"""From the strongest to the weakest; below all of them are the limits."""
PROBE_SECONDS = 20
PRIVATE_TMP = "/tmp"
ZYGOTE_ENVIRONMENT = {"LD_BIND_NOW": "1"}
"""The zygote binds functions of shared libraries once; otherwise each run binds them again. It then removes this."""
_PR_SET_NO_NEW_PRIVS = 38
ROOT = Path(__file__).parents[3]
"""The folder from which the zygote imports this package."""


@dataclass(frozen=True)
class Isolation:
    """The layers that are present: name → detail, and those that are missing: name → reason."""

    present: dict[str, str]
    missing: dict[str, str]

    def sentence(self) -> str:
        """Describe them for the log."""
        weakest = next((layer for layer in reversed(LAYERS) if layer in self.present), "limits")
        strongest = next((layer for layer in LAYERS if layer in self.present), "limits")
        parts = [f"{layer} ({detail})" if detail else layer for layer, detail in self.present.items()]
        text = f"code runs behind {', '.join([*parts, 'limits'])}; strongest layer: {strongest}, weakest: {weakest}"
        return text + "".join(f"; {layer} is missing: {reason}" for layer, reason in self.missing.items())


def find_isolation(without: Collection[str] = ()) -> Isolation:
    """Use each layer once in a process of its own; return which of them work.

    Args:
        without: layers that are not to be used.
    """
    present, missing = {}, {}
    for layer, probe in ((BUBBLEWRAP, _probe_bubblewrap), (LANDLOCK, _probe_landlock), (SECCOMP, _probe_seccomp)):
        if layer in without:
            missing[layer] = "not used"
            continue
        try:
            present[layer] = probe()
        except OSError as error:
            missing[layer] = error.strerror or str(error)
    return Isolation(present, missing)


def readable_paths(packages: Collection[str] = ()) -> list[str]:
    """Return what a run may read: the standard library, shared libraries, time zones, and ``packages``."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
    libraries = {os.path.dirname(path) for path in mapped if path.startswith("/")}
    libraries = {path for path in libraries if "site-packages" not in path and "dist-packages" not in path}
    libraries |= {path.removeprefix("/usr") for path in libraries if path.startswith("/usr/lib")}
    found = {sysconfig.get_path("stdlib"), "/usr/share/zoneinfo", "/etc/ld.so.cache", *libraries, *packages}
    return sorted(path for path in found if os.path.exists(path))


def bubblewrap_command(read: Collection[str], scratch_bytes: int) -> list[str]:
    """Return the words before a command that run it in namespaces of its own: no network, no process and no file but
    those it needs, and a private tmpfs at PRIVATE_TMP."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "there is no program bwrap; install the package bubblewrap")
    interpreter = os.path.realpath(sys.executable)
    own = str(Path(__file__).parents[1])
    words = [program, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    words += ["--clearenv", "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    words += [word for name, value in ZYGOTE_ENVIRONMENT.items() for word in ("--setenv", name, value)]
    for path in sorted({interpreter, own, *read, *(loader for loader in ("/lib64",) if os.path.exists(loader))}):
        words += ["--ro-bind", path, path]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        words += ["--dev-bind", device, device]
    words += ["--proc", "/proc", "--size", str(max(scratch_bytes, 1 << 16)), "--tmpfs", PRIVATE_TMP]
    return [*words, "--remount-ro", "/", "--chdir", "/", "--"]


def _probe_bubblewrap() -> str:
    command = [*bubblewrap_command(readable_paths(), 0), os.path.realpath(sys.executable), "-ISEc", "import json"]
    try:
        done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(errno.ETIMEDOUT, f"bwrap does not end within {PROBE_SECONDS} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise OSError(errno.EPERM, lines[-1][:300] if lines else f"bwrap ends with exit code {done.returncode}")
    return ""


def _probe_landlock() -> str:
    version = landlock.abi()
    if version == 0:
        raise OSError(errno.ENOSYS, "the kernel, or the runtime of the container, does not offer it")

    def refused() -> bool:
        _no_new_privileges()
        landlock.enter(landlock.make_ruleset({}))
        return _fails(lambda: os.listdir("/"), errno.EACCES)

    _check_in_child(refused, "it does not refuse a directory")
    return f"ABI {version}"


def _probe_seccomp() -> str:
    if not syscall_filter.supported():
        raise OSError(errno.ENOSYS, "rljob has the numbers of the system calls of x86_64 only")

    def refused() -> bool:
        _no_new_privileges()
        syscall_filter.SyscallFilter(writing=False).enter(os.getpid())
        return _fails(lambda: socket.socket().close(), errno.EPERM)

    _check_in_child(refused, "it does not refuse a socket")
    return ""


def _no_new_privileges() -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(errno.EPERM, "prctl refuses no_new_privs")


def _fails(action: Callable[[], object], error: int) -> bool:
    try:
        action()
    except OSError as raised:
        return raised.errno == error
    return False


def _check_in_child(check: Callable[[], bool], sentence: str) -> None:
    """Run ``check`` in a forked process.

    Raises:
        OSError: it does not return True.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError(errno.EPERM, sentence)
