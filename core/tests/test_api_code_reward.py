"""Options of the reward ``code``, and its check of rows."""

from __future__ import annotations

import pytest

from rljob.api.rewards import REWARDS
from rljob.api.rewards.kinds.code import StdioTest, check_row, read_tests

KIND = REWARDS["code"]
PAIRS = [StdioTest("1", "2"), StdioTest("3", "4")]


@pytest.mark.parametrize(
    ("style", "value", "expected"),
    [
        ("stdio", [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}], PAIRS),
        ("stdio", {"inputs": ["1", "3"], "outputs": ["2", "4"], "fn_name": None}, PAIRS),
        ("stdio", '{"inputs": ["1", "3"], "outputs": ["2", "4"]}', PAIRS),
        ("asserts", ["assert f(1)", "assert f(2)"], ["assert f(1)", "assert f(2)"]),
        ("asserts", '["assert f(1)"]', ["assert f(1)"]),
        ("asserts", "assert f(1)\nassert f(2)", ["assert f(1)\nassert f(2)"]),
        ("pytest", "def test_f(): assert f(1)", ["def test_f(): assert f(1)"]),
    ],
)
def test_tests_are_read_in_the_forms_of_public_data_sets(style, value, expected):
    options = KIND.parse({"style": style, "column": "checks"})
    assert read_tests({"checks": value}, options) == expected
    check_row({"checks": value}, options)


@pytest.mark.parametrize(
    ("style", "row", "problem"),
    [
        ("stdio", {"text": 1}, "there is no column 'tests'; there are text"),
        ("stdio", {"tests": []}, "column 'tests' holds no tests; give a list of them"),
        ("stdio", {"tests": 3}, "column 'tests' holds no list of tests"),
        ("stdio", {"tests": "[1"}, "column 'tests' is not JSON: "),
        ("stdio", {"tests": [{"input": "1"}]}, "a test without the texts input and output; add them"),
        ("stdio", {"tests": ["1"]}, "a test without the texts input and output; add them"),
        ("stdio", {"tests": {"inputs": ["1"], "outputs": []}}, "must hold lists inputs and outputs of equal length"),
        ("stdio", {"tests": [{"input": "1", "output": " \n"}]}, "a test expects no output"),
        ("stdio", {"tests": [{"input": "1", "output": "1"}] * 1001}, "holds 1001 tests; give at most 1000"),
        ("asserts", {"tests": [3]}, "holds something other than texts"),
        ("asserts", {"tests": ["assert f(1"]}, "a test is not Python: "),
        ("asserts", {"tests": ["x = 3"]}, "a test asserts nothing; write assert statements"),
        ("pytest", {"tests": None}, "holds something other than texts"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_with_the_reason(style, row, problem):
    with pytest.raises(ValueError) as refused:
        check_row(row, KIND.parse({"style": style}))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"style": "unittest"}, "config.style: must be 'stdio', 'asserts' or 'pytest', not 'unittest'"),
        ({"seconds": 0}, "config.seconds: "),
        ({"memoryMebibytes": 1}, "config.memoryMebibytes: "),
        ({"module": "a-b"}, "config.module: "),
        ({"layers": ["docker"]}, "config.layers[0]: "),
        ({"language": "C"}, "config.language: "),
        (
            {"style": "asserts", "layers": ["seccomp"]},
            "config: layers lacks landlock, without which a program could read the tests of style asserts; add it",
        ),
    ],
)
def test_wrong_options_are_refused_by_name(config, problem):
    (found,) = KIND.option_problems(config)
    assert found.startswith(problem)


def test_layers_may_be_given_up_for_tests_that_stay_outside():
    assert list(KIND.option_problems({"layers": []})) == []
