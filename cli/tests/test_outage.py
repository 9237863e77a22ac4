"""What the screens show of failures: a full disk, a silent coordinator, an engine that cannot start."""

import re
import time
from collections import namedtuple

import pytest

from cli.tests.fakes.launcher import status
from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.local.local_run import LocalRun
from rljob.local.outage import SILENCE_SECONDS, is_full
from rljob.local.run_directory import RunDirectory
from rljob.local.snapshot import take_snapshot
from rljob.local.snapshot_view import plain_lines
from rljob.protocol.run_status import ComponentStatus, encode_status

Usage = namedtuple("Usage", "total free")


@pytest.fixture
def job(manifest):
    return resolve(validate(manifest))


@pytest.fixture
def directory(job, tmp_path):
    """The directory of a run that has had a coordinator; no process runs, so the coordinator does not answer."""
    directory = RunDirectory(tmp_path / "run")
    with directory.opened(job, b""):
        directory.tell("run", "started")
        directory.tell("run", "Running", step=1)
        directory.write("status.json", encode_status(status()))
        yield directory


@pytest.fixture
def disk(monkeypatch):
    """The disk, with room; a test fills it."""
    usage = {"free": 1 << 40}
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 41, usage["free"]))
    return usage


def test_status_names_a_silent_coordinator_and_the_age_of_its_last_status(directory, disk, monkeypatch):
    written = (directory.path / "status.json").stat().st_mtime
    monkeypatch.setattr("rljob.local.snapshot.time.time", lambda: written + 9)
    snapshot = take_snapshot(directory)
    assert snapshot.stage == "running: the coordinator does not answer"
    assert "its last status is 9 s old" in snapshot.note
    disk["free"] = 0
    lines = list(plain_lines(take_snapshot(directory)))
    assert f"state      running: the disk of {directory.path} is full: make room there" in lines
    assert "note       the coordinator does not answer; its last status is 9 s old" in lines


@pytest.mark.parametrize("state", ["started", "Succeeded", "failed"])
def test_a_coordinator_that_is_not_expected_to_answer_is_not_missed(directory, disk, state):
    directory.tell("run", state)
    assert "answer" not in take_snapshot(directory).stage + take_snapshot(directory).note


class Notes:
    """A screen that keeps its notes."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.fixture
def run(job, directory):
    return LocalRun(job, directory, Notes(), lambda *_: [], None)


def test_the_screen_names_a_silent_coordinator_and_a_full_disk(run, directory, disk):
    run._status, run._answered = status(message="waiting for a runner to connect"), time.monotonic()
    assert run._snapshot().stage == "running: waiting for a runner to connect"
    run._answered -= SILENCE_SECONDS + 7
    assert run._snapshot().stage == "running: the coordinator does not answer"
    assert re.search(r"does not answer; its last status is \d+ s old", run._snapshot().note)
    disk["free"] = 0
    assert run._snapshot().stage == f"running: the disk of {directory.path} is full: make room there"
    run._status = status("Succeeded")
    assert run._snapshot().note == ""


def test_a_full_disk_is_named_before_the_coordinator_has_answered(run, directory, disk):
    directory.tell("run", "started")
    (directory.path / "status.json").unlink()
    for stage in (run._snapshot().stage, take_snapshot(directory).stage):
        assert stage == "starting"
    disk["free"] = 0
    for stage in (run._snapshot().stage, take_snapshot(directory).stage):
        assert stage == f"starting: the disk of {directory.path} is full: make room there"
    run._ending = "stopping"
    assert run._snapshot().stage == "stopping"


def test_restarts_on_a_full_disk_are_noted_once_until_they_change(run, directory):
    full = {"code": 1, "full": str(directory.path)}
    for _ in range(3):
        run._tell("coordinator", "restarting", **full)
    run._tell("runner", "restarting", **full)
    run._tell("coordinator", "restarting", **full | {"code": -9})
    run._tell("coordinator", "restarting", **full)
    for _ in range(2):
        run._tell("trainer", "restarting", code=-9)
    reason = f"the disk of {directory.path} is full: make room there"
    assert run._screen.lines == [
        f"coordinator exited with code 1 ({reason}); restarting it",
        f"runner exited with code 1 ({reason}); restarting it",
        f"coordinator was killed by signal 9 ({reason}); restarting it",
        f"coordinator exited with code 1 ({reason}); restarting it",
        "trainer was killed by signal 9; restarting it",
        "trainer was killed by signal 9; restarting it",
    ]


def test_an_engine_that_has_failed_is_not_called_restarted(run):
    for instance, state in (("main-1", "starting"), ("main-1", "starting"), ("main-2", "failed")):
        run._note_engines(status(components=[ComponentStatus("agent", instance, state, 1, "it died")]))
    assert run._screen.lines == ["engine of main-1: it died; restarting it", "engine of main-2: it died"]


def test_a_file_system_without_a_size_is_not_full(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(0, 0))
    assert not is_full(tmp_path)
