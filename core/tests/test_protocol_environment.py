"""Settings that a process reads from its environment, in a pod and on one machine."""

import json
import os

import pytest

from rljob.protocol.environment import read_environment, remove_token, reward_token


@pytest.fixture
def variables(manifest, tmp_path, monkeypatch):
    """The variables that every process has."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(manifest))
    for name in ("RLJOB_TOKEN", "RLJOB_TOKEN_FILE", "RLJOB_INSTANCE", "RLJOB_REWARD_TOKEN", "RLJOB_REWARD_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLJOB_JOB", str(path))
    monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
    return monkeypatch


def test_a_job_that_is_not_resolved_is_resolved_by_the_process(variables):
    assert read_environment().job.spec.algorithm.advantage == "group_normalized"


def test_a_token_is_read_from_a_file_or_the_environment(variables, tmp_path):
    assert read_environment().token == ""
    variables.setenv("RLJOB_TOKEN", "given")
    assert read_environment().token == "given"
    (tmp_path / "token").write_text("of-the-secret\n")
    variables.setenv("RLJOB_TOKEN_FILE", str(tmp_path / "token"))
    assert read_environment().token == "of-the-secret"


def test_the_token_of_the_rewards_is_read_from_a_file_or_the_environment(variables, tmp_path):
    assert reward_token() == ""
    variables.setenv("RLJOB_REWARD_TOKEN", "given")
    assert reward_token() == "given"
    (tmp_path / "token").write_text("of-the-secret\n")
    variables.setenv("RLJOB_REWARD_TOKEN_FILE", str(tmp_path / "token"))
    assert reward_token() == "of-the-secret"


def test_a_token_can_be_removed_from_the_environment(variables):
    remove_token()
    variables.setenv("RLJOB_TOKEN", "given")
    variables.setenv("RLJOB_TOKEN_FILE", "/a/file")
    remove_token()
    assert not {"RLJOB_TOKEN", "RLJOB_TOKEN_FILE"} & os.environ.keys()


def test_the_environment_has_the_name_of_the_pod(variables):
    assert read_environment().instance == ""
    variables.setenv("RLJOB_INSTANCE", "sums-rollout-main-x")
    assert read_environment().instance == "sums-rollout-main-x"


@pytest.mark.parametrize("variable", ["RLJOB_JOB", "RLJOB_TOKEN_FILE"])
def test_a_missing_file_is_reported_with_its_variable(variables, tmp_path, variable):
    variables.setenv(variable, str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=f"{variable}: .*nothing cannot be read: No such file"):
        read_environment()
