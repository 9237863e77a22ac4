"""The built-in reward ``code``: options, tests in a row, row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import RewardKind, Row

MAX_TESTS = 1000
Layer = Literal["bubblewrap", "landlock", "seccomp"]


class CodeOptions(Model):
    """Options of `code`."""

    style: Literal["stdio", "asserts", "pytest"] = "stdio"
    """tests of a row: `stdio` (inputs and expected outputs of the program), `asserts` (blocks of Python that use its
    names), `pytest` (a file that imports it)"""
    column: Text = "tests"
    """column with the tests"""
    credit: Literal["all", "partial"] = "all"
    """`all`: 1 if all tests pass, else 0; `partial`: the share of the tests that pass"""
    extract: Literal["lastBlock", "whole"] = "lastBlock"
    """`lastBlock`: the program is the last closed block between fences whose language is Python or empty; `whole`: the
    whole completion"""
    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=63)] = "solution"
    """name by which tests import the program"""
    seconds: Annotated[int, Field(ge=1, le=600)] = 2
    """CPU seconds of each test; its time limit is twice that and half a second more"""
    sample_seconds: Annotated[float, Field(gt=0, le=3600)] = 4.0
    """seconds of CPU and of sleep after which no further test of a sample starts; tests without a run have failed"""
    memory_mebibytes: Annotated[int, Field(ge=64, le=1 << 20)] = 512
    """address space of a process of a test"""
    files_mebibytes: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """size of all files of a program of `stdio`, in a private directory in memory; 0: it cannot write"""
    layers: Annotated[list[Layer], Field(max_length=3)] = ["landlock", "seccomp"]
    """layers of isolation without which the service does not start; bubblewrap is used where it works"""

    @model_validator(mode="after")
    def _tests_need_landlock(self) -> CodeOptions:
        if self.style != "stdio" and "landlock" not in self.layers:
            raise ValueError(
                f"layers lacks landlock, without which a program could read the tests of style {self.style}; add it"
            )
        return self


@dataclass(frozen=True)
class StdioTest:
    """An input of a program, and the output that it must write."""

    input: str
    output: str


def read_tests(row: Row, options: CodeOptions) -> list[StdioTest] | list[str]:
    """Return the tests in a row: pairs of texts for ``stdio``, else texts of Python.

    Lists may be JSON text, as in several public data sets: [{"input": …, "output": …}],
    {"inputs": […], "outputs": […]}, ["assert …", …].

    Raises:
        ValueError: the row has no tests, or not of this form.
    """
    if options.column not in row:
        raise ValueError(f"there is no column {options.column!r}; there are {', '.join(map(str, row))}")
    tests: list[StdioTest] | list[str]
    value, where = row[options.column], f"column {options.column!r}"
    if options.style == "stdio":
        tests = [_stdio_test(entry, where) for entry in _entries(_decoded(value, where), where)]
    elif options.style == "pytest" or (isinstance(value, str) and not value.lstrip().startswith("[")):
        tests = [value]
    else:
        tests = _decoded(value, where)
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"{where} holds no tests; give a list of them")
    if len(tests) > MAX_TESTS:
        raise ValueError(f"{where} holds {len(tests)} tests; give at most {MAX_TESTS}")
    if not all(isinstance(test, (str, StdioTest)) for test in tests):
        raise ValueError(f"{where} holds something other than texts; write each test as text")
    return tests


def check_row(row: Row, options: CodeOptions) -> None:
    """Check that the row has tests that a wrong program can fail.

    Raises:
        ValueError: it does not.
    """
    for test in read_tests(row, options):
        if isinstance(test, StdioTest):
            if not test.output.strip():
                raise ValueError("a test expects no output, which every program without output gives; remove the test")
            continue
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"a test is not Python: {error}; correct it") from None
        if not any(isinstance(node, (ast.Assert, ast.With, ast.Raise, ast.Call)) for node in ast.walk(tree)):
            raise ValueError("a test asserts nothing; write assert statements")


def _decoded(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; correct it") from None


def _entries(value: Any, where: str) -> Iterator[Any]:
    """Yield pairs of input and output of both forms."""
    if isinstance(value, dict):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"{where} must hold lists inputs and outputs of equal length; correct it")
        yield from ({"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True))
    elif isinstance(value, list):
        yield from value
    else:
        raise ValueError(f'{where} holds no list of tests; write [{{"input": …, "output": …}}]')


def _stdio_test(entry: Any, where: str) -> StdioTest:
    texts = [entry.get(name) for name in ("input", "output")] if isinstance(entry, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} has a test without the texts input and output; add them")
    return StdioTest(*texts)


NAME = "code"
KIND = RewardKind(
    make="rljob.rewards.code_reward:CodeReward",
    options=CodeOptions,
    row_check=check_row,
    summary="runs the Python program in the completion against the tests in a column of the row, in a sandbox.",
)
