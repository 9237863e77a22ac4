"""The commands of a job's components, and the initializer's key."""

import json
import sys

import pytest

from rljob.api.load import validate
from rljob.api.resolve import in_storage, resolve
from rljob.local import commands
from rljob.local.commands import LocalContext
from rljob.local.processes import ProcessCommand, environment_of
from rljob.protocol import initializer_stamp
from rljob.protocol.environment import read_environment, reward_token, reward_urls


@pytest.fixture
def here(tmp_path):
    return LocalContext(
        tmp_path,
        {"coordinator": 7001, "reward-exact": 7002},
        {"agent": "token-a", "trainer": "token-t", "runner": "token-r", "reward": "token-s"},
    )


def components(manifest, here):
    return {component.name: component for component in commands.components(resolve(validate(manifest)), here)}


def test_every_component_of_a_job_is_started(manifest, here):
    manifest["spec"]["rollouts"][0]["replicas"] = {"min": 2}
    found = components(manifest, here)
    assert set(found) == {"rollout-main-0", "rollout-main-1", "trainer", "coordinator", "reward-exact", "runner"}
    assert {component.arguments[0] for component in found.values()} == {sys.executable}
    modules = {name: component.arguments[-1] for name, component in found.items()}
    assert modules == {
        "rollout-main-0": "rljob.rollout.main",
        "rollout-main-1": "rljob.rollout.main",
        "trainer": "rljob.trainer.main",
        "coordinator": "rljob.coordinator.main",
        "reward-exact": "rljob.rewards.main",
        "runner": "rljob.runner.main",
    }


def test_a_component_finds_in_its_environment_what_it_needs(manifest, here, monkeypatch):
    job = resolve(validate(manifest))
    (here.storage / "job.json").write_text(job.model_dump_json(by_alias=True))
    found = components(manifest, here)
    expected = {
        "rollout-main-0": ("token-a", "main"),
        "trainer": ("token-t", ""),
        "runner": ("token-r", ""),
        "coordinator": ("", ""),
        "reward-exact": ("token-s", "exact"),
    }
    for name, component in found.items():
        with monkeypatch.context() as context:
            for variable, value in component.environment.items():
                context.setenv(variable, value)
            read = read_environment()
            assert read.job == job
            assert read.storage == here.storage
            assert read.coordinator == "http://127.0.0.1:7001"
            assert (read.token, read.name) == expected[name]
            assert read.listen_host == read.host == "127.0.0.1"
            assert reward_urls() == ({"exact": "http://127.0.0.1:7002"} if name == "runner" else {})
            assert reward_token() == ("token-s" if name == "runner" else "")
    assert found["coordinator"].environment["RLJOB_LISTEN"] == "127.0.0.1:7001"
    assert found["coordinator"].environment["RLJOB_TOKENS"] == str(here.storage / "tokens.json")
    assert found["reward-exact"].environment["RLJOB_LISTEN"] == "127.0.0.1:7002"


def test_a_reward_of_ones_own_is_started_and_one_elsewhere_only_asked(manifest, here):
    manifest["spec"]["rewards"] = [
        {"name": "exact", "local": {"command": ["my-reward", "--table=job://words"]}},
        {"name": "far", "url": "http://rewards.example/v2"},
    ]
    found = components(manifest, here)
    assert found["reward-exact"].arguments == ["my-reward", f"--table={here.storage}/words"]
    assert found["reward-exact"].environment == {
        "RLJOB_JOB": str(here.storage / "job.json"),
        "RLJOB_STORAGE": str(here.storage),
        "RLJOB_NAME": "exact",
        "RLJOB_LISTEN": "127.0.0.1:7002",
        "RLJOB_TOKEN": "token-s",
    }
    assert "reward-far" not in found
    assert commands.servers(validate(manifest)) == ["coordinator", "reward-exact"]
    urls = json.loads(found["runner"].environment["RLJOB_REWARD_URLS"])
    assert urls == {"exact": "http://127.0.0.1:7002", "far": "http://rewards.example/v2"}


def test_a_token_is_passed_only_to_its_component(manifest, here):
    roles = {"rollout": {"agent"}, "trainer": {"trainer"}, "runner": {"runner", "reward"}, "reward": {"reward"}}
    for name, component in components(manifest, here).items():
        texts = json.dumps([component.arguments, component.environment])
        passed = {role for role, token in here.tokens.items() if token in texts}
        assert passed == roles.get(name.partition("-")[0], set()), name


def test_several_trainer_processes_are_started_by_one_that_ends_as_they_do(manifest, here):
    manifest["spec"]["trainer"] = {"processesPerNode": 2}
    arguments = components(manifest, here)["trainer"].arguments
    assert arguments[1:] == ["-m", "rljob.trainer.launch", "2"]


def test_paths_in_the_storage_are_replaced_wherever_they_stand(here):
    assert in_storage("job://model", here.storage) == f"{here.storage}/model"
    assert in_storage("--out=job://a/b", here.storage) == f"--out={here.storage}/a/b"
    assert in_storage("plain", here.storage) == "plain"


def key(manifest):
    return initializer_stamp.content_key(resolve(validate(manifest)))


def test_an_initializer_may_be_given_a_program_as_text(manifest):
    program = "print('a text that is longer than the name of a file may be')  # " + 300 * "x"
    manifest["spec"]["initializer"]["command"] = ["python", "-c", program, "job://model"]
    first = key(manifest)
    manifest["spec"]["initializer"]["command"][2] += "y"
    assert key(manifest) != first


def test_the_initializers_key_follows_from_what_it_can_see(manifest, tmp_path):
    program = tmp_path / "make-model"
    program.write_text("one")
    program.chmod(0o755)
    manifest["spec"]["initializer"]["command"] = [str(program), "job://model"]
    first = key(manifest)
    manifest["spec"]["training"]["steps"] = 99
    manifest["spec"]["checkpoints"] = {"keep": 9}
    manifest["spec"]["suspend"] = True
    manifest["spec"]["rollouts"][0]["replicas"] = {"max": 4}
    manifest["spec"]["trainer"] = {"template": {"metadata": {"labels": {"a": "b"}}}}
    assert key(manifest) == first
    changed = {first}
    manifest["spec"]["seed"] = 7
    changed.add(key(manifest))
    manifest["spec"]["tasks"][0]["prompt"] = "{question}="
    changed.add(key(manifest))
    manifest["spec"]["initializer"]["command"].append("--large")
    changed.add(key(manifest))
    program.write_text("two")
    changed.add(key(manifest))
    assert len(changed) == 5


def test_the_program_behind_a_console_script_counts_by_its_source():
    source = initializer_stamp._source("rljob-example-model")
    assert source is not None
    assert source.name == "example_model.py"


def test_a_model_that_a_run_works_with_is_never_recreated(tmp_path):
    initializer_stamp.mark_used(tmp_path)
    assert initializer_stamp.read(tmp_path) == {}
    initializer_stamp.mark_done(tmp_path, "k")
    assert initializer_stamp.done(tmp_path, "k") and not initializer_stamp.done(tmp_path, "other")
    initializer_stamp.mark_used(tmp_path)
    assert initializer_stamp.done(tmp_path, "other")
    initializer_stamp.mark_unused(tmp_path)
    assert not initializer_stamp.done(tmp_path, "other")


def test_components_inherit_only_the_variables_that_a_user_sets(monkeypatch):
    monkeypatch.setenv("RLJOB_SGLANG_PYTHON", "/opt/sglang/bin/python")
    monkeypatch.setenv("RLJOB_TOKEN", "of another run")
    for name in ("RLJOB_LOG_LEVEL", "RLJOB_MODEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    found = environment_of(ProcessCommand("rollout-main-0", ["true"], {"RLJOB_NAME": "main"}))
    inherited = {name: value for name, value in found.items() if name.startswith("RLJOB_")}
    assert inherited == {"RLJOB_SGLANG_PYTHON": "/opt/sglang/bin/python", "RLJOB_NAME": "main"}
