"""Runs of code that the machine could not make: without a CPU the runner asks for the sample again, and it never counts
as 0; a sandbox that fails is used once more."""

from __future__ import annotations

import json
import socket

import pytest

from rljob.api.rewards import REWARDS
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards import code_reward
from rljob.rewards.code_reward import CodeReward
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.sandbox.code_sandbox import CodeSandbox, Limits, SandboxError, SandboxRun, StarvedError
from rljob.rewards.sandbox.isolation import Isolation

ITEM = ScoreItem("s0", "sums", "", "```\nprint(42)\n```", "stop", {"tests": [{"input": "", "output": "42"}] * 3})


def sandbox(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, object]) -> CodeSandbox:
    """Return a sandbox whose zygote has these answers, one for each run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for answer in answers:
        theirs.send(json.dumps(answer).encode())
    box = CodeSandbox(Isolation({}, {}), Limits(seconds=1))
    monkeypatch.setattr(box, "_connection", ours, raising=False)
    monkeypatch.setattr(box, "_zygote", theirs)  # keeps it open
    monkeypatch.setattr(box, "_start", lambda: None)
    return box


def ended(why: str, spent: float = 0.01) -> dict[str, object]:
    return {"ends": [[9, spent]], "why": why}


def test_a_starved_run_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    box = sandbox(monkeypatch, ended("starved"), ended("time"))
    with pytest.raises(StarvedError, match=r"the machine is too busy: a run had 0.01 s of a CPU in 15 s"):
        box.run_program(b"", b"", 100)
    assert box.run_program(b"", b"", 100).why == "time"


@pytest.mark.parametrize("credit", ["all", "partial"])
def test_the_reward_answers_later(monkeypatch: pytest.MonkeyPatch, credit: str) -> None:
    monkeypatch.setattr(code_reward, "find_isolation", lambda: Isolation({"landlock": "", "seccomp": ""}, {}))
    reward = CodeReward(REWARDS["code"].parse({"credit": credit}), [])
    monkeypatch.setattr(reward, "_sandbox", sandbox(monkeypatch, ended("starved")))
    score = RewardEvaluator(reward, "passes")(ITEM)
    assert score.later and score.error.startswith("reward passes cannot score now: the machine is too busy")


def test_a_program_that_sleeps_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward, "find_isolation", lambda: Isolation({"landlock": "", "seccomp": ""}, {}))
    reward = CodeReward(REWARDS["code"].parse({}), [])
    monkeypatch.setattr(reward, "_sandbox", sandbox(monkeypatch, ended("time")))
    assert RewardEvaluator(reward, "passes")(ITEM) == Score("s0", 0.0, {"answered": 1.0}, "")


@pytest.mark.parametrize("failures", [1, 2])
def test_a_sandbox_that_fails_is_used_once_more(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """The zygote may have been killed for the memory of another run; a program that ends it each time has an error."""
    monkeypatch.setattr(code_reward, "find_isolation", lambda: Isolation({"landlock": "", "seccomp": ""}, {}))
    reward = CodeReward(REWARDS["code"].parse({}), [])
    left = [SandboxError("the zygote has ended")] * failures

    class Box:
        def run_program(self, *_: object) -> SandboxRun:
            if left:
                raise left.pop()
            return SandboxRun(b"42", 0, 0.01, "", 0.01)

    monkeypatch.setattr(reward, "_sandbox", Box())
    score = RewardEvaluator(reward, "passes")(ITEM)
    assert (score.reward, score.later) == (1.0 if failures == 1 else 0.0, False)
    assert score.error == ("" if failures == 1 else "reward passes raised SandboxError: the zygote has ended")
