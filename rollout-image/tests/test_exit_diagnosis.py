"""Diagnosis of a server's exit, with log lines of real servers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob.api.roles import Rollout
from rljob.rollout import exit_diagnosis
from rljob.rollout.adapters.vllm.adapter import LOG_PREFIX, VllmAdapter
from rljob.rollout.adapters.vllm.engine_exit import report_kills
from rljob.rollout.exit_diagnosis import describe_end, first_error, oom_kills

ENGINE = "(EngineCore pid=71) ERROR 11-21 14:00:01 [core.py:1108] "


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["starting", "ready"], ""),
        (
            [
                f"{ENGINE}Traceback (most recent call last):",
                f'{ENGINE}  File "core.py", line 3, in run',
                f"{ENGINE}ValueError: No available memory for the cache blocks.",
                "(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "ValueError: No available memory for the cache blocks.",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, User-specified max_model_len (4096) is too large. [type=value_error, input_value=x]",
                "    For further information visit",
            ],
            "User-specified max_model_len (4096) is too large.",
        ),
        (["usage: main.py [-h]", "main.py: error: unrecognized arguments: --foo"], "unrecognized arguments: --foo"),
        (["torch.OutOfMemoryError: CUDA out of memory."], "OutOfMemoryError: CUDA out of memory."),
        (["AssertionError: ", "RuntimeError: later"], "AssertionError"),
        (["ValidationError: 2 validation errors for X"], "ValidationError: 2 validation errors for X"),
    ],
)
def test_the_first_error_is_the_one_named(lines, error):
    assert first_error(lines, LOG_PREFIX) == error


def test_a_long_error_is_truncated():
    assert len(first_error([f"ValueError: {'x' * 10_000}"])) < 600


def test_an_exit_is_described():
    assert describe_end(3, False) == "the engine server exited with code 3"
    assert describe_end(-9, False) == "the engine server was killed by SIGKILL"
    assert "was killed by SIGKILL (memory ran out: lower rollouts.kvCacheBytes" in describe_end(-9, True)
    assert describe_end(-11, True) == "the engine server was killed by SIGSEGV (a memory fault)"


class Manager:
    """The part of vLLM's CoreEngineProcManager that is extended."""

    def __init__(self, failed, exitcode):
        self.processes = [SimpleNamespace(name="EngineCore", exitcode=exitcode)]
        self.failed_proc_name = failed

    def monitor_engine_liveness(self):
        sys.stderr.write("monitored\n")


@pytest.mark.parametrize(
    ("failed", "exitcode", "found"),
    [
        ("EngineCore", -9, "vLLM's EngineCore was killed by SIGKILL"),
        ("EngineCore", -11, "vLLM's EngineCore was killed by SIGSEGV (a memory fault)"),
        ("EngineCore", 1, ""),
        (None, -15, ""),  # ended by vLLM itself
        (None, None, ""),
    ],
)
def test_the_signal_that_killed_vllms_engine_process_explains_its_end(capsys, monkeypatch, failed, exitcode, found):
    monkeypatch.setattr(Manager, "monitor_engine_liveness", Manager.monitor_engine_liveness)
    report_kills(Manager)
    Manager(failed, exitcode).monitor_engine_liveness()
    log = capsys.readouterr().err.splitlines()
    assert log[0] == "monitored"
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    lines = [*(f"(APIServer pid=70) {line}" for line in log), f"(APIServer pid=70) ERROR 11-21 [a.py:1] {dead}"]
    adapter = VllmAdapter(Rollout(name="main"), Path("model"))
    assert adapter.find_error(iter(lines)) == (found or "EngineDeadError: EngineCore encountered an issue.")


def test_the_signal_that_killed_a_worker_explains_the_end_of_the_engine():
    died = "[multiproc_executor.py:390] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down exe"
    lines = [f"(EngineCore pid=7) ERROR 11-21 14:00:01 {died}", f"{ENGINE}RuntimeError: Executor failed."]
    adapter = VllmAdapter(Rollout(name="main"), Path("model"))
    assert adapter.find_error(iter(lines)) == "vLLM's VllmWorker-1 was killed by SIGKILL"
    assert adapter.find_error(iter(lines[1:])) == "RuntimeError: Executor failed."


def test_oom_kills_are_read_from_the_kernel(tmp_path, monkeypatch):
    assert oom_kills() >= 0
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    monkeypatch.setattr(exit_diagnosis, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == 3
    monkeypatch.setattr(exit_diagnosis, "VMSTAT", tmp_path / "nothing")
    assert oom_kills() == 0


def test_without_a_prefix_errors_at_the_beginning_of_a_line_are_found():
    assert first_error(["INFO ValueError: no", "ValueError: yes"]) == "ValueError: yes"
