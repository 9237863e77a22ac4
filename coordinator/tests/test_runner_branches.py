"""Loops that make branches: their requests, their replay, and what fails their sample."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from rljob.api.tasks import Task
from rljob.protocol.branches import before, path
from rljob.protocol.contexts import context_digest
from rljob.protocol.runner_protocol import (
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    TrajectoryFailed,
    TrajectoryScored,
    TurnTokens,
)
from rljob.protocol.score_messages import Score
from rljob.protocol.turn_states import state_digest
from rljob.runner.context import Context
from rljob.runner.leased_trajectory import MOST_OPEN_TURNS, LeasedTrajectory, TaskRuntime
from rljob.runner.loops import Loop
from rljob.runner.prompts import Prompt

TASK = Task.model_validate(
    {
        "name": "sums",
        "data": {"reasoningGym": {"dataset": "chain_sum"}},
        "prompt": "{question}",
        "reward": "sums",
        "sampling": {"maxTokens": 8},
    }
)


class Letters:
    stop_token_ids = (0,)

    def encode(self, text: str, special: bool = True) -> bytes:
        return array("i", map(ord, text)).tobytes()

    def decode(self, token_ids: bytes) -> str:
        return "".join(map(chr, array("i", token_ids)))


class Prompts:
    async def prompt(self, task: str, split: str, row: int) -> Prompt:
        return Prompt({}, "ask", Letters().encode("ask"))


class Reward:
    """Scores an answer with its length."""

    token_ids = False

    def __init__(self) -> None:
        self.turns: list[list[str]] = []

    async def score(self, item: Any) -> Score:
        self.turns.append([turn.text for turn in item.turns])
        return Score(item.sample, float(len(item.completion)))


class Play:
    """Runs a loop. Requests are answered in the order of ``choose``, with the name of their turn as text."""

    def __init__(self, loop: Loop, turns: list[TurnTokens] | None = None) -> None:
        self.sent: list[Any] = []
        self.answers = True
        self.reward = Reward()
        self.turns: dict[tuple[int, str], TurnTokens] = {(turn.turn, turn.branch): turn for turn in turns or []}
        self.asked: list[tuple[int, str]] = []
        runtime = TaskRuntime(TASK, loop, self.reward, 100, 1.0, 600.0)  # type: ignore[arg-type]
        lease = LeaseTrajectory("g0.0", "sums", 0, "train", turns or [])
        self.trajectory = LeasedTrajectory(lease, runtime, Prompts(), Letters(), self.sent.append)  # type: ignore[arg-type]

    async def run(self, choose: Callable[[list[GenerateRequest]], int] = lambda open_: 0) -> Any:
        """Return the result."""
        open_: list[GenerateRequest] = []
        for _ in range(MOST_OPEN_TURNS + 200):
            await asyncio.sleep(0)
            sent, self.sent[:] = list(self.sent), []
            for message in sent:
                if not isinstance(message, GenerateRequest):
                    return message
                open_.append(message)
            if open_ and not sent and self.answers:
                self.answer(open_.pop(choose(open_)))
        raise AssertionError("the loop does not end")

    def answer(self, request: GenerateRequest) -> None:
        key = (request.turn, request.branch)
        earlier = before(key)
        context = self.context(earlier) if earlier else b""
        prefix = (len(context) // 4, context_digest(context) if context else "")
        assert (request.prefix_tokens, request.prefix) == prefix
        self.asked.append(key)
        written = Letters().encode(f"<{request.turn}:{request.branch}>")
        digest = context_digest(context + request.given)
        self.turns[key] = TurnTokens(request.turn, request.given, written, "stop", request.branch)
        self.trajectory.receive(GenerateResult("g0.0", request.turn, written, "stop", digest, request.branch))

    def context(self, key: tuple[int, str]) -> bytes:
        """Return all tokens after a turn."""
        turns = [self.turns[each] for each in path(key)]
        return b"".join(turn.given + turn.token_ids for turn in turns)


async def explore(context: Context) -> Score:
    """Answer, then explore in two branches at the same time, one of which branches again; the first context ends."""

    async def follow(branch: Context, tokens: bytes, text: str) -> bytes:
        turn = await branch.generate(tokens + branch.encode(text))
        branch.reward(0.5)
        return tokens + branch.encode(text) + turn.token_ids

    async def deep(branch: Context, tokens: bytes) -> bytes:
        tokens = await follow(branch, tokens, "a")
        return await follow(branch.branch(), tokens, "c")

    first = await context.generate(context.prompt.token_ids)
    tokens = context.prompt.token_ids + first.token_ids
    one, two = context.branch(), context.branch()
    await asyncio.gather(deep(one, tokens), follow(two, tokens, "b"))
    last = await context.generate(tokens + context.encode("?"))
    return await context.score(context.answer(last), last.finish)


TREE = [(0, ""), (1, ""), (1, "1.1"), (2, "1.1/2.1"), (1, "1.2")]


async def test_branches_generate_at_the_same_time_each_from_its_own_context() -> None:
    play = Play(explore)
    most = 0

    def newest(open_: list[GenerateRequest]) -> int:
        nonlocal most
        most = max(most, len(open_))
        return len(open_) - 1

    result = await play.run(newest)
    assert most == 2 and sorted(play.asked) == sorted(TREE)
    assert Letters().decode(play.context((2, "1.1/2.1"))) == "ask<0:>a<1:1.1>c<2:1.1/2.1>"
    assert play.reward.turns == [["<0:>", "?", "<1:>"]], "the turns of the context that scores"
    assert result == TrajectoryScored("g0.0", 5.5, {}, "<1:>", 5, turn_rewards=[0.0, 0.0, 0.5, 0.5, 4.5]), (
        "rewards are by branch, and the last turn gets the rest; the text is of the context that scores"
    )


async def test_a_named_state_is_that_of_the_next_turn_only() -> None:
    async def loop(context: Context) -> Score:
        context.state("start")
        first = await context.generate(context.prompt.token_ids)
        await context.generate(context.prompt.token_ids + first.token_ids)
        return Score(context.sample, 1.0)

    assert (await Play(loop).run()).states == [state_digest("start"), ""]


async def longest(context: Context) -> Score:
    """Score two branches; return the score of the one with the longer text, which is the second by the text."""
    first = await context.generate(context.prompt.token_ids)
    tokens = context.prompt.token_ids + first.token_ids + context.encode("?")
    one, two, scores = context.branch(), context.branch(), []
    for branch, text in ((one, "short"), (two, "a long text"), (context, "")):
        turn = await branch.generate(tokens)
        scores.append(await branch.score(text, turn.finish))
    return max(scores, key=lambda score: score.reward)


async def own_score(context: Context) -> Score:
    """Return a score of the loop's own."""
    await longest(context)
    return Score(context.sample, 3.0)


@pytest.mark.parametrize(("loop", "branch"), [(longest, "1.2"), (own_score, "1.2")])
async def test_the_text_of_a_sample_is_that_of_the_branch_whose_score_the_loop_returns(loop: Loop, branch: str) -> None:
    result = await Play(loop).run()
    assert (result.branch, result.text) == (branch, f"<1:{branch}>")


@pytest.mark.parametrize("known", itertools.chain.from_iterable(itertools.combinations(TREE, n) for n in range(6)))
async def test_a_loop_that_runs_again_takes_the_recorded_turns_whatever_branch_was_faster(known: Any) -> None:
    """Turns are recorded after those that they continue; all other combinations happen."""
    if any(before(key) not in (None, *known) for key in known):
        return
    whole = Play(explore)
    expected = await whole.run()
    again = Play(explore, [whole.turns[key] for key in known])
    assert await again.run() == expected
    assert sorted([*again.asked, *known]) == sorted(TREE)


async def test_branches_before_the_first_turn_have_the_whole_prompt() -> None:
    async def best_of_three(context: Context) -> Score:
        branches = [context.branch() for _ in range(3)]
        turns = await asyncio.gather(*(branch.generate(context.prompt.token_ids) for branch in branches))
        best = max(range(3), key=lambda i: sum(turns[i].token_ids))
        return await branches[best].score(branches[best].answer(turns[best]), "stop")

    play = Play(best_of_three)
    result = await play.run()
    assert play.asked == [(0, "0.1"), (0, "0.2"), (0, "0.3")] and result.turns == 3
    assert (result.reward, result.text) == (7.0, "<0:0.3>")


async def test_after_a_reconnect_all_open_requests_are_sent_again() -> None:
    play = Play(explore)
    while (0, "") not in play.asked:
        await asyncio.sleep(0)
        if play.sent:
            play.answer(play.sent.pop())
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(request.turn, request.branch) for request in play.trajectory.pending] == [(1, "1.1"), (1, "1.2")]
    assert play.trajectory.pending == play.sent
    play.trajectory.cancel()


async def a_branch_while_it_generates(context: Context) -> Score:
    task = asyncio.create_task(context.generate(context.prompt.token_ids))
    await asyncio.sleep(0)
    context.branch()
    await task
    return Score(context.sample, 0.0)


async def two_turns_of_one_branch(context: Context) -> Score:
    await asyncio.gather(*(context.generate(context.prompt.token_ids) for _ in range(2)))
    return Score(context.sample, 0.0)


async def returns_before_a_branch(context: Context) -> Score:
    branch = context.branch()
    left = asyncio.create_task(branch.generate(context.prompt.token_ids))
    await asyncio.sleep(0)
    assert left
    return Score(context.sample, 0.0)


async def another_prefix(context: Context) -> Score:
    turn = await context.generate(context.prompt.token_ids)
    await context.branch().generate(turn.token_ids)
    return Score(context.sample, 0.0)


async def ever_deeper(context: Context) -> Score:
    for _ in range(300):
        context = context.branch()
    return Score(context.sample, 0.0)


async def too_many_at_a_time(context: Context) -> Score:
    branches = [context.branch() for _ in range(MOST_OPEN_TURNS + 1)]
    await asyncio.gather(*(branch.generate(context.prompt.token_ids) for branch in branches))
    return Score(context.sample, 0.0)


async def without_end(context: Context) -> Score:
    """Ask without a look at the errors."""
    asked = []
    while True:
        asked.append(asyncio.gather(context.branch().generate(context.prompt.token_ids), return_exceptions=True))
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (too_many_at_a_time, "its loop asks for more than 256 turns at a time; await some before the next ones"),
        (without_end, "its loop asks for more than 256 turns at a time; await some before the next ones"),
        (a_branch_while_it_generates, "the loop makes a branch while turn 0 is generated"),
        (two_turns_of_one_branch, "asks for another turn while turn 0 is generated"),
        (returns_before_a_branch, "its loop returned while turn 0 of branch 0.1 was generated"),
        (another_prefix, "the context of turn 1 of branch 1.1 does not start with"),
        (
            ever_deeper,
            "the loop makes a branch of a branch 250 times, so its name is longer than 1000 characters; branch",
        ),
    ],
)
async def test_a_loop_that_misuses_branches_fails_its_sample(loop: Loop, message: str) -> None:
    play = Play(loop)
    play.answers = loop is not without_end
    result = await play.run()
    assert isinstance(result, TrajectoryFailed) and message in result.reason and len(result.reason) < 200


async def test_a_loop_of_as_many_turns_at_a_time_as_allowed_is_scored() -> None:
    async def waves(context: Context) -> Score:
        for _ in range(2):
            branches = [context.branch() for _ in range(MOST_OPEN_TURNS)]
            await asyncio.gather(*(branch.generate(context.prompt.token_ids) for branch in branches))
        return await branches[0].score("both", "stop")

    play, results = Play(waves), []
    for _ in range(20):
        await asyncio.sleep(0)
        sent, play.sent[:] = list(play.sent), []
        for message in sent:
            play.answer(message) if isinstance(message, GenerateRequest) else results.append(message)
    assert [type(result) for result in results] == [TrajectoryScored] and len(play.asked) == 2 * MOST_OPEN_TURNS


async def test_a_branch_with_another_context_than_before_fails_its_sample() -> None:
    whole = Play(explore)
    await whole.run()
    wrong = whole.turns[1, "1.2"]
    wrong.given = Letters().encode("x")
    result = await Play(explore, list(whole.turns.values())).run()
    assert "turn 1 of branch 1.2 was generated from another context" in result.reason


async def test_the_calls_of_tasks_that_a_failed_loop_left_behind_end() -> None:
    left: list[asyncio.Task[Any]] = []

    async def fails(context: Context) -> Score:
        left.append(asyncio.create_task(context.branch().generate(context.prompt.token_ids)))
        await asyncio.sleep(0)
        raise RuntimeError("out of ideas")

    play = Play(fails)
    for _ in range(10):
        await asyncio.sleep(0)
    assert [type(message) for message in play.sent] == [GenerateRequest, TrajectoryFailed]
    assert play.trajectory.pending == [play.sent[1]] and left[0].cancelled()
