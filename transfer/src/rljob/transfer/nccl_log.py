"""Which transport NCCL chose, from its own log: NVLink or PCIe (P2P), shared memory (SHM), or a network (NET).

NCCL reads its variables when it makes its first communicator, so :meth:`NcclLog.start` comes before. If the user has
set one of NCCL_DEBUG, NCCL_DEBUG_FILE and NCCL_DEBUG_SUBSYS, nothing is changed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from typing import TextIO

LEVEL, FILE, SUBSYSTEMS = "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"
_CHANNEL = re.compile(r"Channel \S+ : .* via ([A-Z0-9]+(?:/[A-Za-z_]\w*)*)(?:/\d+)?(/GDRDMA)?")
_ENDS = ("/direct", "/indirect", "/read")
"""Details of a transport that are not part of its name."""


class NcclLog:
    """The log of this process's communicators.

    Args:
        environment: variables that NCCL reads.
        directory: for the log, which is removed when it has been opened. Default: that of temporary files.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ, directory: Path | None = None) -> None:
        self._environment = environment
        self._directory = directory
        self._path: Path | None = None
        self._file: TextIO | None = None

    def start(self) -> None:
        """Make NCCL write its log to a file. Does nothing the second time, or if the user has set a variable of it."""
        if self._path is None and not self._users():
            self._path = Path(self._directory or tempfile.gettempdir()) / f"rljob-nccl-{os.getpid()}.log"
            self._environment.update({LEVEL: "INFO", SUBSYSTEMS: "INIT", FILE: str(self._path)})

    def _users(self) -> list[str]:
        """Return the variables of the log that the user has set."""
        return [name for name in (LEVEL, FILE, SUBSYSTEMS) if name in self._environment]

    def transports(self) -> str:
        """Return the transports of the communicators that were connected since the last call, as text."""
        if self._path is None:
            return f"see the log of NCCL (set by the user: {', '.join(self._users())})"
        if self._file is None:
            try:
                self._file = self._path.open(errors="replace")
                self._path.unlink()
            except OSError:
                return f"not known: NCCL wrote no log to {self._path}"
        return summarize(self._file.read())


def summarize(text: str) -> str:
    """Return the transports in a log of NCCL with the number of channels of each."""
    found: Counter[str] = Counter()
    for match in _CHANNEL.finditer(text):
        name = match[1]
        while name.endswith(_ENDS):
            name = name.rpartition("/")[0]
        found[name + (match[2] or "")] += 1
    return ", ".join(f"{name} ({count} channels)" for name, count in sorted(found.items())) or "not known from its log"


PROCESS_LOG = NcclLog()
"""NCCL has one log for all communicators of a process."""
