"""Probes of a part that serves nobody read the files that it touches, and those of the container that runs now only."""

import os
import subprocess
import sys
import time

import pytest

from rljob.protocol import health_probe


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the part says things; both variables name files there."""
    monkeypatch.setenv(health_probe.HEARTBEAT, str(tmp_path / "beat"))
    monkeypatch.setenv(health_probe.READY, str(tmp_path / "ready"))
    return tmp_path


def ask(*words):
    """Return exit code and sentence of the probe's program."""
    command = [sys.executable, "-m", "rljob.protocol.health_probe", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("beat", "alive"),
    [
        (0.0, True),  # it has not begun to serve
        (90.0, True),  # of the container before
        (150.0, False),
        (181.0, True),
        (500.0, True),  # the clock went back
    ],
)
def test_a_probe_counts_beats_of_the_container_that_runs_now(beat, alive):
    assert health_probe.is_alive(beat, started=100.0, now=200.0, timeout=20.0) is alive


@pytest.mark.parametrize(("said", "ready"), [(0.0, False), (90.0, False), (110.0, True)])
def test_what_the_container_before_said_does_not_make_a_part_ready(said, ready):
    assert health_probe.is_ready(said, started=100.0) is ready


def test_a_part_that_does_not_move_is_seen(place):
    assert ask("alive", "20") == (0, "")
    (place / "beat").touch()
    assert ask("alive", "20") == (0, "")
    late = (health_probe._node_started() + health_probe._first_process_started() + time.time()) / 2
    os.utime(place / "beat", (late, late))
    code, said = ask("alive", "0.1")
    assert (code, "no heartbeat for" in said) == (1, True)


def test_a_part_is_ready_from_when_it_says_so_until_it_takes_it_back(place):
    waits = (1, "the process is starting or stopping")
    assert ask("ready") == waits
    health_probe.record_ready(True)
    assert ask("ready") == (0, "")
    health_probe.record_ready(False)
    health_probe.record_ready(False)
    assert ask("ready") == waits


def test_a_file_that_is_just_being_written_says_nothing(place):
    (place / "ready").touch()
    assert ask("ready")[0] == 1


def test_without_the_variable_nothing_is_said(monkeypatch):
    monkeypatch.delenv(health_probe.READY, raising=False)
    health_probe.record_ready(True)


def test_a_part_that_cannot_say_it_is_well_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(health_probe.READY, str(tmp_path / "none" / "ready"))
    health_probe.record_ready(True)
    assert "cannot be written" in capsys.readouterr().err


def test_what_is_no_question_is_refused():
    assert ask("well?")[0] == 1


def test_a_probe_imports_next_to_nothing():
    """It is started every few seconds in every pod."""
    program = (
        "import sys; before = set(sys.modules); import rljob.protocol.health_probe; print(*set(sys.modules) - before)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "msgspec", "pydantic", "argparse", "logging"} & set(found)
