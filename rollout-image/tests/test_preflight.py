"""What would keep engines from starting is said in sentences before any is started."""

import importlib.util
import json
import subprocess
import sys

import pytest

from rljob.protocol.environment import read_environment
from rljob.rollout import preflight
from rljob.rollout.adapters import vllm
from rljob.rollout.main import main


@pytest.fixture
def environment(tmp_path, monkeypatch, manifest):
    """Maker of environments; the model has 512 positions."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 512}')

    def build(source="job://model", name="", **rollout):
        (tmp_path / "job.json").write_text(manifest(source, **rollout))
        monkeypatch.setenv("RLJOB_JOB", str(tmp_path / "job.json"))
        monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
        monkeypatch.setenv("RLJOB_NAME", name)
        return read_environment()

    return build


def test_a_good_pool_has_no_problems(environment):
    assert list(preflight.check(environment())) == []
    assert list(preflight.check(environment("job://made-later", maxModelLength=9999))) == []


def test_a_sequence_longer_than_the_model_is_refused(environment, tmp_path):
    (problem,) = preflight.check(environment(maxModelLength=513))
    assert problem.startswith("spec.rollouts[0].maxModelLength: 513 is more than the 512 positions of")
    assert list(preflight.check(environment(maxModelLength=513, name="other"))) == []


@pytest.mark.parametrize(
    ("configuration", "longest"),
    [
        ({"max_position_embeddings": 8}, 8),
        ({"text_config": {"max_position_embeddings": 8}}, 8),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_theta": 1e4}}, 8),
        ({}, None),
        ([], None),
        ({"text_config": None, "max_position_embeddings": "x"}, None),
    ],
)
def test_the_longest_sequence_is_read_where_it_is_plain(tmp_path, configuration, longest):
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert preflight.longest_sequence(tmp_path) == longest


def test_an_engine_that_is_not_installed_is_named(environment, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = preflight.check(environment())
    assert problem.startswith("spec.rollouts[0].engine: vLLM is not installed")


@pytest.mark.parametrize(("code", "found"), [(2, ["unrecognized arguments: --foo"]), (0, []), (1, [])])
def test_vllm_is_asked_about_arguments(environment, monkeypatch, code, found):
    asked = []

    def run(command, **options):
        asked.append(command[1:])
        return subprocess.CompletedProcess(
            command, code, "", "usage: …\nmain.py: error: unrecognized arguments: --foo\n"
        )

    monkeypatch.setattr(vllm.subprocess, "run", run)
    problems = list(preflight.check(environment(args=["--foo", "1"])))
    assert asked == [["-m", "rljob.rollout.vllm_engine.arguments", "--foo", "1"]]
    assert len(problems) == len(found)
    assert all(f"spec.rollouts[0].args: vLLM refuses them ({words}" in problems[0] for words in found)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_real_vllm_knows_its_arguments(environment):
    """And no others: see e2e/test_bad_input.py. Each time it is asked it takes ten seconds."""
    assert list(preflight.check(environment(args=["--block-size", "32"]))) == []


def test_the_check_prints_sentences_and_exits_2(environment, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rljob-agent", "--check"])
    environment(maxModelLength=513)
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spec.rollouts[0].maxModelLength: ")
    environment()
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 0
