"""Processes of a cluster: each has a log and dies with the program that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_TAIL_BYTES = 3000


class Process:
    """A running program of a cluster. It is ended with SIGKILL: a test cluster keeps no state."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        # The kernel ends the child with the *thread* that started it, and only the main thread lives as long as tests.
        assert threading.current_thread() is threading.main_thread(), "start components in the main thread"
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                cwd=log.parent,
                start_new_session=True,  # this program handles Ctrl-C
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise if it has exited, with the end of its log."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"{self.name} ended with code {code}; the end of {self.log}:\n{tail(self.log)}")

    def resident_bytes(self) -> int:
        """Return its resident memory in bytes."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def pause(self) -> None:
        """Send SIGSTOP, to simulate a hanging machine."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT after :meth:`pause`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and wait for its exit."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class ResourceStack:
    """A context manager that releases its resources on exit, and also if entering fails."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def _open(self) -> None:
        """Acquire the resources and register the release of each on the stack."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:  # including Ctrl-C: a started process must not remain
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


def free_port(address: str) -> int:
    """Return a free port outside the kernel's ephemeral range, so that it can be bound again after a restart."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
