"""A run that continues in the background, and the commands that look at it: status, logs, stop."""

import itertools
import json
import os
import signal
import time
import types

import pytest

from cli.tests.fakes.launcher import SUCCEEDED, status
from e2e.fakes.fork_server import rljob_command
from rljob.api.job_status import CheckpointStatus
from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.local import stop
from rljob.local.run_directory import RunDirectory
from rljob.local.snapshot import take_snapshot
from rljob.local.snapshot_view import plain_lines
from rljob.protocol.run_status import RunStatus


@pytest.fixture
def detached(launcher):
    """A run in the background."""
    launcher.answer(status(last_checkpoint=CheckpointStatus(2, "checkpoints/step-000002")))
    code, out, err = launcher.run("--detach")
    assert code == 0, err
    launcher.out, launcher.err = out, err
    yield launcher
    if RunDirectory(launcher.directory).running():
        launcher.rljob("stop", "--now", launcher.directory)


def test_a_detached_run_continues_after_the_command_has_said_how_to_watch_and_stop_it(detached):
    assert detached.out == (
        f"the run continues in the background, in {detached.directory}\n"
        f"watch it:  rljob status --watch {detached.directory}   or   rljob logs -f {detached.directory}\n"
        f"stop it:   rljob stop {detached.directory}\n"
    )
    directory = RunDirectory(detached.directory)
    assert directory.running()
    assert os.getsid(directory.pid()) == directory.pid()
    assert "step 2/3" in (detached.directory / "run.log").read_text()
    code, out, _ = detached.rljob("status", detached.directory)
    assert code == 0
    for piece in ("sums", "running", "2/3  0:04 left", "0.100", "● trainer"):
        assert piece in out
    code, out, err = detached.rljob("stop", detached.directory)
    assert (code, err) == (0, "")
    assert out == (
        f"suspended at step 2, checkpoint {detached.directory}/checkpoints/step-000002; rljob run resumes it\n"
    )
    assert detached.alive() == []
    code, out, _ = detached.rljob("status", "-o", "json", detached.directory)
    data = json.loads(out)
    assert code == 3
    assert (data["state"], data["running"], data["status"]["progress"]["step"]) == ("suspended", False, 2)
    assert detached.rljob("stop", detached.directory)[:2] == (
        0,
        f"the run in {detached.directory} is not running; it is suspended\n",
    )


def test_stop_now_does_not_wait_for_a_checkpoint(detached, monkeypatch):
    """Also if the run gets no CPU before both signals were sent."""
    os.kill(detached.wait_for("coordinator", "started")["pid"], signal.SIGSTOP)
    pid, polls = RunDirectory(detached.directory).pid(), itertools.count(1)
    os.kill(pid, signal.SIGSTOP)

    def sleep(seconds):
        if next(polls) == 3:
            os.kill(pid, signal.SIGCONT)
        time.sleep(seconds)

    monkeypatch.setattr(stop, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    code, out, err = detached.rljob("stop", "--now", detached.directory)
    assert (code, err) == (0, "")
    assert out == "interrupted; rljob run resumes it\n"
    assert detached.alive() == []


def test_a_detached_run_that_cannot_start_says_so_and_exits_as_it_does(launcher):
    launcher.answer(RunStatus("Starting"))
    launcher.components["trainer"] = ["say", "there is no GPU here", "exit", "2"]
    code, out, err = launcher.run("--detach")
    assert (code, out) == (2, "")
    assert err.endswith(
        "rljob: trainer rejects its configuration; see the end of its log\n"
        f"{launcher.directory}/logs/trainer.log:\n  there is no GPU here\n"
    )
    code, out, _ = launcher.rljob("status", launcher.directory)
    assert code == 1
    assert "failed: trainer rejects its configuration" in out


def test_a_detached_run_that_is_refused_leaves_nothing(launcher):
    launcher.manifest["spec"]["initializer"]["command"] = ["frobnicate"]
    code, out, err = launcher.run("--detach")
    assert (code, out) == (2, "")
    assert err.startswith("rljob: spec.initializer.command[0]: 'frobnicate' does not exist; install it")
    assert not launcher.directory.exists()


def test_a_run_that_was_killed_shows_how_far_it_came(detached):
    run = RunDirectory(detached.directory)
    os.kill(run.pid(), signal.SIGKILL)
    while detached.alive() or run.running():  # a process that ends releases its lock last
        pass
    (detached.directory / "status.json").write_text('{"state": "Running", "progress": {"step": 2, "steps": 3}}')
    code, out, _ = detached.rljob("status", detached.directory)
    assert code == 3
    assert "interrupted: rljob run resumes it" in out
    assert "2/3" in out


@pytest.fixture
def directory(manifest, tmp_path):
    """The directory of a run that continues in this process, as it is before any component was started."""
    directory = RunDirectory(tmp_path / "run")
    with directory.opened(resolve(validate(manifest)), b""):
        directory.tell("run", "started")
        yield directory


def test_status_says_that_the_initializer_runs_for_how_long_and_what_it_says(directory, monkeypatch):
    directory.tell("initializer", "started", pid=1)
    log = directory.path / "logs/initializer.log"
    log.write_text("--- started now\n3 of 9 files\n")
    now = time.time()
    monkeypatch.setattr("rljob.local.snapshot.time.time", lambda: now + 65)
    lines = list(plain_lines(take_snapshot(directory)))
    assert lines[0].endswith(" 1:05")
    assert lines[1:] == ["state      starting: running the initializer", "log        3 of 9 files"]
    directory.tell("initializer", "exited", pid=1, code=0)
    assert list(plain_lines(take_snapshot(directory)))[1:] == ["state      starting"]


def test_the_ledger_of_a_run_that_has_none_yet_says_why(directory, launcher):
    assert directory.path == launcher.directory
    code, out, err = launcher.rljob("audit", directory.path)
    start = f"rljob: the run in {directory.path} has no ledger yet:"
    assert (code, out, err) == (2, "", f"{start} it is starting; try again when it trains\n")
    directory.tell("initializer", "started", pid=1)
    assert launcher.rljob("samples", directory.path)[2] == f"{start} its initializer runs; try again when it trains\n"


def test_a_damaged_run_directory_is_named(directory, launcher):
    directory.tell("run", "succeeded")
    directory.write("status.json", b"{")
    directory.running = lambda: False
    assert take_snapshot(directory).message == f"{directory.path}/status.json is damaged, its metrics cannot be shown"
    directory.write("events.jsonl", b"{}\n7\n" + b"[" * 100_000)
    for data, problem in ((b"{", "valid JSON"), (b"[" * 100_000, "valid JSON"), (b"{}", "a manifest")):
        directory.write("job.json", data)
        code, out, err = launcher.rljob("status", directory.path)
        assert (code, out) == (2, "")
        assert err == f"rljob: {directory.path}/job.json is damaged: it is not {problem}; restore it\n"


def test_status_watches_until_the_run_ends(detached):
    program = ["-m", "rljob.cli.main", "status", "--watch", "-o", "json", detached.directory]
    with rljob_command(program, {}) as process:
        assert json.loads(process.stdout.readline())["state"] == "running"
        detached.answer(SUCCEEDED)
        states = [json.loads(line)["state"] for line in process.stdout]
    assert states[-1] == "succeeded"
    assert process.returncode == 0


def test_restarts_and_their_reason_are_shown(launcher):
    launcher.components["trainer"] = [
        "say",
        "No space left on device",
        "once",
        str(launcher.directory / "mark"),
        "1",
        "wait",
    ]
    process = launcher.start()
    launcher.wait_for("trainer", "started", 2)
    _, out, _ = launcher.rljob("status", launcher.directory)
    assert "trainer (1 restart)" in out
    assert "trainer exited with code 1 (No space left on device)" in out
    launcher.answer(SUCCEEDED)
    out, _ = process.communicate(timeout=100)
    assert "trainer exited with code 1 (No space left on device); restarting it" in out


def test_logs_follow_a_component_over_its_death_until_the_run_ends(detached):
    program = ["-m", "rljob.cli.main", "logs", "-f", detached.directory, "trainer"]
    with rljob_command(program, {}) as process:
        assert process.stdout.readline().startswith("--- started ")
        assert process.stdout.readline() == "waiting\n"
        os.kill(detached.wait_for("trainer", "started")["pid"], signal.SIGKILL)
        assert "(restart 1)" in process.stdout.readline()
        assert process.stdout.readline() == "waiting\n"
        detached.answer(SUCCEEDED)
        assert process.stdout.read() == ""
    assert process.returncode == 0


def test_logs_of_all_components_carry_their_names(detached):
    code, out, _ = detached.rljob("logs", detached.directory)
    assert code == 0
    assert "trainer     | waiting\n" in out
    code, out, _ = detached.rljob("logs", detached.directory, "trainer", "-o", "json", "--tail", "1")
    assert [json.loads(line)["line"] for line in out.splitlines()] == ["waiting"]
    code, out, err = detached.rljob("logs", detached.directory, "engine")
    assert (code, out) == (2, "")
    assert err == (
        f"rljob: there is no log of 'engine' in {detached.directory}/logs; "
        "name one of coordinator, initializer, runner, trainer\n"
    )
