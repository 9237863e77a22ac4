"""Fixtures: a manifest that tests modify, a launcher of its run, and the command line in this process."""

import copy
import sys

import pytest

from cli.tests.fakes.launcher import Launcher
from core.tests.manifests import MANIFEST
from rljob.cli.main import main
from rljob.local import process_cleanup, processes


@pytest.fixture
def manifest():
    """The smallest useful manifest as data; each test gets a copy."""
    return copy.deepcopy(MANIFEST)


@pytest.fixture
def launcher(tmp_path, manifest):
    launcher = Launcher(tmp_path, manifest)
    yield launcher
    for process in launcher.started:  # left by a failed test
        process.kill()
        process.communicate()
    assert process_cleanup.kill_marked(processes.mark(launcher.directory)) == 0


@pytest.fixture
def rljob(monkeypatch, capsys):
    """Run a command in this process; return exit code, stdout and stderr."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["rljob", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return command
