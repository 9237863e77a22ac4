"""Builds the programs of a cluster from Go modules, once: control plane, kwok, helm, CoreDNS, the pause container.

Only Go's module proxy is needed, no registry and no release page. A program is cached under the hash of its inputs, so
it is built once, and a version is changed in one go.mod.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.cluster import toolchain

HERE = Path(__file__).parent
NODE = ("kube-proxy", "kubelet")
"""Programs of a node."""
KUBERNETES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet")
_log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """A program could not be built."""


@dataclass(frozen=True)
class Program:
    """A Go program to build from the module in the directory ``name``."""

    name: str
    package: str
    """Package to build: a path within the module, or an import path."""
    stamps: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Go variable → (module, text); {version}, {major}, {minor} in the text are replaced by those of go.mod."""
    names: Sequence[str] = ()
    """Names of the program, if it has several."""
    module: str = ""
    """Directory of the module, if it is not ``name``."""
    modfile: str = "go.mod"
    """File of the versions; beside it is its file of checksums."""

    @property
    def directory(self) -> Path:
        """The directory of its module."""
        return HERE / (self.module or self.name)

    def flags(self) -> list[str]:
        """Return the flags of ``go build``.

        Raises:
            BuildError: go.mod does not name the module.
        """
        stamps = [f"-X {name}={self._stamp(*stamp)}" for name, stamp in self.stamps.items()]
        other = [f"-modfile={self.modfile}"] if self.modfile != "go.mod" else []
        return ["-trimpath", *other, "-ldflags", " ".join(["-s", "-w", *stamps])]

    def _stamp(self, module: str, text: str) -> str:
        path = self.directory / self.modfile
        found = re.search(rf"^\s*{re.escape(module)} v((\d+)\.(\d+)\S*)", path.read_text(), re.MULTILINE)
        if found is None:
            raise BuildError(f"{path} does not require {module}")
        return text.format(**dict(zip(("version", "major", "minor"), found.groups(), strict=True)))

    def key(self, go_version: str) -> str:
        """Return the hash of all inputs of the program."""
        digest = hashlib.sha256()
        sources = sorted(self.directory.glob("*.go"))
        versions = self.directory / self.modfile
        for path in [versions, versions.with_suffix(".sum"), *sources]:
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
        digest.update("\0".join([self.package, go_version, *self.flags(), *self.names]).encode())
        return digest.hexdigest()[:16]


KUBERNETES_STAMPS = {
    f"k8s.io/component-base/version.{variable}": ("k8s.io/kubernetes", text)  # without these the version is v0.0.0
    for variable, text in {"gitVersion": "v{version}", "gitMajor": "{major}", "gitMinor": "{minor}"}.items()
}
HELM_STAMPS = {
    "helm.sh/helm/v3/internal/version.version": ("helm.sh/helm/v3", "v{version}"),
    # The Kubernetes version that `helm template` and `helm lint` assume; the default is 1.20.
    "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": ("k8s.io/client-go", "{minor}"),
    "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor": ("k8s.io/client-go", "{minor}"),
}
KWOK_STAMPS = {"sigs.k8s.io/kwok/pkg/consts.Version": ("sigs.k8s.io/kwok", "{version}")}
OTHER_VERSIONS = ("1.33", "1.37")
"""The oldest and the newest supported version of Kubernetes; tests usually run on that of go.mod."""
VERSION = "RLJOB_KUBERNETES"
"""Variable with one of OTHER_VERSIONS: the tests of e2e/integration use a control plane of that version."""
PROGRAMS = {
    program.name: program
    for program in [
        Program("controlplane", ".", KUBERNETES_STAMPS, KUBERNETES),
        *(
            Program(
                f"controlplane-{version}",
                ".",
                KUBERNETES_STAMPS,
                [name for name in KUBERNETES if name not in NODE],
                module="versions",
                modfile=f"kubernetes-{version}.mod",
            )
            for version in OTHER_VERSIONS
        ),
        Program("kwok", "sigs.k8s.io/kwok/cmd/kwok", KWOK_STAMPS),
        Program("coredns", "."),
        Program("helm", "helm.sh/helm/v3/cmd/helm", HELM_STAMPS),
        Program("pause", "."),
    ]
}


def usual() -> list[str]:
    """Return the names of the programs that a cluster of the usual version needs."""
    return [name for name in PROGRAMS if name not in {f"controlplane-{version}" for version in OTHER_VERSIONS}]


def control_plane(version: str | None = None) -> str:
    """Return the name of the program of a control plane. ``version``: one of OTHER_VERSIONS, or "" for that of go.mod;
    default: RLJOB_KUBERNETES.

    Raises:
        BuildError: it is none of them.
    """
    chosen = os.environ.get(VERSION, "") if version is None else version
    if chosen and chosen not in OTHER_VERSIONS:
        raise BuildError(f"{VERSION}: must be one of {', '.join(OTHER_VERSIONS)}, or empty, not {chosen!r}")
    return f"controlplane-{chosen}" if chosen else "controlplane"


def cache_directory() -> Path:
    """Return the directory of built programs: rljob/cluster in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "cluster"


def ensure(name: str, report: Callable[[str], object] = _log.info) -> Path:
    """Return the directory with the program ``name`` under each of its names; build it if it is missing.

    ``report`` is called with a message before a long step.

    Raises:
        BuildError: the program cannot be built.
        NoToolchainError: Go is not available.
    """
    program, cache = PROGRAMS[name], cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f"{name}.lock"):  # a second builder waits and then finds the result
        go, version = toolchain.find(program.directory, cache)
        home = cache / f"{name}-{program.key(version)}"
        if not home.exists():
            _build(program, go, home, report)
    return home


def _build(program: Program, go: Path, home: Path, report: Callable[[str], object]) -> None:
    report(f"building {program.name} from {program.directory} (minutes, the first time)")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f"{program.name}-") as scratch:
        binary = Path(scratch, "new", program.name)
        command = [
            str(go),
            "build",
            *program.flags(),
            "-mod=readonly",
            "-buildvcs=false",
            "-o",
            str(binary),
            program.package,
        ]
        done = subprocess.run(
            command, cwd=program.directory, env=os.environ | {"CGO_ENABLED": "0"}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise BuildError(f"go build of {program.directory} failed:\n{done.stderr.strip()[-4000:]}")
        install(program, binary, home)
    report(f"built {program.name} in {time.monotonic() - start:.0f} s")


def install(program: Program, binary: Path, home: Path) -> None:
    """Link ``binary`` under its names and move its directory to ``home`` atomically."""
    for name in program.names:
        binary.with_name(name).symlink_to(binary.name)
    os.rename(binary.parent, home)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure_all(names: Sequence[str]) -> dict[str, Path]:
    """Return the directory of each program; build missing ones."""
    return {name: ensure(name) for name in names}
