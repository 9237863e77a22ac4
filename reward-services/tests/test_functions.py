"""Rewards of a user's package: the service needs only the reference in the manifest."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rljob.api.models import RLJob
from rljob.api.rewards import REWARDS
from rljob.protocol.score_messages import ScoreItem
from rljob.rewards import main
from rljob.rewards.main import function_problems

PACKAGE = """
import os

from rljob.api.base import Model
from rljob.api.rewards import RewardKind, batch

def plain(completion, problem):
    return float(problem["answer"] in completion), {"characters": len(completion)}

if "RLJOB_TOKEN" in os.environ:
    raise ValueError("code of a user sees the token")

def wrong(text):
    return 1.0

def long(response_token_ids):
    return float(len(response_token_ids))

async def later(completion, problem):
    return float(problem["answer"] in completion)

class SetUp:
    def __init__(self):
        self.made_in = os.getpid()

    def set_up(self):
        self.worker = os.getpid()

    async def __call__(self, completion, problem):
        assert self.made_in != self.worker == os.getpid()
        return float(problem["answer"] in completion)

@batch
def many(completion, problem):
    return [float(row["answer"] in text) + len(completion) for row, text in zip(problem, completion)]

class WrongClass:
    def __call__(self, text):
        return 1.0

class NoScorer:
    pass

class Options(Model):
    price: float = 0.5

def row_check(row, options):
    if "answer" not in row:
        raise ValueError("there is no column answer")

class Priced:
    def __init__(self, options, tasks):
        self.price = options.price
        self.tasks = [task.name for task in tasks]

    def __call__(self, *, completion, problem, task):
        assert task in self.tasks
        return float(problem["answer"] in completion) - self.price * len(completion)

PRICED = RewardKind(make=Priced, options=Options, data=["jsonl"], row_check=row_check)
NOT_CALLABLE = RewardKind(make=lambda options, tasks: 5)
ELSEWHERE = RewardKind(make="no_such_module:make", row_check="own_rewards:none")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_rewards.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_rewards", None)


def job(*rewards: dict) -> RLJob:
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [
            {"name": f"sums-{i}", "data": {"jsonl": {"path": "a"}}, "reward": reward["name"]}
            for i, reward in enumerate(rewards)
        ],
        "rewards": list(rewards),
        "rollouts": [{"name": "main"}],
    }
    return RLJob.model_validate({"metadata": {"name": "test"}, "spec": spec})


def start(directory: Path, job: RLJob, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the service in a directory from which the package can be imported."""
    (directory / "job.json").write_text(job.model_dump_json(by_alias=True))
    environment = {
        **os.environ,
        "RLJOB_JOB": str(directory / "job.json"),
        "RLJOB_STORAGE": str(directory),
        "PYTHONPATH": str(directory),
        **variables,
    }
    command = [sys.executable, "-W", "ignore", "-m", "rljob.rewards.main", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("reward", "scores"),
    [
        ({"function": "own_rewards:plain"}, [(1.0, {"characters": 1.0}), (0.0, {"characters": 2.0})]),
        ({"function": "own_rewards:later"}, [(1.0, {}), (0.0, {})]),
        ({"function": "own_rewards:SetUp"}, [(1.0, {}), (0.0, {})]),
        ({"function": "own_rewards:many"}, [(3.0, {}), (2.0, {})]),
        ({"function": "own_rewards:PRICED"}, [(0.5, {}), (-1.0, {})]),
        ({"function": "own_rewards:PRICED", "config": {"price": 0.25}}, [(0.75, {}), (-0.5, {})]),
    ],
)
def test_a_function_of_a_user_package_is_served(
    tmp_path: Path, package: None, unused_tcp_port: int, reward: dict, scores: list
) -> None:
    where = {"RLJOB_LISTEN": f"127.0.0.1:{unused_tcp_port}", "RLJOB_TOKEN": "secret"}
    service = start(tmp_path, job({"name": "own"} | reward), RLJOB_NAME="own", **where)
    try:
        assert service.stderr is not None
        assert any("serving at" in line for line in service.stderr), service.wait()
        item = {"sample": "g0.0", "task": "sums-0", "prompt": "", "finish": "stop", "problem": {"answer": "7"}}
        body = {"items": [{**item, "completion": completion} for completion in ("7", "88")]}
        url, token = f"http://127.0.0.1:{unused_tcp_port}/v1/score", {"Authorization": "Bearer secret"}
        reply = httpx.post(url, content=json.dumps(body), headers=token).json()
        assert [(score["reward"], score["metrics"], score["error"]) for score in reply["scores"]] == [
            (value, metrics, "") for value, metrics in scores
        ]
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.communicate()


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ({"function": "own_rewards:wrong"}, "function: reward own asks for 'text'; there are prompt, completion"),
        ({"function": "own_rewards:WrongClass"}, "function: reward own asks for 'text'; there are prompt, completion"),
        ({"function": "own_rewards:NoScorer"}, "function: own_rewards:NoScorer is a class; name a function, a class w"),
        ({"function": "own_rewards:none"}, "function: module own_rewards has no attribute none; correct"),
        ({"function": "own_rewards:plain", "config": {"a": 1}}, "config: own_rewards:plain is a function, which has"),
        (
            {"function": "own_rewards:PRICED", "config": {"prize": 1}},
            "config.prize: unknown field; did you mean price",
        ),
        ({"function": "own_rewards:long"}, "tokenIds: reward own asks for 'response_token_ids'; set tokenIds: true"),
        ({"function": "own_rewards:ELSEWHERE"}, "function: module own_rewards has no attribute none; correct"),
    ],
)
def test_the_check_reports_a_reward_that_cannot_be_served(package: None, reward: dict, sentence: str) -> None:
    right = {"name": "right", "function": "own_rewards:PRICED"}
    (found,) = function_problems(job(right, {"name": "own"} | reward).spec)
    assert found.startswith(f"spec.rewards[1].{sentence}")


def test_a_reward_with_token_ids_may_ask_for_them(package: None) -> None:
    spec = job({"name": "own", "function": "own_rewards:long", "tokenIds": True}).spec
    assert not list(function_problems(spec))
    item = ScoreItem("a", "sums-0", "", "", "stop", {}, response_token_ids=[5, 6])
    assert main.make_evaluator(spec, 0)(item).reward == 2.0


def test_a_factory_that_cannot_be_imported_is_found_by_the_check(package: None, monkeypatch) -> None:
    import own_rewards  # type: ignore[import-not-found]

    monkeypatch.setattr(own_rewards, "none", own_rewards.row_check, raising=False)
    (found,) = function_problems(job({"name": "own", "function": "own_rewards:ELSEWHERE"}).spec)
    assert found.startswith("spec.rewards[0].function: module no_such_module cannot be imported")


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        ("not_installed:reward", ["--check"], "spec.rewards[0].function: module not_installed cannot be imported"),
        ("not_installed:reward", [], "spec.rewards[0].function: module not_installed cannot be imported"),
        ("own_rewards:NOT_CALLABLE", [], "spec.rewards[0].function: reward own is of type int, which is not callable"),
    ],
)
def test_check_and_start_exit_with_code_2_and_the_problem(
    tmp_path: Path, package: None, function: str, arguments: list[str], sentence: str
) -> None:
    service = start(tmp_path, job({"name": "own", "function": function}), *arguments, RLJOB_NAME="own")
    _, errors = service.communicate(timeout=100)
    assert service.returncode == 2
    assert sentence in errors


@pytest.mark.parametrize("name", REWARDS)
def test_the_factory_of_a_built_in_reward_is_in_this_package(name: str) -> None:
    """The source is read: an import of all their libraries takes seconds, and other tests use the scorers."""
    module, _, attribute = str(REWARDS[name].make).partition(":")
    source = Path(main.__file__).with_name(f"{module.rpartition('.')[2]}.py")
    defined = {
        node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert module.startswith("rljob.rewards.") and attribute in defined


def test_a_function_is_served_without_a_job(tmp_path: Path, package: None, unused_tcp_port: int) -> None:
    """`rljob reward serve`."""
    address = f"127.0.0.1:{unused_tcp_port}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
    command = [sys.executable, "-W", "ignore", "-m", "rljob.rewards.main", "--serve"]
    service = subprocess.Popen(
        [*command, "own_rewards:SetUp", address, "1", "10"],
        env=environment | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.stderr is not None
        assert any("serving at" in line for line in service.stderr), service.wait()
        item = {
            "sample": "a",
            "task": "t",
            "prompt": "",
            "finish": "stop",
            "problem": {"answer": "7"},
            "completion": "7",
        }
        reply = httpx.post(f"http://{address}/v1/score", content=json.dumps({"items": [item]})).json()
        assert [(score["reward"], score["error"]) for score in reply["scores"]] == [(1.0, "")]
    finally:
        service.kill()
        service.communicate()
    refused = subprocess.run(
        [*command, "own_rewards:none", address, "1", "10"],
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "rljob reward serve: module own_rewards has no attribute none" in refused.stderr
