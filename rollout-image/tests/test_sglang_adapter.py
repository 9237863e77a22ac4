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


@pytest.mark.parametrize("size", ["pipeline", "data"])
def test_the_workers_of_an_engine_share_each_layer(model, installed, size):
    sizes = EngineParallelism(**{"tensor": 2, size: 2})
    (problem,) = SglangAdapter(pool(parallelism=sizes), model).problems()
    assert problem == (
        f"parallelism.{size}: the workers of an engine of sglang share each layer; remove it, and raise "
        "parallelism.tensor or replicas"
    )


@pytest.mark.parametrize(
    ("tensor", "numbers", "field"),
    [
        (3, {}, "num_attention_heads in config.json is 4; set one of 1, 2, 4"),
        (4, {"num_key_value_heads": 3}, "num_key_value_heads in config.json is 3; set one of 1"),
        (4, {"moe_intermediate_size": 6}, "moe_intermediate_size in config.json is 6; set one of 1, 2"),
    ],
)
def test_numbers_that_the_workers_cannot_share_are_refused(model, installed, tensor, numbers, field):
    (model / "config.json").write_text(json.dumps(SHAPE | numbers))
    (problem,) = SglangAdapter(pool(parallelism={"tensor": tensor}), model).problems()
    assert problem == f"parallelism.tensor: SGLang cannot split {model} among {tensor} workers, because {field}"


def test_workers_share_any_vocabulary_and_copy_few_heads(model, installed):
    (model / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 321}))
    assert list(SglangAdapter(pool(parallelism={"tensor": 4}), model).problems()) == []


@pytest.mark.parametrize(("tensor", "part"), [(1, 1), (2, 2), (4, 2)])
def test_each_worker_caches_its_heads_of_all_tokens(model, tensor, part):
    """With four workers and two heads of key and value, each worker has one of them."""
    settings = pool(kvCacheBytes=4 << 20, parallelism={"tensor": tensor})
    command = SglangAdapter(settings, model).launch(81, "k").command
    assert option(command, "--tensor-parallel-size") == str(tensor)
    assert option(command, "--max-total-tokens") == str((4 << 20) * part // TOKEN_BYTES)


def test_several_workers_on_a_cpu_need_no_nccl_and_have_cores(model, monkeypatch):
    monkeypatch.setattr(sglang_adapter.os, "sched_getaffinity", lambda process: {3, 5, 4})
    one, two, four = (
        SglangAdapter(pool(parallelism={"tensor": tensor}), model).launch(81, "k").environment for tensor in (1, 2, 4)
    )
    assert {*two} - {*one} == {
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER",
        "SGLANG_NCCL_SO_PATH",
        "SGLANG_CPU_OMP_THREADS_BIND",
    }
    assert two["SGLANG_CPU_OMP_THREADS_BIND"] == "3,5|4"
    assert four["SGLANG_CPU_OMP_THREADS_BIND"] == "3|4|5|3,4,5"
    gpus = pool(accelerator={"kind": "nvidia"}, dtype="bfloat16", parallelism={"tensor": 2})
    assert "SGLANG_NCCL_SO_PATH" not in SglangAdapter(gpus, model).launch(81, "k").environment


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
