"""Diagnosis of a server's exit, with log lines of real servers."""

import pytest

from rljob.rollout import exit_diagnosis
from rljob.rollout.adapters.vllm.adapter import LOG_PREFIX
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


def test_oom_kills_are_read_from_the_kernel(tmp_path, monkeypatch):
    assert oom_kills() >= 0
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    monkeypatch.setattr(exit_diagnosis, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == 3
    monkeypatch.setattr(exit_diagnosis, "VMSTAT", tmp_path / "nothing")
    assert oom_kills() == 0


def test_without_a_prefix_errors_at_the_beginning_of_a_line_are_found():
    assert first_error(["INFO ValueError: no", "ValueError: yes"]) == "ValueError: yes"
