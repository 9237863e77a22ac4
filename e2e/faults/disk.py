"""Mounts small disks and fills them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

BALLAST = "ballast"


class NoMountsError(Exception):
    """Disks cannot be mounted here."""


def private_mounts() -> list[str]:
    """Return a command that runs another in a private mount namespace.

    Raises:
        NoMountsError: the message has the cause.
    """
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    probe = subprocess.run([*namespace, "mount", "-t", "tmpfs", "rljob-test", "/mnt"], capture_output=True, text=True)
    if probe.returncode:
        raise NoMountsError(
            f"no small disk can be mounted here, not even in a private mount namespace: {probe.stderr.strip()}"
        )
    return namespace


@contextlib.contextmanager
def small_disk(directory: Path, size: int) -> Iterator[None]:
    """Mount a separate disk of ``size`` bytes at ``directory`` for the duration of the context."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "rljob-test", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(directory: Path) -> None:
    """Fill the disk of ``directory``."""
    with (directory / BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def empty(directory: Path) -> None:
    """Free the space."""
    (directory / BALLAST).unlink(missing_ok=True)
