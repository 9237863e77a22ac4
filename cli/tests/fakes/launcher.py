"""Starts `rljob run` with fake components, and other commands, for tests."""

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from e2e.fakes.fork_server import rljob_command
from rljob.api.job_status import CheckpointStatus, EvaluationResult, Progress
from rljob.api.yaml_loader import write_yaml
from rljob.cli.main import main
from rljob.local import process_cleanup, processes
from rljob.protocol.run_status import HistoryPoint, RunStatus, encode_status

FAKES = Path(__file__).parent


def status(state="Running", step=2, **more):
    return RunStatus(
        state=state,
        progress=Progress(step=step, steps=3, seconds=12, eta_seconds=4),
        history=[HistoryPoint(i, 0.1 * i, 0.5, 5000, i) for i in range(step)],
        **more,
    )


SUCCEEDED = status(
    "Succeeded",
    step=3,
    last_checkpoint=CheckpointStatus(3, "checkpoints/3"),
    evaluations=[EvaluationResult(0, "sums", 0.25, 1024, 0.25), EvaluationResult(3, "sums", 0.8, 1024, 0.8)],
)


class Launcher:
    """Starts `rljob run` of the same manifest and directory."""

    def __init__(self, tmp_path, manifest):
        self.manifest = manifest
        self.directory = tmp_path / "run"
        self.status = tmp_path / "answer.json"
        self.program = tmp_path / "make-model"
        self.program.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {FAKES / 'component.py'} make $1 $2 $3\n")
        self.program.chmod(0o755)
        manifest["spec"]["initializer"]["command"] = [str(self.program), "job://model"]
        self.file = tmp_path / "job.yaml"
        self.answer(status())
        self.started = []
        self.plot = ""  # drawing takes a second
        self.components = {
            "coordinator": ["coordinator", str(self.status)],
            "trainer": ["wait"],
            "runner": ["child", "wait"],
        }

    def answer(self, new):
        scratch = self.status.with_suffix(".new")
        scratch.write_bytes(encode_status(new))
        scratch.replace(self.status)

    def start(self, *options):
        self.file.write_text(write_yaml(self.manifest))
        program = [FAKES / "rljob_run.py", self.file, self.directory, json.dumps(self.components), *options]
        process = rljob_command(program, {"FAKE_PLOT": self.plot})
        self.started.append(process)
        return process

    def run(self, *options):
        process = self.start(*options)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    def rljob(self, *arguments):
        """Run another command, in this process; return exit code, stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["rljob", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
            sys.exit(0)
        return ended.value.code or 0, out.getvalue(), err.getvalue()

    def events(self):
        path = self.directory / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, subject, event, count=1):
        """Wait for an event of the run; what another process writes can only be looked at."""
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            found = [e for e in self.events() if (e["subject"], e["event"]) == (subject, event)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.005)
        raise AssertionError(f"{subject} {event} did not happen: {self.events()}")

    def alive(self):
        return process_cleanup.marked(processes.mark(self.directory))
