import pytest

from rljob.api.load import validate
from rljob.api.resolve import resolve, with_absolute_paths
from rljob.local import environment_checks


@pytest.fixture
def problems_of(manifest, tmp_path, monkeypatch):
    """Return a function: a reward's command → its problems. good.py, bad.py and null.py exist."""
    (tmp_path / "good.py").write_text("print('\\d')\n")
    (tmp_path / "bad.py").write_text("x = 1\ndef reward(:\n")
    (tmp_path / "null.py").write_bytes(b"x = 1\0")
    (tmp_path / "own.py").write_text("#!/usr/bin/env python\nx = (\n")
    (tmp_path / "own.py").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    manifest["spec"].pop("initializer")
    manifest["spec"]["models"][0]["source"] = str(tmp_path)

    def problems_of(*command):
        manifest["spec"]["rewards"][0] = {
            "name": manifest["spec"]["rewards"][0]["name"],
            "local": {"command": list(command)},
        }
        return list(environment_checks.problems(resolve(validate(manifest)), tmp_path / "run"))

    return problems_of


def test_the_name_of_a_model_on_the_hub_is_explained(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest["spec"].pop("initializer")

    def problem(source):
        manifest["spec"]["models"][0]["source"] = source
        job = with_absolute_paths(resolve(validate(manifest)), tmp_path)
        (found,) = environment_checks.problems(job, tmp_path / "run")
        return found

    assert problem("Qwen/Qwen3-0.6B") == (
        f"spec.models[0].source: there is no directory {tmp_path}/Qwen/Qwen3-0.6B; for the model of the Hugging Face "
        "Hub write hf://Qwen/Qwen3-0.6B, or give a directory with a model"
    )
    manifest["spec"]["models"][0]["source"] = "hf://Qwen/Qwen3-0.6B"
    assert not list(environment_checks.problems(with_absolute_paths(validate(manifest), tmp_path), tmp_path / "run"))
    for path in ("model", "a/b/c", "/models/of-mine"):
        assert problem(path).endswith("; give one with a model")
    (tmp_path / "Qwen").mkdir()
    assert problem("Qwen/Qwen3-0.6B").endswith("; give one with a model")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["python", "nothere.py"], "there is no file 'DIR/nothere.py'; correct 'nothere.py' in entry 1"),
        (["python", "-u", "x/y.py"], "there is no file 'DIR/x/y.py'; correct 'x/y.py' in entry 2"),
        (["python3", "bad.py"], "bad.py is not valid Python at line 2: invalid syntax; correct it"),
        (
            ["python", "null.py"],
            "null.py is not valid Python: source code string cannot contain null bytes; correct it",
        ),
        (["./own.py"], "./own.py is not valid Python at line 2: '(' was never closed; correct it"),
    ],
)
def test_a_reward_script_that_cannot_run_is_reported(problems_of, tmp_path, command, sentence):
    assert problems_of(*command) == [f"spec.rewards[0].local.command: {sentence.replace('DIR', str(tmp_path))}"]


@pytest.mark.parametrize(
    "command",
    [
        ["python", "good.py", "other.py"],
        ["python", "-c", "pass", "nothere.py"],
        ["python", "-m", "module", "nothere.py"],
        ["sh", "nothere.py"],
        ["python"],
    ],
)
def test_other_commands_are_not_checked(problems_of, command):
    assert problems_of(*command) == []
