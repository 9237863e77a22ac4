"""Scorer of the built-in reward ``code``: runs the program in the completion against the tests of the row."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import Unavailable
from rljob.api.rewards.kinds.code import CodeOptions, StdioTest, read_tests
from rljob.api.tasks import Task
from rljob.rewards.sandbox.code_sandbox import CodeSandbox, Limits, SampleTime, SandboxError, SandboxRun, StarvedError
from rljob.rewards.sandbox.isolation import LAYERS, find_isolation

log = logging.getLogger(__name__)

MIN_OUTPUT = 1 << 20
"""Bytes that a program may write, or twice the expected output if that is more."""
TIME_SHARE = 0.9
"""Part of the time limit of a sample after which the sample ends if it has waited for a CPU for most of it."""
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$")
_PYTHON = ("", "python", "python3", "py")


class CodeReward:
    """1 if all tests pass, else 0; with ``credit: partial`` the share of the tests that pass.

    The metric ``answered`` is 1 if the completion has a program. Outputs are compared in this process; the program is
    in another one, which has none of them.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.

    Raises:
        ValueError: this machine lacks a layer of ``options.layers``.
        OSError: pytest is not installed, or there is no directory in memory for files.
    """

    def __init__(self, options: CodeOptions, tasks: Sequence[Task]) -> None:
        self._options = options
        isolation = find_isolation()
        for layer in LAYERS:
            if layer in options.layers and layer in isolation.missing:
                raise ValueError(
                    f"config.layers demands {layer}, which is missing here: {isolation.missing[layer]}; run the "
                    "service on a node that offers it, or remove it from config.layers, which weakens the isolation"
                )
        log.info("%s", isolation.sentence())
        limits = Limits(options.seconds, options.memory_mebibytes << 20, options.files_mebibytes << 20)
        self._sandbox = CodeSandbox(isolation, limits, pytest=options.style == "pytest")
        self._time_limit = math.inf

    def set_time_limit(self, seconds: float) -> None:
        """Set the time after which the service ends a sample. A sample that waits for a CPU ends before."""
        self._time_limit = seconds

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the row has no tests.
            SandboxError: a run could not be made, twice.
            Unavailable: the machine had no CPU for a run.
        """
        tests = read_tests(problem, self._options)
        program = self._extract(completion)
        if program is None:
            return 0.0, {"answered": 0.0}
        start = time.monotonic()
        passed, total, spent, waited = 0, 0, 0.0, 0.0
        for test in tests:
            if spent < self._options.sample_seconds and (self._options.credit == "partial" or passed == total):
                sample = SampleTime(start, TIME_SHARE * self._time_limit, waited)
                of_test, of_passed, run = self._run_again(program, test, sample)
                passed, total, spent = passed + of_passed, total + of_test, spent + run.seconds
                waited += run.waited
            else:
                total += 1
        share = passed / total
        return share if self._options.credit == "partial" else float(share == 1), {"answered": 1.0}

    def close(self) -> None:
        """End the processes of the sandbox."""
        self._sandbox.close()

    def _run_again(self, program: bytes, test: StdioTest | str, sample: SampleTime) -> tuple[int, int, SandboxRun]:
        """Run a test, once more if the sandbox fails: its processes may have been killed with those of another run."""
        for last in (False, True):
            try:
                return self._run(program, test, sample)
            except StarvedError as error:
                raise Unavailable(str(error)) from error
            except SandboxError as error:
                if last:
                    raise
                log.warning("%s; trying once more", error)
        raise AssertionError("the loop returns or raises")

    def _run(self, program: bytes, test: StdioTest | str, sample: SampleTime) -> tuple[int, int, SandboxRun]:
        """Run a test; return the number of tests in it, how many passed, and the run."""
        if isinstance(test, StdioTest):
            limit = max(MIN_OUTPUT, 2 * len(test.output.encode(errors="replace")))
            run = self._sandbox.run_program(program, test.input.encode(errors="replace"), limit, sample)
            return 1, int(run.ok and same_output(run.output, test.output)), run
        options, tests = self._options, test.encode(errors="replace")
        run = self._sandbox.run_tests(program, tests, options.style, options.module, sample=sample)
        collected, passed = json.loads(run.output) if run.ok else (1, 0)
        return max(1, collected), passed, run

    def _extract(self, completion: str) -> bytes | None:
        """Return the program in a completion, without what a reasoning model thought before it."""
        answer = completion.rpartition("</think>")[2]
        text = answer if self._options.extract == "whole" else last_block(answer)
        return None if text is None or not text.strip() else text.encode(errors="replace")


def last_block(text: str) -> str | None:
    """Return the last closed fenced block of Markdown whose language is Python or not given; None: there is none."""
    found, fence, language, lines = None, "", "", list[str]()
    for line in text.splitlines():
        if not fence:
            if opened := _FENCE.match(line):
                fence, language, lines = opened[1], opened[2].lower(), []
        elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            if language in _PYTHON:
                found = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return found


def same_output(output: bytes, expected: str) -> bool:
    """Return whether the lines are equal, except for white space at their ends and empty lines at the end."""
    return _lines(output.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
