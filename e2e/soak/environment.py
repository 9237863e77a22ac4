"""Where the soak runs: namespaces of its own, its programs, its manifest."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from e2e.faults import disk
from e2e.soak import network
from e2e.soak.fault import FaultError
from e2e.soak.plan import ENGINES
from e2e.sums_task import SUMS

INSIDE = "RLJOB_SOAK_NAMESPACE"
"""Environment variable: set in the program's own namespaces."""
DISK_BYTES = 256 << 20
SHARED_MEMORY = Path("/dev/shm")
ENGINE_FILES = "rljob-engine-"
"""Prefix of the temporary directory of an engine server. That of a killed agent stays until an agent starts later."""


class NoNamespacesError(Exception):
    """The soak cannot have namespaces of its own here."""


def enter_namespaces(module: str) -> None:
    """Run ``module`` again in mount and network namespaces of its own, unless this is that process.

    Raises:
        NoNamespacesError: the message has the cause.
    """
    if shutil.which("ip") is None:
        raise NoNamespacesError("the program ip is missing; install iproute2 (requirements/system.sh PYTHON soak)")
    if INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "rljob-test", SHARED_MEMORY], check=True)
        return
    inner = [sys.executable, "-W", "ignore", "-m", module, *sys.argv[1:]]
    try:
        command = [*disk.private_mounts(), "unshare", "--net", *inner]
    except disk.NoMountsError as error:
        raise NoNamespacesError(str(error)) from None
    os.execvpe(command[0], command, os.environ | {INSIDE: "1", "PYTHONPATH": os.getcwd()})


def families_not_run() -> dict[str, str]:
    """Return family → why this machine cannot inject its faults. Call it inside the namespaces."""
    lacking = network.missing()
    return {family: lacking for family in ("cut", "silence", "loss")} if lacking else {}


def write_manifest(path: Path, model: Path, staleness: int, engine: str) -> None:
    """Write the manifest of a run with a kind of engine, vllm or sglang."""
    spec = {
        "seed": 7,
        "models": [{"name": "policy", "source": str(model)}],
        "training": {"steps": 1, "promptsPerStep": 8, "samplesPerPrompt": 4, "maxStaleness": staleness},
        "tasks": [SUMS],
        "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
        "trainer": {"optimizer": {"learningRate": 1e-4}},
        "rollouts": [
            {
                "name": "main",
                "engine": engine,
                "replicas": {"min": ENGINES},
                "maxModelLength": 128,
                "maxConcurrency": 16,
                "kvCacheBytes": 64 << 20,
            }
        ],
        "checkpoints": {"everySteps": 3, "keep": 2},
        "failurePolicy": {"maxRestarts": 200},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "soak"}, "spec": spec}
    path.write_text(yaml.safe_dump(job))


@contextlib.contextmanager
def run_directory(path: Path) -> Iterator[Path]:
    """Yield a directory on a small disk of its own."""
    path.mkdir()
    with disk.small_disk(path, DISK_BYTES):
        yield path


def check_files() -> None:
    """Check that no run left a file outside its directory.

    Raises:
        FaultError: one did.
    """
    left = [
        str(path)
        for directory in (Path(tempfile.gettempdir()), SHARED_MEMORY)
        for path in directory.iterdir()
        if not path.name.startswith(ENGINE_FILES)
    ]
    if left:
        raise FaultError(f"files are left: {', '.join(sorted(left))}")


def keep(run: Path, output: Path, destination: Path) -> Path:
    """Copy the directory and the output of a failed run to a new directory in ``destination``; return it."""
    destination.mkdir(exist_ok=True)
    kept = Path(tempfile.mkdtemp(prefix=f"soak-{run.name}-", dir=destination))
    shutil.copytree(run, kept / "run", ignore=shutil.ignore_patterns(disk.BALLAST))
    shutil.copy(output, kept / "run.out")
    return kept
