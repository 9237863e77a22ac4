"""Runs the tests in phases that use both cores: `make test` and `make test-cluster`.

python -m tools.run_tests machine [PYTEST_ARG...]   everything that needs no Kubernetes programs
    checks    style, types, layers, at the same time
    tests     all tests but those below, on three processes that take a file at a time: a quarter of the time is waiting
    tools     the tests of tools/images and tools/cluster

python -m tools.run_tests cluster [PYTEST_ARG...]   everything that does
    programs    builds the Kubernetes programs that are not built yet
    API server  the tests on a real API server, on three processes with one API server each: they wait more than they
                compute. The images are built at the same time, with low priority.
    images      waits for the images
    pods        the tests in pods of a real cluster, on three processes that share it and take a file at a time:
                they wait more than they compute
    tools       the tests of tools/cluster that need these programs

The tests of a folder in tools/ run only if the folder, or another file that they depend on, has changed since they last
passed on this machine.
A failed phase does not stop the following phases, except a failed check or build. The last lines show the duration of
each phase. With pytest arguments, pytest runs once with these arguments, one test after the other.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from tools.cluster import errors
from tools.cluster.node import chosen, install

ROOT = Path(__file__).parents[1]
CHECKS = ("lint", "types", "layers")
API_SERVER, PODS = "e2e/integration", "e2e/pods"
TOOLS = {
    "tools/images": (".dockerignore", "*/Dockerfile", "*/pyproject.toml", "requirements/**/*"),
    "tools/cluster": ("tools/images/layout.py", "crds/*.yaml", "charts/**/*"),
}
"""Folders whose tests run only after a change → patterns of the files outside the folder that these tests depend on."""
WORKERS, API_SERVERS, POD_WORKERS = 3, 3, 3
NEEDS_KUBERNETES = "apiserver or cluster"
NOTHING_SELECTED = 5  # pytest's exit code
NO_CLUSTER = (*errors.REFUSED, *errors.FAILED, subprocess.CalledProcessError, OSError)
"""Errors of a cluster that cannot be started or prepared: they fail the phase, and the next phases run."""
NICENESS = 10
LAST_LINES = 60
IGNORED = ("__pycache__", ".egg-info")


class Phases:
    """Runs phases one after the other and records their durations and results."""

    def __init__(self) -> None:
        self.results: list[tuple[str, float, bool]] = []

    def run(self, name: str, work: Callable[[], bool]) -> bool:
        """Run ``work`` and return its result: whether the phase passed."""
        _print(f"==> {name}")
        start = time.monotonic()
        ok = work()
        self.results.append((name, time.monotonic() - start, ok))
        return ok

    @property
    def ok(self) -> bool:
        """Whether all phases passed."""
        return all(ok for _, _, ok in self.results)

    def summary(self) -> str:
        """Return a table of the phases."""
        lines = [f"{name:14}{_clock(seconds):>8}{'' if ok else '  failed'}" for name, seconds, ok in self.results]
        return "\n".join([*lines, f"{'all':14}{_clock(sum(seconds for _, seconds, _ in self.results)):>8}"])


def main(arguments: Sequence[str]) -> int:
    """Run the phases of a target, or pytest with the arguments after it; return the exit code."""
    target, *pytest_arguments = arguments
    phases = Phases()
    {"machine": _machine, "cluster": _cluster}[target](phases, pytest_arguments)
    _print(phases.summary())
    return 0 if phases.ok else 1


def _machine(phases: Phases, arguments: Sequence[str]) -> None:
    without = ("-m", f"not ({NEEDS_KUBERNETES})")
    if not phases.run("checks", lambda: _make("-j", "--output-sync", *CHECKS)):
        return
    if arguments:
        phases.run("tests", lambda: _pytest(*without, *arguments, may_select_none=True))
        return
    phases.run("tests", lambda: _pytest(*without, *_spread(WORKERS, "loadfile"), *_ignored(API_SERVER, PODS, *TOOLS)))
    for folder in TOOLS:
        _if_changed(phases, "machine", folder, *without)


def _cluster(phases: Phases, arguments: Sequence[str]) -> None:
    if not phases.run("programs", lambda: _make("programs")):
        return
    with tempfile.TemporaryFile("w+") as log:
        images = _start_images(log)
        try:
            if arguments:
                if phases.run("images", lambda: _wait(images, log)):
                    phases.run("tests", lambda: _pytest("-m", NEEDS_KUBERNETES, *arguments, may_select_none=True))
                return
            # Test by test, because every process has its own control plane.
            phases.run("API server", lambda: _pytest(*_spread(API_SERVERS, "loadgroup"), API_SERVER))
            if phases.run("images", lambda: _wait(images, log)):
                phases.run("pods", _pods)
        finally:
            images.terminate()
            images.wait()
    _if_changed(phases, "cluster", "tools/cluster", "-m", NEEDS_KUBERNETES)


def _pods() -> bool:
    """Run the tests in pods on one cluster, which is started before the first process and stopped after the last."""
    try:
        with chosen() as cluster:
            _print("loading the images into the cluster")
            install.from_layout(cluster)  # here, because the minutes of a first unpacking are not a test's time
            return _pytest(*_spread(POD_WORKERS, "loadfile"), PODS)
    except NO_CLUSTER as error:
        _print(str(error))
        return False


def _if_changed(phases: Phases, target: str, folder: str, *arguments: str) -> None:
    """Run the tests of a folder unless they passed on this machine with the same content of all they depend on."""
    content = content_hash(ROOT, f"{folder}/**/*", *TOOLS[folder])
    stamp = _passed() / f"{folder.replace('/', '-')}-{target}-{content}"
    if stamp.exists():
        _print(f"==> {folder}: unchanged since its tests passed")
    elif phases.run(folder, lambda: _pytest(*arguments, folder)):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def content_hash(root: Path, *patterns: str) -> str:
    """Return a hash of the names, modes and contents of all files in ``root`` that match a pattern."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        name = path.relative_to(root)
        if path.is_file() and not any(part.endswith(IGNORED) for part in name.parts):
            digest.update(f"{name}\0{path.stat().st_mode & 0o111}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _passed() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rljob", "passed")


def _spread(workers: int, how: str) -> list[str]:
    """Return the pytest arguments for several processes; the longest files start first."""
    return ["-n", str(workers), "--dist", how, "--no-loadscope-reorder"]


def _ignored(*folders: str) -> list[str]:
    return [f"--ignore={folder}" for folder in folders]


def _make(*targets: str) -> bool:
    return subprocess.run(["make", "--no-print-directory", *targets], cwd=ROOT).returncode == 0


def _pytest(*arguments: str, may_select_none: bool = False) -> bool:
    """Return whether pytest passes. ``may_select_none``: a run that selects no test passes."""
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
    return done.returncode == 0 or (may_select_none and done.returncode == NOTHING_SELECTED)


def _start_images(log: IO[str]) -> subprocess.Popen[str]:
    command = ["nice", f"-n{NICENESS}", "make", "--no-print-directory", "images"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)


def _wait(build: subprocess.Popen[str], log: IO[str]) -> bool:
    ok = build.wait() == 0
    if not ok:
        log.seek(0)
        _print("".join(log.readlines()[-LAST_LINES:]))
    return ok


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
