"""Probes of a process without a server read its files, and ignore files of the previous container."""

import os
import subprocess
import sys
import time

import pytest

from rljob.protocol import health_probe


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Directory of the process's files. Both variables name files in it."""
    monkeypatch.setenv(health_probe.HEARTBEAT, str(tmp_path / "beat"))
    monkeypatch.setenv(health_probe.READY, str(tmp_path / "ready"))
    return tmp_path


def probe(*arguments):
    """Return exit code and message of the probe's program."""
    command = [sys.executable, "-m", "rljob.protocol.health_probe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("beat", "alive"),
    [
        (0.0, True),  # the process does not serve yet
        (90.0, True),  # of the previous container
        (150.0, False),
        (181.0, True),
        (500.0, True),  # the clock was set back
    ],
)
def test_a_liveness_probe_ignores_heartbeats_of_the_previous_container(beat, alive):
    assert health_probe.is_alive(beat, started=100.0, now=200.0, timeout=20.0) is alive


@pytest.mark.parametrize(("recorded", "ready"), [(0.0, False), (90.0, False), (110.0, True)])
def test_a_readiness_probe_ignores_the_previous_container(recorded, ready):
    assert health_probe.is_ready(recorded, started=100.0) is ready


def test_a_process_without_heartbeat_is_not_alive(directory):
    assert probe("alive", "20") == (0, "")
    (directory / "beat").touch()
    assert probe("alive", "20") == (0, "")
    late = (health_probe._node_started() + health_probe._first_process_started() + time.time()) / 2
    os.utime(directory / "beat", (late, late))
    code, message = probe("alive", "0.1")
    assert (code, "no heartbeat for" in message) == (1, True)


def test_a_process_is_ready_while_it_has_recorded_so(directory):
    not_ready = (1, "the process is starting or stopping")
    assert probe("ready") == not_ready
    health_probe.record_ready(True)
    assert probe("ready") == (0, "")
    health_probe.record_ready(False)
    health_probe.record_ready(False)
    assert probe("ready") == not_ready


def test_an_incomplete_file_does_not_count_as_ready(directory):
    (directory / "ready").touch()
    assert probe("ready")[0] == 1


def test_without_the_variable_nothing_is_recorded(monkeypatch):
    monkeypatch.delenv(health_probe.READY, raising=False)
    health_probe.record_ready(True)


def test_a_failure_to_record_is_reported_and_raises_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(health_probe.READY, str(tmp_path / "none" / "ready"))
    health_probe.record_ready(True)
    assert "cannot be written" in capsys.readouterr().err


def test_unknown_arguments_are_refused():
    assert probe("unknown")[0] == 1


def test_a_probe_imports_few_modules():
    """The kubelet starts a probe every few seconds in every pod."""
    program = (
        "import sys; before = set(sys.modules); import rljob.protocol.health_probe; print(*set(sys.modules) - before)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "msgspec", "pydantic", "argparse", "logging"} & set(found)
