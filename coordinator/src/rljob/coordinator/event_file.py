"""TensorBoard event files."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rljob.ledger.step_metrics import Line


class EventFile:
    """A TensorBoard event file, flushed after each event.

    Args:
        directory: directory of the file.
        first: TensorBoard discards events of earlier files for this step and later ones.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path, first: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        path = directory / f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}"
        self._records = RecordWriter(path.open("wb"))
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._write(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            path.unlink(missing_ok=True)  # a file for every attempt would fill the directory
            raise

    def add(self, line: Line) -> None:
        """Write the metrics of a line."""
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
