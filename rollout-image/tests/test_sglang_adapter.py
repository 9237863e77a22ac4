"""The command of SGLang's server and the problems of a pool that names it; no server is started."""

import json
import subprocess
import sys

import pytest

from rljob.api.roles import EngineParallelism, Rollout
from rljob.protocol.environment import SGLANG_PYTHON
from rljob.rollout.adapters.sglang import sglang_adapter
from rljob.rollout.adapters.sglang.main import KEY_VARIABLE, LIMITS, set_limits
from rljob.rollout.adapters.sglang.sglang_adapter import SglangAdapter

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TOKEN_BYTES = 2 * 2 * (2 * 32) * 4
"""Key and value of a token: 2 layers with 2 heads of 32 numbers of 4 bytes."""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """Commands that the adapter runs; ``answers``: standard output, exit code and standard error of the next ones."""
    answers, commands = [], []

    def run(command, **options):
        commands.append(command)
        out, code, errors = answers.pop(0) if answers else ("", 0, "")
        return subprocess.CompletedProcess(command, code, out, errors)

    monkeypatch.setattr(sglang_adapter.subprocess, "run", run)
    monkeypatch.delenv(SGLANG_PYTHON, raising=False)
    return answers, commands


def pool(**fields):
    return Rollout.model_validate({"name": "main", "engine": "sglang", "dtype": "float32", **fields})


def option(command, name):
    return command[command.index(name) + 1]


def test_the_server_has_the_settings_of_the_pool(model, monkeypatch):
    monkeypatch.delenv(SGLANG_PYTHON, raising=False)
    settings = pool(maxModelLength=512, maxConcurrency=30, kvCacheBytes=4 << 20, args=["--schedule-policy", "fcfs"])
    launch = SglangAdapter(settings, model).launch(81, "secret")
    command = launch.command
    assert command[:3] == [sys.executable, "-m", "rljob.rollout.adapters.sglang.main"]
    assert command[-2:] == ["--schedule-policy", "fcfs"]
    names = ("--model-path", "--host", "--port", "--dtype", "--context-length", "--max-running-requests")
    assert [option(command, name) for name in names] == [str(model), "127.0.0.1", "81", "float32", "512", "38"]
    assert option(command, "--max-total-tokens") == str((4 << 20) // TOKEN_BYTES)
    assert "--skip-tokenizer-init" in command
    assert launch.environment[KEY_VARIABLE] == "secret"
    assert not any("secret" in word for word in command), "every user of the machine can read a command"


def test_only_a_cpu_has_the_settings_of_a_cpu(model):
    cpu = SglangAdapter(pool(), model).launch(81, "k")
    gpu = SglangAdapter(pool(accelerator={"kind": "nvidia"}, dtype="bfloat16"), model).launch(81, "k")
    assert option(cpu.command, "--device") == "cpu"
    assert option(cpu.command, "--max-total-tokens") == str((256 << 20) // TOKEN_BYTES)
    assert cpu.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert not {"--device", "--max-total-tokens", "--disable-overlap-schedule"} & {*gpu.command}
    assert "SGLANG_USE_CPU_ENGINE" not in gpu.environment


def test_the_server_runs_in_the_environment_of_sglang(model, installed, monkeypatch):
    monkeypatch.setenv(SGLANG_PYTHON, "/opt/sglang/bin/python")
    adapter = SglangAdapter(pool(), model)
    assert list(adapter.problems()) == []
    assert adapter.launch(81, "k").command[0] == installed[1][0][0] == "/opt/sglang/bin/python"


def test_stale_caches_need_a_scheduler_that_does_not_overlap(model):
    assert SglangAdapter(pool(), model).in_flight == {"keep", "keepStaleCache", "abort", "wait"}
    assert SglangAdapter(pool(accelerator={"kind": "nvidia"}), model).in_flight == {"keep", "abort", "wait"}


def test_modules_that_the_environment_lacks_are_named(model, installed):
    installed[0].append(("sglang sgl_kernel\n", 0, ""))
    (problem,) = SglangAdapter(pool(args=["--foo"]), model).problems()
    assert problem == (
        f"engine: the environment of {sys.executable} lacks sglang and sgl_kernel; install SGLang and rljob-rollout "
        f"there, or set {SGLANG_PYTHON} to the Python of an environment that has them"
    )


def test_an_interpreter_that_does_not_exist_is_named(model, monkeypatch):
    monkeypatch.setenv(SGLANG_PYTHON, "/nowhere/python")
    (problem,) = SglangAdapter(pool(), model).problems()
    assert problem.startswith(f"engine: {SGLANG_PYTHON} is '/nowhere/python', which cannot be started (")
    assert problem.endswith("; correct it")


@pytest.mark.parametrize("size", ["tensor", "pipeline", "data"])
def test_an_engine_has_one_worker(model, installed, size):
    (problem,) = SglangAdapter(pool(parallelism=EngineParallelism(**{size: 2})), model).problems()
    assert problem == f"parallelism.{size}: an engine of sglang has one worker; remove it, and raise replicas"


def test_a_cache_that_holds_no_sequence_is_refused(model, installed):
    assert list(SglangAdapter(pool(maxModelLength=1024, kvCacheBytes=1024 * TOKEN_BYTES), model).problems()) == []
    (problem,) = SglangAdapter(pool(maxModelLength=1025, kvCacheBytes=1024 * TOKEN_BYTES), model).problems()
    assert problem == (
        f"kvCacheBytes: holds 1024 tokens of {model}, and maxModelLength is 1025; raise it, or lower maxModelLength"
    )


def test_the_bytes_of_a_cache_of_an_unknown_model_are_refused(model, installed):
    (model / "config.json").write_text(json.dumps(SHAPE | {"model_type": "unknown"}))
    assert list(SglangAdapter(pool(), model).problems()) == []
    (problem,) = SglangAdapter(pool(kvCacheBytes=4 << 20), model).problems()
    assert problem.startswith("kvCacheBytes: SGLang counts its cache in tokens") and problem.endswith("; remove it")
    assert list(SglangAdapter(pool(kvCacheBytes=4 << 20), model / "made-later").problems()) == []


@pytest.mark.parametrize(("code", "count"), [(2, 1), (0, 0), (1, 0)])
def test_sglang_checks_its_arguments(model, installed, code, count):
    answers, commands = installed
    error = "usage: …\nsglang_arguments.py: error: unrecognized arguments: --foo\n"
    answers += [("", 0, ""), ("", code, error)]
    problems = list(SglangAdapter(pool(args=["--foo", "1"]), model).problems())
    assert commands[1][1:] == ["-m", "rljob.rollout.adapters.sglang.sglang_arguments", "--foo", "1"]
    assert problems == ["args: SGLang refuses them (unrecognized arguments: --foo); correct them"] * count


def test_the_error_of_a_server_is_found_in_its_log(model):
    adapter = SglangAdapter(pool(), model)
    prefix = "[2026-11-23 12:00:00]"
    lines = [f"{prefix} Scheduler hit an exception: Traceback", "  File x", "ValueError: no such thing", "EOFError: x"]
    assert adapter.find_error(lines) == "ValueError: no such thing"
    killed = f"{prefix} Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT"
    assert adapter.find_error([*lines, killed]) == "SGLang's scheduler_0 was killed by SIGKILL"
    assert adapter.find_error(["sglang serve: error: unrecognized arguments: --foo"]) == "unrecognized arguments: --foo"
    assert adapter.find_error([]) == ""


def test_the_limits_of_the_server_replace_other_settings():
    seen = {}

    class Config:
        def __init__(self, app, **options):
            seen.update(options, app=app)

    set_limits(Config)
    Config("app", port=8, timeout_keep_alive=5)
    assert seen == {"app": "app", "port": 8, **LIMITS}
