"""Build engines: Docker, Podman or buildah, the first that works."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.images import docker_archive, host
from tools.images.layout import Layout

ROOT = Path(__file__).parents[2]
_TAIL_LINES = 40
_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """An engine failed, or none is available; the message has the remedy."""


@dataclass(frozen=True)
class Build:
    """One build: the Dockerfile's path, the context directory, and options that all engines have."""

    dockerfile: Path
    context: Path
    tag: str
    target: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    lent: Path | None = None
    """Directory that replaces the stage ``host``, see :mod:`tools.images.host`."""

    def options(self) -> list[str]:
        """Return the options that Docker, Podman and buildah have in common."""
        pairs = [("--file", self.dockerfile), ("--tag", self.tag)]
        pairs += [("--target", self.target)] if self.target else []
        pairs += [("--build-arg", f"{name}={value}") for name, value in self.arguments.items()]
        pairs += [("--label", f"{name}={value}") for name, value in self.labels.items()]
        pairs += [("--build-context", f"host={self.lent}")] if self.lent else []
        return [str(word) for pair in pairs for word in pair]


@dataclass(frozen=True)
class Engine:
    """An engine's command, and the log file of its output."""

    command: Sequence[str]
    log: Path

    def build(self, build: Build) -> None:
        """Build an image. Raises EngineError with the end of the engine's output."""
        raise NotImplementedError

    def export(self, tag: str, layout: Layout) -> None:
        """Copy an image into a layout, under its name."""
        raise NotImplementedError

    def push(self, tag: str, reference: str) -> None:
        """Push an image to a registry."""
        raise NotImplementedError

    def id(self, tag: str) -> str:
        """Return the id of an image (64 digits); empty if it does not exist."""
        ids = self.output("images", "--quiet", "--no-trunc", tag, check=False).split()
        return ids[0].removeprefix("sha256:") if ids else ""

    def close(self) -> None:
        """Unmount everything."""

    def output(self, *words: str, check: bool = True) -> str:
        """Return the stdout of a command."""
        done = subprocess.run([*self.command, *words], capture_output=True, text=True)
        if check and done.returncode != 0:
            raise EngineError(f"{' '.join([*self.command, *words])}: {done.stderr.strip()}")
        return done.stdout

    def run(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Run a command and append its output to the log. Raises EngineError with the end of the output."""
        command = [*self.command, *words]
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | (environment or {})
            ).returncode
        if code != 0:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise EngineError(f"{self.command[0]} {words[0]} ended with exit code {code}:\n{end}\n(all: {self.log})")


class Docker(Engine):
    """Docker with BuildKit. Build steps get no writable directory of the machine: uv's cache is a cache of BuildKit."""

    def build(self, build: Build) -> None:
        self.run("build", *build.options(), str(build.context), environment={"DOCKER_BUILDKIT": "1"})

    def export(self, tag: str, layout: Layout) -> None:
        with tempfile.TemporaryDirectory(dir=layout.path.parent) as scratch:
            archive = Path(scratch, "image.tar")
            self.run("save", "--output", str(archive), tag)
            docker_archive.add(archive, layout, tag)

    def push(self, tag: str, reference: str) -> None:
        self.run("tag", tag, reference)
        self.run("push", reference)


class Buildah(Engine):
    """buildah or Podman, which share the layout of their storage and most options. Steps run in a chroot, which also
    works in a container."""

    def build(self, build: Build) -> None:
        lent = [f"--volume={host.uv_cache(os.environ)}:{host.INSIDE}/{host.CACHE}"] if build.lent else []
        options = ["--isolation=chroot", "--layers", "--format=oci", *lent]
        self.run("build", *options, *build.options(), str(build.context))

    def export(self, tag: str, layout: Layout) -> None:
        word = "{{.Store.GraphRoot}}" if Path(self.command[0]).name == "podman" else "{{.store.GraphRoot}}"
        root = self.output("info", "--format", word).strip()
        program = [sys.executable, "-m", "tools.images.storage", root, str(layout.path), tag, self.id(tag)]
        unshared = program if os.geteuid() == 0 else [self.command[0], "unshare", *program]
        done = subprocess.run(unshared, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise EngineError(f"{tag} could not be read from {root}: {done.stderr.strip().splitlines()[-1]}")

    def push(self, tag: str, reference: str) -> None:
        self.run("push", tag, f"docker://{reference}")

    def close(self) -> None:
        """Unmount everything: the stages of a build and the bind mount of the storage stay mounted."""
        if "--root" in self.command:
            self.output("rm", "--all", check=False)
            if os.geteuid() == 0:
                subprocess.run(["umount", Path(self.command[2], "overlay")], capture_output=True)


@contextmanager
def lent(apt_sources: str) -> Iterator[Path]:
    """Yield a directory with the files of this machine that builds use."""
    with tempfile.TemporaryDirectory(prefix="rljob-images-") as scratch:
        host.lend(Path(scratch), os.environ, apt_sources)
        yield Path(scratch)


def find(cache: Path, wanted: str = "") -> Engine:
    """Return the engine called ``wanted``, or the first of Docker, Podman and buildah that works.

    Raises:
        EngineError: none works, and none can be installed.
    """
    log = cache / "build.log"
    own = [
        "--root",
        str(cache / "storage"),
        "--runroot",
        str(Path(tempfile.gettempdir(), f"rljob-images-{os.getuid()}")),
    ]
    for name, kind, more in (("docker", Docker, []), ("podman", Buildah, []), ("buildah", Buildah, own)):
        if wanted in ("", name) and _works(name):
            more = [*more, "--storage-driver", "overlay"] if more else []
            return kind([name, *more], log)
    if wanted not in ("", "buildah"):
        raise EngineError(f"{wanted} does not work here: `{wanted} info` fails; start it, or choose another engine")
    install("buildah")
    return Buildah(["buildah", *own, "--storage-driver", "overlay"], log)


def _works(name: str) -> bool:
    """Return whether an engine answers; `docker` may be a client without a daemon."""
    return bool(shutil.which(name)) and subprocess.run([name, "info"], capture_output=True).returncode == 0


def install(*programs: str) -> None:
    """Install the Debian packages of missing programs.

    Raises:
        EngineError: the packages cannot be installed.
    """
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineError(f"images are built with Docker, Podman or buildah; install {' and '.join(missing)}")
    _log.info("installing %s", " ".join(missing))
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise EngineError(f"apt-get {' '.join(command)} failed: {done.stderr.strip()[-500:]}")
