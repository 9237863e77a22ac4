"""metrics.jsonl and TensorBoard's event files of a run: each step and evaluation of the ledger exactly once.

The files follow the ledger and may be lost, torn or removed: missing lines are written again from it. Only the waiting
runs in the event loop, and no error here ends a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sqlite3
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rljob.ledger.step_metrics import Line, evaluations, new_lines
from rljob.ledger.store import LEDGER

log = logging.getLogger(__name__)

SECONDS = 1.0
"""Between two looks at the ledger."""
RETRY_SECONDS = 10.0
MOST_AT_ONCE = 256
MARKS = {"step": b'{"kind":"step"', "evaluation": b'{"kind":"evaluation"'}


class TrackingWriter:
    """The files of one run. Methods block.

    Args:
        storage: of the job: reads ledger.sqlite, writes metrics.jsonl and tensorboard/.
        tensorboard: whether to write event files.
    """

    def __init__(self, storage: Path, tensorboard: bool) -> None:
        self._ledger = storage / LEDGER
        self._path = storage / "metrics.jsonl"
        self._events_directory = storage / "tensorboard" if tensorboard else None
        self._lock = threading.Lock()  # a thread may still write when another is to finish
        self._file: BinaryIO | None = None
        self._events: EventFile | None = None
        self._written = dict.fromkeys(MARKS, 0)  # lines of each kind

    def write(self) -> bool:
        """Write what the ledger has and the files have not; return whether there may be more. After an error the next
        call begins with the files as they are.

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
            lines = new_lines(db, self._written["step"], self._written["evaluation"], MOST_AT_ONCE)
            if lines and self._events is None and self._events_directory is not None:
                self._events = self._open_events(db, self._events_directory)
        for line in lines:
            if self._events is not None:
                self._events.add(line)  # before the line: a step that is missing there is written again to both
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            self._written[line["kind"]] += 1
        return len(lines) >= MOST_AT_ONCE

    def _close(self) -> None:
        for file in (self._file, self._events):
            if file is not None:
                with contextlib.suppress(OSError):  # what could not be written will be by the next
                    file.close()
        self._file = self._events = None

    def _open(self) -> BinaryIO:
        """Open metrics.jsonl behind its last whole line, and count what it has."""
        self._path.touch()
        file = self._path.open("r+b")
        self._written, end = dict.fromkeys(MARKS, 0), 0
        for line in file:
            kind = next((kind for kind, mark in MARKS.items() if line.startswith(mark) and line.endswith(b"}\n")), None)
            if kind is None:
                log.warning("%s is torn at byte %d; the rest is written again", self._path, end)
                break
            self._written[kind] += 1
            end += len(line)
        file.seek(end)
        file.truncate()
        return file

    def _open_events(self, db: sqlite3.Connection, directory: Path) -> EventFile:
        """Begin an event file that takes the place of what earlier ones have from the next step on. Evaluations of
        those versions are among it, so they are repeated."""
        first = self._written["step"]
        events = EventFile(directory, first)
        for line in evaluations(db, 0, self._written["evaluation"]):
            if line["version"] >= first:
                events.add(line)
        return events


class EventFile:
    """One of TensorBoard's event files, durable line by line.

    Args:
        directory: where it is made.
        first: readers forget what earlier files of the directory have for this step and later ones.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path, first: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}"  # read in order of name
        self._records = RecordWriter(path.open("wb"))
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._write(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            path.unlink(missing_ok=True)  # one at every try would fill the directory
            raise

    def add(self, line: Line) -> None:
        """Add the figures of a line."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in line.items()
            if isinstance(value, int | float) and name not in ("step", "version", "time")
        ]
        step = line["step"] if line["kind"] == "step" else line["version"]
        self._write(Event(wall_time=line["time"], step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


async def follow(tracking: TrackingWriter) -> None:
    """Keep the files up to the ledger, for ever. What goes wrong is logged once and tried again."""
    failed = False
    while True:
        try:
            more = await asyncio.to_thread(tracking.write)
        except (OSError, sqlite3.Error) as error:
            if not failed:
                log.warning("metrics cannot be written (%s); trying again until they can", error)
            failed = True
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if failed:
            log.warning("metrics can be written again")
        failed = False
        await asyncio.sleep(0 if more else SECONDS)


def finish(tracking: TrackingWriter) -> None:
    """Write what is left, if it can be written, and close the files."""
    try:
        while tracking.write():
            pass
    except (OSError, sqlite3.Error) as error:
        log.warning("the last metrics could not be written (%s); they are written when the run continues", error)
    tracking.close()
