"""The entry point of an environment service without a job: what `rljob env play` and `rljob env check` run."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from rljob.environments import main

FORGETFUL = """
import random

class Environment:
    actions = ["a"]

    def reset(self, seed, row):
        return str(random.random()), {}

    def step(self, action):
        return action[0], 1.0, True, False, {}
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return a function that runs the entry point and returns exit code, output and errors."""
    monkeypatch.syspath_prepend(tmp_path)

    def call(*arguments, given=""):
        monkeypatch.setattr(sys, "argv", ["rljob-environment", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest, which it adds after the fixtures
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return call


def test_the_check_plays_random_and_scripted_agents(run):
    code, out, _ = run("--verify", "frozen_lake", '{"slippery": false}', "6", "20", "json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == []
    assert found["scripted"]["success"] == 1 > found["random"]["success"]


def test_the_check_finds_chance_outside_of_the_seed_and_exceptions_for_strange_actions(run, tmp_path):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    code, out, _ = run("--verify", "forgetful:Environment", "{}", "3", "10", "json")
    problems = json.loads(out)["problems"]
    assert code == 1 and len(problems) == 2
    assert problems[0] == (
        "seed 0 gives another episode when it is played again; use random.Random(seed) of the episode's own"
    )
    assert problems[1].startswith("the action '': environment checked: step raised IndexError")


def test_a_person_plays(run):
    code, out, _ = run("--play", "frozen_lake", '{"slippery": false, "frozen": 1}', "3", given="sideways\nL\n")
    assert code == 0 and out.count("action> ") == 3
    assert "reward 0, success 0, action_is_valid 0, action_is_effective 0" in out
    assert out.endswith("reward of the episode: 0\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["frozen_laek", "{}"], "there is no environment 'frozen_laek'; there are frozen_lake, reasoning_gym, sokoban"),
        (["frozen_lake", "{"], "--config: '{' is not JSON"),
        (["frozen_lake", "[]"], "--config: '[]' is not a JSON object"),
        (["frozen_lake", '{"sise": 4}'], "rljob env.config.sise: unknown field; did you mean size?"),
        (["nowhere:Environment", "{}"], "rljob env.function: module nowhere cannot be imported"),
        (["json:loads", "{}"], "json:loads is of type function; name a class with reset(seed, row) and step(action)"),
        (["json:JSONDecoder", "{}"], "json:JSONDecoder has no reset and no step; name a class"),
    ],
)
def test_a_wrong_environment_is_one_sentence(run, arguments, sentence):
    code, _, err = run("--play", *arguments, "0")
    assert code == 2 and sentence in err and err.count("\n") == 1


HOSTILE = """
TEXT = "\\x1b]0;title\\x07\\x9b2J\\u202e\\x7f"

class Environment:
    actions = [TEXT]

    def reset(self, seed, row):
        return TEXT, {}

    def step(self, action):
        return TEXT, 1.0, True, False, {TEXT: 1.0}

class Failing(Environment):
    def step(self, action):
        raise ValueError(TEXT)

class FailingInit(Environment):
    def __init__(self):
        raise SystemExit(TEXT)

class FailingActions(Environment):
    @property
    def actions(self):
        raise ValueError(TEXT)

class FailingExpert(Environment):
    def expert(self):
        raise ValueError(TEXT)

class FailingClose(Environment):
    def close(self):
        raise ValueError(TEXT)

def __getattr__(name):
    raise ValueError(TEXT)
"""
ESCAPED = r"\x1b]0;title\x07\x9b2J\u202e\x7f"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("Environment", ("--play", "0")),
        ("Failing", ("--play", "0")),
        ("FailingInit", ("--play", "0")),
        ("FailingClose", ("--play", "0")),
        ("none", ("--play", "0")),
        ("none", ("--serve", "127.0.0.1:0", "1")),
        ("none", ("--verify", "2", "2", "text")),
        ("FailingInit", ("--verify", "2", "2", "text")),
        ("FailingActions", ("--verify", "2", "2", "text")),
        ("FailingExpert", ("--verify", "2", "2", "text")),
        ("FailingClose", ("--verify", "2", "2", "text")),
        ("Failing", ("--verify", "2", "2", "text")),
        ("Failing", ("--verify", "2", "2", "json")),
    ],
)
def test_no_control_character_of_an_environment_reaches_the_terminal(run, tmp_path, name, command):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    option, *others = command
    _, out, err = run(option, f"hostile:{name}", "{}", *others, given="a\n")
    assert "title" in out + err
    assert all(character.isprintable() for character in (out + err).replace("\n", ""))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FailingInit", f"environment checked: hostile:FailingInit raised SystemExit: {ESCAPED}"),
        ("FailingActions", f"environment checked: actions raised ValueError: {ESCAPED}"),
        ("FailingExpert", f"agent scripted, seed 0: environment checked: expert raised ValueError: {ESCAPED}"),
    ],
)
def test_the_check_names_what_raised_an_exception(run, tmp_path, name, problem):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    code, out, err = run("--verify", f"hostile:{name}", "{}", "1", "2", "text")
    assert (code, err) == (1, "") and f"problem: {problem}\n" in out


def test_a_play_names_the_class_that_raised_an_exception(run, tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    code, _, err = run("--play", "hostile:FailingInit", "{}", "0")
    assert (code, err) == (1, f"environment play: hostile:FailingInit raised SystemExit: {ESCAPED}\n")
