"""The levels of isolation that this machine offers: a user, and the layers behind which code runs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "reward-services/src"
NOBODY = 65532
"""The user of rljob's pods."""


@dataclass(frozen=True)
class Level:
    """``user``: id; None: that of the tests. ``without``: layers that are not used."""

    name: str
    user: int | None
    without: tuple[str, ...] = ()


LEVELS = {
    level.name: level
    for level in (
        Level("own-user-bubblewrap", None),
        Level("own-user-landlock", None, ("bubblewrap",)),
        Level("pod-user-bubblewrap", NOBODY),
        Level("pod-user-landlock", NOBODY, ("bubblewrap",)),
    )
}
"""``pod-user``: uid 65532, no capabilities and no new privileges, as in a restricted pod."""


class Driver:
    """The process of e2e/sandbox/driver.py on one level."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.isolation: dict[str, Any] = self._answer()

    def run(self, sources: list[str], limits: dict[str, Any]) -> dict[str, Any]:
        """Run programs in order; return their outputs and ends, and what has changed."""
        self._send({"sources": sources, "limits": limits})
        return self._answer()

    def end(self) -> list[str]:
        """End the driver; return what its sandboxes have left behind."""
        self._process.stdin.close()  # type: ignore[union-attr]
        left: list[str] = self._answer()["left"]
        self._process.wait(30)
        return left

    def _send(self, request: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        assert line, f"the driver ends with exit code {self._process.wait(30)}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(level: Level) -> Iterator[Driver]:
    """Start the driver of a level; skip the test where the machine does not offer it."""
    if level.user is not None and os.geteuid() != 0:
        pytest.skip("another user needs root")
    if "bubblewrap" not in level.without:
        _install_bubblewrap()
    base = Path(tempfile.mkdtemp(prefix="rljob-victim-"))
    base.chmod(0o755)
    directory = base / "victim"
    directory.mkdir()
    if level.user is not None:
        os.chown(directory, level.user, level.user)
    driver = [_interpreter(), "-ISE", str(Path(__file__).with_name("driver.py")), str(SOURCES), str(directory)]
    command = [*_as_user(level.user, base / "places"), *driver, ",".join(level.without)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        started = Driver(process)
        for layer in {"bubblewrap", "landlock", "seccomp"} - set(level.without):
            if layer in started.isolation["missing"]:
                reason = f"{layer} is missing: {started.isolation['missing'][layer]}"
                (pytest.fail if _offered(layer) else pytest.skip)(reason)
        yield started
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            stream.close()  # type: ignore[union-attr]
        shutil.rmtree(base)


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _offered(layer: str) -> bool:
    """Return whether this machine has a layer, found without the sandbox's own probes."""
    if layer == "bubblewrap":
        words = ["bwrap", "--unshare-all", "--dev-bind", "/", "/", "true"]
        return shutil.which("bwrap") is not None and subprocess.run(words, capture_output=True).returncode == 0
    if layer == "landlock":
        return ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
    return platform.machine() == "x86_64"


def _install_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("bubblewrap is not installed")
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
        for words in (["update"], ["install", "-y", "--no-install-recommends", "bubblewrap"]):
            done = subprocess.run([*apt, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                pytest.skip(f"bubblewrap cannot be installed: {done.stderr.strip()[-300:]}")


def _as_user(user: int | None, places: Path) -> list[str]:
    """Return the words before a command that run it as ``user``, who can read the interpreter and this repository.

    Directories that only root can enter, such as /root, are covered by an empty one with these two in it, in a mount
    namespace of the command.
    """
    if user is None:
        return []
    needed = [Path(sysconfig.get_config_var("installed_base") or sys.base_prefix), ROOT]
    script = ""
    for i, path in enumerate(needed):
        script += f'mkdir -p "$0/{i}" && mount --bind "{path}" "$0/{i}" && '
    for closed in {closed for path in needed if (closed := _closed_part(path))}:
        script += f'mount -t tmpfs -o mode=755 none "{closed}" && '
    for i, path in enumerate(needed):
        if _closed_part(path):
            script += f'mkdir -p "{path}" && mount --bind "$0/{i}" "{path}" && '
    drop = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--inh-caps=-all"]
    drop += ["--bounding-set=-all", "--no-new-privs"]
    return ["unshare", "--mount", "sh", "-c", script + 'exec "$@"', str(places), *drop]


def _closed_part(path: Path) -> Path | None:
    """Return the first directory on the way to ``path`` that other users cannot enter."""
    for part in [*reversed(path.parents), path]:
        if not part.stat().st_mode & 0o001:
            return part
    return None
