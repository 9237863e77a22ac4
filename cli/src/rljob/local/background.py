"""Runs a job in the background: `rljob run --detach`."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import Self

from rljob.api.text_escape import escape_block
from rljob.local.screen import PlainScreen, RunOutput
from rljob.local.snapshot import RunSnapshot

LOG = "run.log"
POLL_SECONDS = 0.2
STARTED = b"1"


class BackgroundScreen(PlainScreen):
    """Writes to a file, and signals through a pipe when the run has started.

    Args:
        log: receives the output of this process once the screen is entered.
        started: the writing end of the pipe.
    """

    def __init__(self, log: Path, started: int) -> None:
        super().__init__(RunOutput())
        self._log = log
        self._started: int | None = started

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line if state or step changed; signal when the run has started."""
        super().show(snapshot)
        status = snapshot.status
        if self._started is not None and status is not None and status.state != "Starting" and not status.message:
            os.write(self._started, STARTED)
            os.close(self._started)
            self._started = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout.flush()


def start(directory: Path) -> BackgroundScreen | None:
    """Fork. The child returns a screen and runs the job in the background; the parent returns None when the run has
    started, and copies the output until then to stderr.

    Raises:
        SystemExit: in the parent, with the exit code of the run, if the run ended before it started.
    """
    log = directory / LOG
    offset = log.stat().st_size if log.exists() else 0
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        return BackgroundScreen(log, writing)
    os.close(writing)
    while not select.select([reading], [], [], POLL_SECONDS)[0]:
        offset += _copy_output(log, offset)
    started = os.read(reading, 1) == STARTED
    os.close(reading)
    status = 0 if started else os.waitpid(pid, 0)[1]
    _copy_output(log, offset)
    if started:
        return None
    sys.exit(os.waitstatus_to_exitcode(status))


def _copy_output(log: Path, offset: int) -> int:
    """Copy the bytes of ``log`` after ``offset`` to stderr; return their number."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return 0
    sys.stderr.write(escape_block(data.decode(errors="replace")))
    sys.stderr.flush()
    return len(data)
