"""Runs a job in the background: `rljob run --detach`."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import Self

from rljob.local.screen import PlainScreen, RunOutput
from rljob.local.snapshot import RunSnapshot

LOG = "run.log"
POLL_SECONDS = 0.2
STARTED = b"1"


class BackgroundScreen(PlainScreen):
    """Writes to a file, and signals through a pipe when the run has started.

    Args:
        log: the file; the output of this process goes there from then on.
        waiting: the writing end of the pipe.
    """

    def __init__(self, log: Path, waiting: int) -> None:
        super().__init__(RunOutput())
        self._log = log
        self._waiting: int | None = waiting

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line if state or step changed; signal when the run has started."""
        super().show(snapshot)
        status = snapshot.status
        if self._waiting is not None and status is not None and status.state != "Starting" and not status.message:
            os.write(self._waiting, STARTED)
            os.close(self._waiting)
            self._waiting = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout.flush()


def start(directory: Path) -> BackgroundScreen | None:
    """Fork: return a screen in the process that runs the job in the background, and None in the foreground once the run
    has started. Output until then is copied to stderr.

    Raises:
        SystemExit: in the foreground, if the run ended before that; with its exit code.
    """
    log = directory / LOG
    seen = log.stat().st_size if log.exists() else 0
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return BackgroundScreen(log, writing)
    os.close(writing)
    while not select.select([reading], [], [], POLL_SECONDS)[0]:
        seen += _pass_on(log, seen)
    started = os.read(reading, 1) == STARTED
    os.close(reading)
    how = 0 if started else os.waitpid(pid, 0)[1]
    _pass_on(log, seen)
    if started:
        return None
    sys.exit(os.waitstatus_to_exitcode(how))


def _pass_on(log: Path, seen: int) -> int:
    """Copy to stderr the bytes appended to ``log`` after ``seen``; return their number."""
    try:
        with log.open("rb") as file:
            file.seek(seen)
            news = file.read()
    except FileNotFoundError:
        return 0
    sys.stderr.write(news.decode(errors="replace"))
    sys.stderr.flush()
    return len(news)
