"""Runs system programs: ip, mount, iptables, ctr."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tools.cluster.node.machine import PATH


class CommandError(RuntimeError):
    """A system program failed; the message has its output."""


def run(*command: str, stdin: bytes | None = None) -> str:
    """Run a command and return its output.

    Raises:
        CommandError: the command failed.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, env={"PATH": PATH, "LC_ALL": "C"})
    if done.returncode != 0:
        raise CommandError(failure(command, done.returncode, done.stderr))
    return done.stdout.decode()


def failure(command: Sequence[str], code: int, stderr: bytes) -> str:
    """Return the error message for a failed command."""
    return f"{' '.join(command)} failed with code {code}: {stderr.decode(errors='replace').strip()[-2000:]}"
