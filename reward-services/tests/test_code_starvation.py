"""Runs of code that the machine could not make: without a CPU the runner asks for the sample again, and it never counts
as 0 or as a sample that takes too long; a sandbox that fails is used once more."""

from __future__ import annotations

import json
import socket
import threading
from types import SimpleNamespace

import pytest

from rljob.api.rewards import REWARDS
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards import code_reward
from rljob.rewards.code_reward import CodeReward
from rljob.rewards.combined_reward import CombinedReward
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.sandbox import code_sandbox
from rljob.rewards.sandbox.code_sandbox import (
    CodeSandbox,
    Limits,
    SampleTime,
    SandboxError,
    SandboxRun,
    StarvedError,
)
from rljob.rewards.sandbox.isolation import Isolation
from rljob.rewards.sandbox.zygote import _why_ended

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


def ended(why: str, waited: float = 0.0, slept: float = 0.0) -> dict[str, object]:
    return {"ends": [[9 if why else 0, 0.01]], "why": why, "waited": waited, "slept": slept}


def test_a_starved_run_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    box = sandbox(monkeypatch, ended("starved"), ended("time"))
    times = iter([0.0, 0.0, 15.0])
    with monkeypatch.context() as patched:
        patched.setattr(code_sandbox, "time", SimpleNamespace(monotonic=times.__next__))
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


def test_the_time_of_a_run_is_that_of_both_processes_and_their_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ended("") | {"ends": [[0, 0.5], [9, 1.5]], "slept": 2.0}
    run = sandbox(monkeypatch, answer).run_program(b"", b"", 100)
    assert run.ok and run.seconds == 4.0


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
            return SandboxRun(b"42", 0, "", 0.01)

    monkeypatch.setattr(reward, "_sandbox", Box())
    score = RewardEvaluator(reward, "passes")(ITEM)
    assert (score.reward, score.later) == (1.0 if failures == 1 else 0.0, False)
    assert score.error == ("" if failures == 1 else "reward passes raised SandboxError: the zygote has ended")


def answering(monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]) -> tuple[CodeSandbox, list[bytes]]:
    """Return a sandbox whose zygote answers once it has a request and another message, and the messages."""
    box = sandbox(monkeypatch)
    messages: list[bytes] = []
    theirs: socket.socket = box._zygote  # type: ignore[assignment]

    def answers() -> None:
        messages.extend(theirs.recv(1 << 16) for _ in range(2))
        theirs.send(json.dumps(answer).encode())

    threading.Thread(target=answers, daemon=True).start()
    return box, messages


def test_the_zygote_hears_when_the_time_of_a_sample_is_nearly_over(monkeypatch: pytest.MonkeyPatch) -> None:
    box, messages = answering(monkeypatch, ended("starved"))
    with pytest.raises(StarvedError):
        box.run_program(b"", b"", 100, SampleTime(start=0.0, seconds=0.0, waited=7.5))
    word, waited, passed = messages[1].split()
    assert (word, waited) == (b"late", b"7.5") and float(passed) > 0


def test_a_sample_that_has_not_waited_goes_on_until_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    box, _ = answering(monkeypatch, ended("", waited=0.25))
    run = box.run_program(b"", b"", 100, SampleTime(start=0.0, seconds=0.0))
    assert run.ok and run.waited == 0.25


@pytest.mark.parametrize(
    ("earlier", "of_this_run", "why"), [(0, 9.0, "starved"), (5, 4.0, "starved"), (0, 7.0, ""), (8, 0.2, "")]
)
def test_a_sample_is_starved_if_it_waited_for_five_sixths_of_its_time(
    earlier: float, of_this_run: float, why: str
) -> None:
    assert _why_ended(f"late {earlier} 10".encode(), of_this_run) == why
    assert _why_ended(b"end", of_this_run) == "ended"


def test_each_run_of_a_sample_has_its_time_and_what_earlier_runs_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward, "find_isolation", lambda: Isolation({"landlock": "", "seccomp": ""}, {}))
    monkeypatch.setattr(code_reward, "time", SimpleNamespace(monotonic=lambda: 100.0))
    reward = CodeReward(REWARDS["code"].parse({}), [])
    samples: list[SampleTime] = []

    class Box:
        def run_program(self, source: bytes, stdin: bytes, limit: int, sample: SampleTime) -> SandboxRun:
            samples.append(sample)
            return SandboxRun(b"42", 0, "", 0.01, waited=2.0)

    monkeypatch.setattr(reward, "_sandbox", Box())
    RewardEvaluator(reward, "passes").score_all([ITEM], lambda _: None, 10.0)
    assert samples == [SampleTime(100.0, 9.0, waited) for waited in (0.0, 2.0, 4.0)]


def test_a_combined_reward_is_asked_again_if_a_part_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward, "find_isolation", lambda: Isolation({"landlock": "", "seccomp": ""}, {}))
    parts = [{"name": "passes", "builtin": "code"}, {"name": "short", "builtin": "length", "config": {"max": 9}}]
    reward = CombinedReward(REWARDS["combined"].parse({"parts": parts}), [])
    passes = reward._parts["passes"]
    monkeypatch.setattr(passes, "_sandbox", sandbox(monkeypatch, ended("starved")))
    scores: list[Score] = []
    RewardEvaluator(reward, "sum").score_all([ITEM], scores.append, 7.0)
    assert scores[0].later
    assert scores[0].error.startswith("reward sum cannot score now: part passes: the machine is too busy")
    assert passes._time_limit == 7.0  # type: ignore[attr-defined]
