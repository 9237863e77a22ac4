"""metrics.jsonl and TensorBoard event files of a run: each step and evaluation of the ledger exactly once.

The files are derived from the ledger: if they are lost, torn or removed, missing lines are written again. File I/O runs
in a thread, and no error here ends a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from rljob.ledger.step_metrics import evaluations, new_lines
from rljob.ledger.store import LEDGER, ledger_directory

if TYPE_CHECKING:
    from rljob.coordinator.event_file import EventFile

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval of queries on the ledger."""
RETRY_SECONDS = 10.0
MAX_LINES = 256
PREFIXES = {"step": b'{"kind":"step"', "evaluation": b'{"kind":"evaluation"'}


class TrackingWriter:
    """Writes the files of one run. Methods block.

    Args:
        storage: the job's storage: writes metrics.jsonl and tensorboard/.
        tensorboard: whether to write event files.
    """

    def __init__(self, storage: Path, tensorboard: bool) -> None:
        self._ledger = ledger_directory(storage) / LEDGER
        self._path = storage / "metrics.jsonl"
        self._events_directory = storage / "tensorboard" if tensorboard else None
        self._lock = threading.Lock()  # a thread may still write while another thread finishes
        self._file: BinaryIO | None = None
        self._events: EventFile | None = None
        self._written = dict.fromkeys(PREFIXES, 0)  # lines of each kind

    def write(self) -> bool:
        """Write the lines of the ledger that the files lack; return whether there may be more. After an error the next
        call opens the files again and continues after their last complete line.

        Raises:
            OSError: a file cannot be written.
            sqlite3.Error: the ledger cannot be read.
        """
        with self._lock:
            try:
                return self._write()
            except (OSError, sqlite3.Error):
                self._close()
                raise

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._close()

    def _write(self) -> bool:
        if self._file is None:
            self._file = self._open()
        with contextlib.closing(sqlite3.connect(f"file:{self._ledger}?mode=ro", uri=True)) as db:
            db.row_factory = sqlite3.Row
            lines = new_lines(db, self._written["step"], self._written["evaluation"], MAX_LINES)
            if lines and self._events is None and self._events_directory is not None:
                self._events = self._open_events(db, self._events_directory)
        for line in lines:
            if self._events is not None:
                self._events.add(line)  # before metrics.jsonl: a line missing there is written again to both
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            self._written[line["kind"]] += 1
        return len(lines) >= MAX_LINES

    def _close(self) -> None:
        for file in (self._file, self._events):
            if file is not None:
                with contextlib.suppress(OSError):  # the next write repeats it
                    file.close()
        self._file = self._events = None

    def _open(self) -> BinaryIO:
        """Open metrics.jsonl for writing after its last complete line, and count its lines."""
        self._path.touch()
        file = self._path.open("r+b")
        self._written, end = dict.fromkeys(PREFIXES, 0), 0
        for line in file:
            kind = next(
                (k for k, prefix in PREFIXES.items() if line.startswith(prefix) and line.endswith(b"}\n")), None
            )
            if kind is None:
                log.warning("%s is torn at byte %d; the lines after that are written again", self._path, end)
                break
            self._written[kind] += 1
            end += len(line)
        file.seek(end)
        file.truncate()
        return file

    def _open_events(self, db: sqlite3.Connection, directory: Path) -> EventFile:
        """Open an event file that supersedes the events of earlier files from the next step on. That includes
        evaluations of those versions, so they are written again."""
        # TensorBoard takes longer to import than the rest of the coordinator, whose restart all components wait for.
        from rljob.coordinator.event_file import EventFile  # noqa: PLC0415

        first = self._written["step"]
        events = EventFile(directory, first)
        for line in evaluations(db, 0, self._written["evaluation"]):
            if line["version"] >= first:
                events.add(line)
        return events


async def follow(tracking: TrackingWriter) -> None:
    """Keep the files up to date with the ledger until cancelled. An error is logged once and retried."""
    failed = False
    while True:
        try:
            more = await asyncio.to_thread(tracking.write)
        except (OSError, sqlite3.Error) as error:
            if not failed:
                log.warning("metrics cannot be written: %s; retrying", error)
            failed = True
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if failed:
            log.warning("metrics can be written again")
        failed = False
        await asyncio.sleep(0 if more else POLL_SECONDS)


def finish(tracking: TrackingWriter) -> None:
    """Write the remaining lines if possible, and close the files."""
    try:
        while tracking.write():
            pass
    except (OSError, sqlite3.Error) as error:
        log.warning("the last metrics could not be written: %s; they are written when the run continues", error)
    tracking.close()
