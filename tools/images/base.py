"""A base image without a registry: Debian's smallest system with Python, made by debootstrap from the mirror that this
machine uses. It is built once and kept as a tar file named by the hash of its inputs."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("ca-certificates", "python3")
DPKG = """force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/info/*
"""
"""Settings of dpkg: the excluded files are not needed in a container, and after a crash the build starts again."""
OFFICIAL = "deb http://deb.debian.org/debian {suite} main\n"
"""The sources.list in the image: the address of this machine's mirror must not be in images."""
EMPTIED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "dev")
SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d"))
_log = logging.getLogger(__name__)


class NoBaseError(RuntimeError):
    """A base image cannot be built here; the message has the remedy."""


@dataclass(frozen=True)
class Release:
    """A release of Debian or a derivative, and the mirror of its packages."""

    suite: str
    mirror: str

    @property
    def sources(self) -> str:
        """The sources.list of its packages."""
        return f"deb {self.mirror} {self.suite} main\n"

    @property
    def key(self) -> str:
        """Hash of the inputs of the base image."""
        recipe = [self.suite, *PACKAGES, DPKG, OFFICIAL, *EMPTIED]
        return hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]


def release_here(sources: Iterable[Path] = SOURCES, os_release: Path = Path("/etc/os-release")) -> Release:
    """Return this machine's release.

    Raises:
        NoBaseError: the machine does not run Debian, or its apt sources name no mirror.
    """
    found = (
        re.search(r"^VERSION_CODENAME=\"?(\w+)", os_release.read_text(), re.MULTILINE) if os_release.exists() else None
    )
    files = [
        file for path in sources for file in (sorted(path.glob("*")) if path.is_dir() else [path]) if file.is_file()
    ]
    text = "".join(f"{file.read_text()}\n\n" for file in files)
    suite = found[1] if found else ""
    stanzas = re.findall(r"^URIs: *(\S+).*\nSuites: *(.*)$", text, re.MULTILINE)
    stanzas += re.findall(r"^deb +(?:\[[^\]]*\] +)?(\S+) +(\S+)", text, re.MULTILINE)
    for mirror, suites in stanzas:
        if suite and suite in suites.split():
            return Release(suite, mirror)
    raise NoBaseError("the apt sources of this machine name no mirror of its release; name an image with BASE=")


def make(release: Release, directory: Path) -> Path:
    """Return the tar file of the base image of ``release`` in ``directory``; build it if it is missing (2 min, root).

    Raises:
        NoBaseError: the message has the remedy.
    """
    target = directory / f"base-{release.suite}-{release.key}.tar"
    if target.exists():
        return target
    if os.geteuid() != 0:
        raise NoBaseError("only root can make a base image with debootstrap; name an image with BASE=, or run as root")
    _log.info("base: %s with debootstrap from %s", release.suite, release.mirror)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        root = Path(scratch, "root")
        settings = root / "etc/dpkg/dpkg.cfg.d/rljob"
        settings.parent.mkdir(parents=True)
        settings.write_text(DPKG)
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        done = subprocess.run(
            ["debootstrap", *options, release.suite, root, release.mirror],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise NoBaseError(f"debootstrap failed; name an image with BASE=\n{done.stdout[-2000:]}")
        settings.unlink()
        for name in EMPTIED:
            _empty(root / name)
        official = OFFICIAL.format(suite=release.suite) if "debian" in release.mirror else ""
        (root / "etc/apt/sources.list").write_text(official)
        new = Path(scratch, "base.tar")
        subprocess.run(["tar", "-C", root, "--numeric-owner", "--sort=name", "-cf", new, "."], check=True)
        new.rename(target)
    return target


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
