"""Commands for environments. e2e/test_docs.py runs them as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob.cli.environment_commands import app
from rljob.local.errors import CliError

ENVIRONMENTS = [sys.executable, "-m", "rljob.environments.main"]


def run(folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([*ENVIRONMENTS, *arguments], input=given, env=variables, capture_output=True, text=True)


def test_a_new_environment_has_no_defect_and_its_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new", "my_guess"]).exit_code == 0
    done = run(tmp_path, "--verify", "my_guess.my_guess:Environment", "{}", "5", "10", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and 0 < found["random"]["success"] <= 1
    with pytest.raises(CliError, match="my_guess exists"):
        CliRunner().invoke(app, ["new", "my_guess"], catch_exceptions=False)
