"""Loops that ask frozen pools: their questions, the replay of answers, and what fails their sample."""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import Any

import msgspec
import pytest

from rljob.api.tasks import Task
from rljob.protocol.branches import path
from rljob.protocol.contexts import context_digest
from rljob.protocol.runner_protocol import (
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    PoolAnswer,
    PoolAnswered,
    TrajectoryFailed,
    TrajectoryScored,
)
from rljob.protocol.score_messages import Score
from rljob.runner.context import Context, TrajectoryError
from rljob.runner.leased_trajectory import LeasedTrajectory, TaskRuntime
from rljob.runner.loops import Loop
from rljob.runner.pools import leased_questions
from rljob.runner.pools.leased_questions import PoolRuntime
from rljob.runner.pools.question import MAX_BODY_BYTES, Question
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
CHAT = [{"role": "user", "content": "hint?"}]


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
    token_ids = False

    async def score(self, item: Any) -> Score:
        return Score(item.sample, float(len(item.completion)))


class Teacher:
    """A pool that never gives the same answer twice. ``ways``: seconds, or an error, of each question in turn."""

    def __init__(self, *ways: float | Exception) -> None:
        self.ways = list(ways)
        self.asked: list[tuple[Question, int, float | None]] = []
        self.cancelled = 0

    async def answer(self, question: Question, seed: int, seconds: float | None) -> tuple[str, str]:
        self.asked.append((question, seed, seconds))
        text, way = f"t{len(self.asked)}", self.ways.pop(0) if self.ways else 0.0
        if isinstance(way, Exception):
            raise way
        try:
            await asyncio.sleep(way)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return text, "stop"

    async def logprobs(self, token_ids: bytes) -> list[float]:
        """Return minus the position and a hundredth of the length."""
        return [-float(i) - len(token_ids) / 400 for i in range(len(token_ids) // 4)]


class Play:
    """Runs a loop with a coordinator that generates, and stores answers of pools unless ``store`` is False."""

    def __init__(
        self,
        loop: Loop,
        teacher: Teacher | None = None,
        answers: list[PoolAnswer] | None = None,
        attempt: int = 0,
        roles: dict[str, str] | None = None,
        split: str = "train",
    ) -> None:
        self.sent: list[Any] = []
        self.teacher = teacher or Teacher()
        self.answers: list[PoolAnswer] = []
        self.contexts: list[str] = []
        self.store = True
        pools = PoolRuntime({"teacher": self.teacher}, ["main"], 3, roles or {})
        runtime = TaskRuntime(TASK, loop, Reward(), 100, 1.0, 600.0, pools=pools)  # type: ignore[arg-type]
        lease = LeaseTrajectory("g0.0", "sums", 0, split, [], attempt, 5, answers or [])
        self.trajectory = LeasedTrajectory(lease, runtime, Prompts(), Letters(), self.send)  # type: ignore[arg-type]

    def send(self, message: Any) -> None:
        self.sent.append(message)
        match message:
            case PoolAnswered(answer=answer) if self.store:
                self.answers.append(answer)
                asyncio.get_running_loop().call_soon(self.trajectory.questions.receive, answer)
            case GenerateRequest(turn=turn, given=given, branch=branch):
                self.contexts.append(Letters().decode(given))
                earlier = [self.trajectory._turns[key] for key in path((turn, branch))[:-1]]
                before = b"".join(each.given + each.token_ids for each in earlier)
                written = Letters().encode(f"<{turn}>")
                result = GenerateResult("g0.0", turn, written, "stop", context_digest(before + given), branch)
                asyncio.get_running_loop().call_soon(self.trajectory.receive, result)

    async def run(self) -> Any:
        """Return the result."""
        for _ in range(200):
            await asyncio.sleep(0)
            if self.trajectory.finished:
                return self.trajectory.pending[0]
        raise AssertionError("the loop does not end")


async def asks_for_a_hint(context: Context) -> Score:
    first = await context.generate(context.prompt.token_ids)
    hint = await context.ask("teacher", [*CHAT, {"role": "assistant", "content": context.answer(first)}])
    tokens = context.prompt.token_ids + first.token_ids + context.encode(f"({hint.text})")
    second = await context.generate(tokens)
    return await context.score(context.answer(second), second.finish)


async def test_an_answer_is_stored_and_its_text_becomes_an_observation() -> None:
    play = Play(asks_for_a_hint)
    result = await play.run()
    assert isinstance(result, TrajectoryScored) and result.turns == 2, "the answer of the pool is no turn"
    assert play.contexts == ["ask", "(t1)"]
    assert [type(message) for message in play.sent] == [
        GenerateRequest, PoolAnswered, GenerateRequest, TrajectoryScored
    ]  # fmt: skip
    answered = play.sent[1]
    assert (answered.sample, answered.attempt, answered.lease) == ("g0.0", 0, 5)
    [(question, _, seconds)] = play.teacher.asked
    assert answered.answer == PoolAnswer("", question.digest, 0, 1, "teacher", "t1", "stop")
    assert question.content == [*CHAT, {"role": "assistant", "content": "<0>"}] and seconds is None
    assert question.max_tokens == 8, "the task's sampling.maxTokens"


async def test_the_loop_gets_an_answer_only_once_it_is_stored() -> None:
    play = Play(asks_for_a_hint)
    play.store = False
    for _ in range(50):
        await asyncio.sleep(0)
    assert isinstance(play.sent[-1], PoolAnswered) and not play.trajectory.finished
    assert play.trajectory.pending == [play.sent[-1]], "after a reconnect it is sent again"
    play.trajectory.questions.receive(msgspec.structs.replace(play.sent[-1].answer, text="the first one"))
    assert isinstance(await play.run(), TrajectoryScored)
    assert play.contexts[-1] == "(the first one)", "the coordinator says which one counts"


async def asks_all_at_once(context: Context) -> Score:
    one, two = context.branch(), context.branch()
    same = [context.ask("teacher", CHAT) for _ in range(2)]
    others = [context.ask("teacher", "hint:"), one.ask("teacher", CHAT), two.ask("teacher", CHAT)]
    settings: list[dict[str, Any]] = [{"max_tokens": 2}, {"temperature": 0.0}, {"top_p": 0.5}, {"stop": ["."]}]
    others += [context.ask("teacher", CHAT, **each) for each in settings]
    answers = await asyncio.gather(*same, *others)
    turn = await context.generate(context.encode(" ".join(answer.text for answer in answers)))
    return await context.score("", turn.finish)


async def test_a_loop_that_runs_again_asks_nothing_again_in_whatever_order_answers_came() -> None:
    whole = Play(asks_all_at_once, Teacher(*(0.001 * (9 - i) for i in range(9))))
    for _ in range(200):
        await asyncio.sleep(0.001)
        if whole.trajectory.finished:
            break
    assert len(whole.teacher.asked) == len({seed for _, seed, _ in whole.teacher.asked}) == 9
    assert len({(a.branch, a.question, a.number) for a in whole.answers}) == 9, "each has a key of its own"
    assert len({a.question for a in whole.answers}) == 6
    assert [a.text for a in whole.answers] != sorted(a.text for a in whole.answers)
    again = Play(asks_all_at_once, Teacher(RuntimeError("asked again")), whole.answers[::-1])
    assert await again.run() == whole.trajectory.pending[0]
    assert again.contexts == whole.contexts and not again.teacher.asked
    some = Play(asks_all_at_once, None, whole.answers[:4])
    assert isinstance(await some.run(), TrajectoryScored)
    missing = {(a.branch, a.question, a.number) for a in whole.answers[4:]}
    assert {(a.branch, a.question, a.number) for a in some.answers} == missing, "only the others are asked"


async def test_the_seed_of_a_question_is_the_same_again_and_another_in_each_attempt() -> None:
    plays = [Play(asks_all_at_once, attempt=attempt) for attempt in (0, 0, 1)]
    for play in plays:
        await play.run()
    seeds = [[seed for _, seed, _ in play.teacher.asked] for play in plays]
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2])


def asking(*arguments: Any, **settings: Any) -> Loop:
    async def loop(context: Context) -> Score:
        await context.ask(*arguments, **settings)
        return Score(context.sample, 0.0)

    return loop


async def asks_after_its_end(context: Context) -> Score:
    async def later() -> None:
        await asyncio.sleep(0)
        await context.ask("teacher", CHAT)

    LEFT.append(asyncio.create_task(later()))
    return Score(context.sample, 0.0)


LEFT: list[asyncio.Task[Any]] = []


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (asking("judge", CHAT), "'judge', which is no entry of spec.rollouts with a model of its own; there are teach"),
        (asking("main", CHAT), "pool main, which serves the policy; name an entry of spec.rollouts whose model"),
        (asking("teacher", b"\0\0\0\0"), "something else than a text or a list of messages with roles"),
        (asking("teacher", []), "something else than a text or a list of messages with roles"),
        (asking("teacher", [{"content": "hint?"}]), "something else than a text or a list of messages with roles"),
        (asking("teacher", [{"role": "user", "content": object()}]), "something that cannot be sent"),
        (asking("teacher", "\ud800"), "something that cannot be sent"),
        (asking("teacher", "x" * MAX_BODY_BYTES), f"at most {MAX_BODY_BYTES:,} are sent"),
        (asking("teacher", CHAT, max_tokens=0), "with max_tokens 0; give a whole number of at least 1"),
        (asking("teacher", CHAT, max_tokens=64 / 2), "with max_tokens 32.0; give a whole number of at least 1"),
        (asking("teacher", CHAT, stop=[""]), "with '' in stop; give texts of 1 to 128 characters"),
        (asking("teacher", CHAT, stop=[1]), "with 1 in stop; give texts of 1 to 128 characters"),
        (asking("teacher", CHAT, stop="END"), "with stop 'END'; give a list of texts"),
        (asking("teacher", CHAT, stop=5), "with stop 5; give a list of texts"),
        (asking("teacher", CHAT, temperature=float("nan")), "with temperature nan and top_p 1.0; give a temperature"),
        (asking("teacher", CHAT, timeout_seconds=0), "with timeout_seconds 0; it must be above 0"),
        (asking("teacher", CHAT, top_p=0.0), "with temperature 1.0 and top_p 0.0; give a temperature"),
    ],
)  # fmt: skip
async def test_a_question_that_cannot_be_asked_fails_the_sample_with_one_sentence(loop: Loop, message: str) -> None:
    play = Play(loop)
    result = await play.run()
    assert isinstance(result, TrajectoryFailed) and message in result.reason and "\n" not in result.reason
    assert not play.teacher.asked


async def test_an_answer_that_a_pool_does_not_give_fails_the_sample_unless_the_loop_goes_on() -> None:
    gone = TrajectoryError("no engine of pool teacher has answered for 600 s")
    result = await Play(asks_for_a_hint, Teacher(gone)).run()
    assert isinstance(result, TrajectoryFailed) and result.reason == str(gone)

    async def tries(context: Context) -> Score:
        turn = await context.generate(context.prompt.token_ids)
        try:
            hint = await context.ask("teacher", CHAT)
        except TrajectoryError:
            hint = await context.ask("teacher", CHAT)
        return await context.score(hint.text, turn.finish)

    play = Play(tries, Teacher(gone))
    assert isinstance(await play.run(), TrajectoryScored)
    assert [(answer.text, answer.number) for answer in play.answers] == [("t2", 0)], "the failure is not recorded"
    again = Play(tries, Teacher(RuntimeError("asked again")), play.answers)
    assert await again.run() == play.trajectory.pending[0], "a loop that runs again need not see the failure"


async def test_the_watchdog_waits_while_a_pool_answers() -> None:
    play = Play(asks_for_a_hint, Teacher(0.01))
    while not play.teacher.asked:
        await asyncio.sleep(0)
    assert play.trajectory._stalls_at == math.inf, "a pool may take any time"
    play.trajectory.cancel()


@pytest.mark.parametrize("end", ["return", "cancel"])
async def test_questions_that_a_loop_left_behind_end_with_it(end: str) -> None:
    async def leaves(context: Context) -> Score:
        LEFT.append(asyncio.create_task(context.ask("teacher", CHAT)))  # type: ignore[arg-type]
        turn = await context.generate(context.prompt.token_ids)
        if end == "cancel":
            await asyncio.sleep(1000)
        return await context.score("", turn.finish)

    LEFT.clear()
    play = Play(leaves, Teacher(1000.0))
    for _ in range(20):
        await asyncio.sleep(0)
    if end == "cancel":
        play.trajectory.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert play.teacher.cancelled == 1 and LEFT[0].cancelled() and not play.answers
    assert play.trajectory.finished == (end == "return")


async def test_after_the_end_of_its_trajectory_a_loop_asks_nothing() -> None:
    LEFT.clear()
    play = Play(asks_after_its_end)
    for _ in range(20):
        await asyncio.sleep(0)
    assert isinstance(LEFT[0].exception(), TrajectoryError) and not play.teacher.asked


async def test_the_answers_of_one_sample_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_questions, "MOST_BYTES", 3)
    result = await Play(asks_all_at_once).run()
    assert isinstance(result, TrajectoryFailed) and "have more than 3 characters" in result.reason


async def forks(context: Context) -> Score:
    """Ask for "<0>", then continue it in two branches and write "<1>" in each, one of them after an observation."""
    first = await context.generate(context.prompt.token_ids)
    tokens = context.prompt.token_ids + first.token_ids
    branch = context.branch()
    await context.generate(tokens + context.encode("x"))
    last = await branch.generate(tokens + context.encode("yz"))
    return await branch.score("", last.finish)


async def test_a_finished_sample_has_the_log_probabilities_of_pools_at_the_tokens_of_the_model() -> None:
    result = await Play(forks, roles={"teachers[0]": "teacher", "reference": "teacher"}).run()
    assert isinstance(result, TrajectoryScored)
    first = [-position - 0.10 for position in (3, 4, 5)] + [-position - 0.10 for position in (7, 8, 9)]
    second = [-position - 0.11 for position in (8, 9, 10)]  # its first turn is in the loss of the first sequence
    found = array("f", result.logprobs["teachers[0]"])
    assert list(found) == pytest.approx(first + second) and result.logprobs["reference"] == found.tobytes()


async def test_samples_of_evaluations_have_none() -> None:
    result = await Play(forks, roles={"teachers[0]": "teacher"}, split="heldOut").run()
    assert isinstance(result, TrajectoryScored) and result.logprobs == {}


async def test_a_pool_that_gives_no_log_probabilities_fails_the_sample() -> None:
    play = Play(forks, roles={"teachers[0]": "teacher"})

    async def refuse(token_ids: bytes) -> list[float]:
        raise TrajectoryError("pool teacher refused a question (HTTP 400: no)")

    play.teacher.logprobs = refuse  # type: ignore[method-assign]
    result = await play.run()
    assert isinstance(result, TrajectoryFailed) and result.reason == "pool teacher refused a question (HTTP 400: no)"
