"""A runner against a fake coordinator and a fake reward service, over real connections."""

import asyncio
import contextvars
import math
import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import ClientSession, WSMsgType, web
from aiohttp.test_utils import TestServer

from rljob.api.roles import Reward
from rljob.api.tasks import Sampling, Task
from rljob.protocol import coordinator_link
from rljob.protocol.contexts import context_digest
from rljob.protocol.coordinator_link import RefusedError
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.runner_protocol import (
    AckTrajectories,
    Cancel,
    FromRunner,
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    RegisterRunner,
    ToRunner,
    TrajectoryFailed,
    TrajectoryScored,
    TurnTokens,
)
from rljob.protocol.score_messages import Score
from rljob.protocol.shared_messages import Reject
from rljob.runner import leased_trajectory
from rljob.runner.context import Context
from rljob.runner.driver import RunnerDriver
from rljob.runner.leased_trajectory import TaskRuntime
from rljob.runner.loops import Loop
from rljob.runner.loops.single_turn import single_turn
from rljob.runner.prompts import PromptCache, PromptMaker
from rljob.runner.scoring import RewardClient

MAX_MODEL_LENGTH = 32
MAX_TOKENS = 20


class FakeCoordinator:
    """Accepts connections and queues the received messages; the test sends messages with :meth:`send`."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.socket: web.WebSocketResponse | None = None
        self._decoder = frame_decoder(FromRunner)

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        self.socket = socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for frame in socket:
            if frame.type is WSMsgType.BINARY:
                for message in self._decoder.decode(frame.data):
                    self.received.put_nowait(message)
        return socket

    async def send(self, *messages: Any) -> None:
        assert self.socket is not None
        await self.socket.send_bytes(encode_frame(list(messages)))

    async def receive(self, kind: type) -> Any:
        message = await self.received.get()
        assert isinstance(message, kind), message
        return message

    async def hang_up(self) -> None:
        assert self.socket is not None
        await self.socket.close()


class FakeReward:
    """Rewards an answer with its length. ``gate`` blocks replies; ``error`` is the error of every sample."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.error = ""
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, request: web.Request) -> web.Response:
        items = (await request.json())["items"]
        self.items += items
        await self.gate.wait()
        scores = [
            {"sample": i["sample"], "reward": len(i["completion"]), "metrics": {"length": 1}, "error": self.error}
            for i in items
        ]
        return web.json_response({"scores": scores})


class Rows:
    def problem(self, split: str, row: int) -> dict[str, Any]:
        if row == 13:
            raise RuntimeError("no such problem")
        if row == 14:
            raise ValueError("the file was changed")
        if row in (15, 16):
            raise StopIteration if row == 15 else KeyboardInterrupt
        return {"question": "x" * row, "answer": split, "metadata": {}}

    def size(self, split: str) -> int | None:
        return 7 if split == "heldOut" else None


class Letters:
    """A tokenizer whose tokens are letters."""

    stop_token_ids = (0,)

    def encode(self, text: str, special: bool = True) -> bytes:
        return array("i", map(ord, text)).tobytes()

    def decode(self, token_ids: bytes) -> str:
        return "".join(map(chr, array("i", token_ids)))


class Stage:
    """The parts of a test."""

    def __init__(
        self,
        coordinator: FakeCoordinator,
        reward: FakeReward,
        serving: "asyncio.Task[None]",
        runtimes: dict[str, TaskRuntime],
        runner: RunnerDriver,
        client: RewardClient,
        prompts: PromptCache,
    ) -> None:
        self.prompts = prompts
        self.runner = runner
        self.client = client
        self.coordinator = coordinator
        self.reward = reward
        self.serving = serving
        self._runtimes = runtimes

    def use_sampling(self, sampling: dict[str, Any]) -> None:
        """Use ``sampling`` for trajectories that are leased from now on."""
        runtime = self._runtimes["sums"]
        task = runtime.task.model_copy(update={"sampling": Sampling.model_validate(sampling)})
        self._runtimes["sums"] = replace(runtime, task=task)

    def use(self, loop: Loop, **changes: float) -> None:
        """Use ``loop`` for trajectories that are leased from now on."""
        self._runtimes["sums"] = replace(self._runtimes["sums"], loop=loop, **changes)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(coordinator_link, "FIRST_BACKOFF_SECONDS", 0.001)
    coordinator, reward = FakeCoordinator(), FakeReward()
    app = web.Application()
    app.router.add_get("/v1/connect/runner", coordinator.connect)
    app.router.add_post("/v1/score", reward.score)
    task = Task.model_validate(
        {
            "name": "sums",
            "data": {"reasoningGym": {"dataset": "chain_sum"}},
            "prompt": "{question}=",
            "reward": "sums",
            "sampling": {"temperature": 0.5, "maxTokens": MAX_TOKENS},
        }
    )
    async with TestServer(app) as server, ClientSession() as session:
        url = str(server.make_url("/"))
        client = RewardClient(Reward(name="sums", builtin="reasoning_gym"), url, session)
        prompts = PromptCache({"sums": Rows()}, PromptMaker({"sums": task}, Letters()), 600.0)
        runtime = TaskRuntime(task, single_turn, client, MAX_MODEL_LENGTH, 0.25, stall_seconds=600.0)
        runtimes = {"sums": runtime}
        runner = RunnerDriver(
            "runner-1",
            lambda register: coordinator_link.CoordinatorLink(url, "runner", "secret", ToRunner, register),
            runtimes,
            prompts,
            Letters(),
            {"sums": 7},
        )
        serving = asyncio.create_task(runner.run())
        yield Stage(coordinator, reward, serving, runtimes, runner, client, prompts)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        runner.close()
        await client.close()
        prompts.close()


def lease(
    sample: str = "g0.0", row: int = 3, turns: list[TurnTokens] | None = None, split: str = "train"
) -> LeaseTrajectory:
    return LeaseTrajectory(sample=sample, task="sums", row=row, split=split, turns=turns or [])


def turn(given: str = "xxx=", text: str = "hello", finish: str = "stop", number: int = 0) -> TurnTokens:
    return TurnTokens(turn=number, given=Letters().encode(given), token_ids=Letters().encode(text), finish=finish)


def sequence(turns: Sequence[TurnTokens]) -> bytes:
    return b"".join(turn.given + turn.token_ids for turn in turns)


def answer(turn: TurnTokens, sample: str = "g0.0", before: Sequence[TurnTokens] = ()) -> GenerateResult:
    """Return the answer to the request of a turn after the turns ``before``."""
    context = context_digest(sequence(before) + turn.given)
    return GenerateResult(sample, turn.turn, turn.token_ids, turn.finish, context)


async def test_a_leased_trajectory_is_generated_and_scored(stage: Stage) -> None:
    coordinator = stage.coordinator
    registration = await coordinator.receive(RegisterRunner)
    assert registration.driving == {} and registration.capacity > 0 and registration.held_out == {"sums": 7}
    await coordinator.send(lease())
    need = await coordinator.receive(GenerateRequest)
    assert need == GenerateRequest(
        sample="g0.0",
        turn=0,
        given=Letters().encode("xxx="),
        max_tokens=MAX_TOKENS,
        temperature=0.5,
        stop_token_ids=[0],
    )
    await coordinator.send(answer(turn(finish="length")))
    assert await coordinator.receive(TrajectoryScored) == TrajectoryScored("g0.0", 5.0, {"length": 1.0}, "hello", 1)
    assert stage.reward.items == [
        {
            "sample": "g0.0",
            "task": "sums",
            "prompt": "xxx=",
            "completion": "hello",
            "finish": "length",
            "problem": {"question": "xxx", "answer": "train", "metadata": {}},
            "turns": [],
            "response_tokens": 5,
            "metadata": {"split": "train", "row": 3, "attempt": 0, "maxTokens": MAX_TOKENS},
            "response_token_ids": None,
        }
    ]


async def test_a_reward_with_token_ids_gets_those_of_the_last_answer(stage: Stage) -> None:
    stage.client.token_ids = True
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease())
    await stage.coordinator.receive(GenerateRequest)
    await stage.coordinator.send(answer(turn("xxx=", "hello")))
    await stage.coordinator.receive(TrajectoryScored)
    assert stage.reward.items[0]["response_token_ids"] == [ord(letter) for letter in "hello"]


@pytest.mark.parametrize(("include", "text"), [(False, "hel"), (True, "hello")])
async def test_a_stop_string_ends_the_text_for_the_reward_but_not_the_tokens(
    stage: Stage, include: bool, text: str
) -> None:
    sampling = {"maxTokens": MAX_TOKENS, "minTokens": 2, "stop": ["l", "lo"], "includeStop": include}
    stage.use_sampling(sampling)
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease())
    need = await stage.coordinator.receive(GenerateRequest)
    assert (need.stop, need.min_tokens) == (["l", "lo"], 2)
    await stage.coordinator.send(answer(turn("xxx=", "hello")))
    assert (await stage.coordinator.receive(TrajectoryScored)).text == text
    assert (stage.reward.items[0]["completion"], stage.reward.items[0]["response_tokens"]) == (text, 5)


async def test_a_held_out_problem_is_generated_at_the_evaluation_temperature(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease("e20.3.0", split="heldOut"))
    assert (await stage.coordinator.receive(GenerateRequest)).temperature == 0.25
    await stage.coordinator.send(answer(turn(), "e20.3.0"))
    await stage.coordinator.receive(TrajectoryScored)
    assert stage.reward.items[0]["problem"]["answer"] == "heldOut"


async def test_a_long_prompt_leaves_less_room_for_the_answer(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(row=21))
    assert (await stage.coordinator.receive(GenerateRequest)).max_tokens == MAX_MODEL_LENGTH - 22


async def test_a_prompt_that_leaves_no_room_fails_its_trajectory(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(row=31))
    assert "maxModelLength" in (await stage.coordinator.receive(TrajectoryFailed)).reason


async def test_turns_of_an_earlier_lease_are_not_generated_again(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(turns=[turn()]))
    assert (await stage.coordinator.receive(TrajectoryScored)).text == "hello"


async def test_a_turn_of_another_context_fails_its_trajectory(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(turns=[turn(given="yyy=")]))
    assert "another context" in (await stage.coordinator.receive(TrajectoryFailed)).reason


async def test_a_repeated_lease_changes_nothing_and_repeats_a_result(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease(), lease())
    await coordinator.receive(GenerateRequest)
    await coordinator.send(lease(), answer(turn()), answer(turn()))
    first = await coordinator.receive(TrajectoryScored)
    await coordinator.send(lease())
    assert await coordinator.receive(TrajectoryScored) == first
    assert len(stage.reward.items) == 1


async def test_a_repeated_lease_with_the_turn_answers_the_pending_request(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease())
    await stage.coordinator.receive(GenerateRequest)
    await stage.coordinator.send(lease(turns=[turn()]))
    await stage.coordinator.receive(TrajectoryScored)


async def test_unacknowledged_messages_are_sent_again_after_a_reconnect(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease("g0.0", turns=[turn()]))
    scored = await coordinator.receive(TrajectoryScored)
    await coordinator.send(lease("g0.1"))
    need = await coordinator.receive(GenerateRequest)
    await coordinator.send(lease("g0.2", row=31))
    failed = await coordinator.receive(TrajectoryFailed)
    await coordinator.hang_up()
    assert (await coordinator.receive(RegisterRunner)).driving.keys() == {"g0.0", "g0.1", "g0.2"}
    assert [await coordinator.receive(object) for _ in range(3)] == [scored, need, failed]


async def test_a_result_made_while_disconnected_is_sent_after_the_reconnect(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    stage.reward.gate.clear()
    await coordinator.send(lease(turns=[turn()]))
    await until(lambda: len(stage.reward.items) == 1)
    await coordinator.hang_up()
    stage.reward.gate.set()
    assert (await coordinator.receive(RegisterRunner)).driving == {"g0.0": 0}
    assert (await coordinator.receive(TrajectoryScored)).sample == "g0.0"


async def test_an_acknowledged_result_is_forgotten(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease("g0.0", turns=[turn()]))
    await coordinator.receive(TrajectoryScored)
    await coordinator.send(AckTrajectories(["g0.0", "g7.7"]), lease("g0.1"))
    await coordinator.receive(GenerateRequest)
    await coordinator.hang_up()
    assert (await coordinator.receive(RegisterRunner)).driving == {"g0.1": 0}


async def test_a_cancelled_trajectory_is_dropped_in_every_state(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease("g0.0"))
    await coordinator.receive(GenerateRequest)
    stage.reward.gate.clear()
    await coordinator.send(lease("g0.1", turns=[turn()]))
    await until(lambda: len(stage.reward.items) == 1)
    await coordinator.send(Cancel(["g0.0", "g0.1", "g7.7"]), answer(turn()), lease("g0.2"))
    stage.reward.gate.set()
    assert (await coordinator.receive(GenerateRequest)).sample == "g0.2"
    await coordinator.hang_up()
    assert (await coordinator.receive(RegisterRunner)).driving == {"g0.2": 0}


async def test_a_sample_that_cannot_be_scored_fails_and_the_next_is_scored(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    stage.reward.error = "took too long"
    await coordinator.send(lease("g0.0", turns=[turn()]))
    assert await coordinator.receive(TrajectoryFailed) == TrajectoryFailed("g0.0", "took too long")
    stage.reward.error = ""
    await coordinator.send(lease("g0.1", turns=[turn()]))
    await coordinator.receive(TrajectoryScored)


async def test_a_problem_that_cannot_be_made_fails_its_trajectory(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(row=13))
    assert (await stage.coordinator.receive(TrajectoryFailed)).reason == "RuntimeError: no such problem"


async def test_the_error_of_a_row_is_the_reason_of_its_failed_trajectory(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(row=14))
    assert (await stage.coordinator.receive(TrajectoryFailed)).reason == "the file was changed"


async def test_an_unknown_task_fails_its_trajectory(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(msgspec.structs.replace(lease(), task="poems"))
    assert "no task poems" in (await stage.coordinator.receive(TrajectoryFailed)).reason


async def test_a_fatal_refusal_ends_the_runner(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(Reject("no such run", fatal=True))
    with pytest.raises(RefusedError, match="no such run"):
        await stage.serving


async def test_the_displayed_text_is_truncated(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(turns=[turn(text="y" * 5000)]))
    scored = await stage.coordinator.receive(TrajectoryScored)
    assert (len(scored.text), scored.reward) == (4096, 5000)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


# --- the process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Writes a job and returns the environment of its runner."""

    def write(dataset: str = "chain_sum") -> dict[str, str]:
        spec = {
            "models": [{"name": "policy", "source": "job://model"}],
            "training": {"steps": 1},
            "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": dataset}}, "reward": "sums"}],
            "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
            "rollouts": [{"name": "main"}],
        }
        job = tmp_path / "job.json"
        job.write_bytes(msgspec.json.encode({"metadata": {"name": "test"}, "spec": spec}))
        return os.environ | {
            "RLJOB_JOB": str(job),
            "RLJOB_STORAGE": str(tmp_path),
            "RLJOB_REWARD_URLS": '{"sums": "http://127.0.0.1:9"}',
            "RLJOB_TOKEN": "secret",
            "PYTHONWARNINGS": "ignore",
        }

    return write


async def start(environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rljob.runner.main", env=environment, stderr=asyncio.subprocess.PIPE
    )


async def test_an_invalid_manifest_ends_the_process_with_2_and_a_message(
    manifest: Callable[..., dict[str, str]],
) -> None:
    process = await start(manifest(dataset="chain_sums"))
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"did you mean 'chain_sum'?" in errors and b"Traceback" not in errors


async def test_the_process_registers_and_stops_on_sigterm(
    manifest: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, decoders, models

    (tmp_path / "model").mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(map(chr, range(32, 127)))}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 0}')
    coordinator = FakeCoordinator()
    app = web.Application()
    app.router.add_get("/v1/connect/runner", coordinator.connect)
    async with TestServer(app) as server:
        process = await start(manifest() | {"RLJOB_COORDINATOR": str(server.make_url("/"))})
        await coordinator.receive(RegisterRunner)
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0


async def test_another_lease_replaces_the_previous_lease(stage: Stage) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease(turns=[turn()]))
    assert (await coordinator.receive(TrajectoryScored)).attempt == 0
    await coordinator.send(msgspec.structs.replace(lease(), attempt=2, lease=1))
    assert (await coordinator.receive(GenerateRequest)).attempt == 2
    await coordinator.send(answer(turn(text="hi")))
    scored = await coordinator.receive(TrajectoryScored)
    assert (scored.attempt, scored.reward) == (2, 2.0)


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_loop_that_hangs_fails_its_sample(stage: Stage, stubborn: bool) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)

    async def hang(context: Context) -> Score:
        await context.generate(context.prompt.token_ids)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not stubborn:
                raise
        return await context.score("late", "stop")

    stage.use(hang, stall_seconds=0.01)
    await coordinator.send(lease())
    await coordinator.receive(GenerateRequest)
    trajectory = stage.runner._trajectories["g0.0"]
    assert trajectory._stalls_at == math.inf, "an engine may take any time"
    await asyncio.sleep(0.02)  # the timer of the time before the request ends, and nothing happens
    assert trajectory._watchdog is None and not trajectory.finished
    await coordinator.send(answer(turn()))
    failed = await coordinator.receive(TrajectoryFailed)
    assert failed.reason == "its loop made no call for 0.01 s; raise failurePolicy.stallSeconds, or correct the loop"
    await coordinator.send(AckTrajectories(["g0.0"]), lease("g0.1"))
    assert (await coordinator.receive(GenerateRequest)).sample == "g0.1"


# --- loops of several turns ---


async def three_turns(context: Context) -> Score:
    """Generate three turns, the second one after an observation; the first turn has a reward."""
    tokens = context.prompt.token_ids
    for number in range(3):
        turn = await context.generate(tokens)
        tokens += turn.token_ids
        if number == 0:
            context.reward(0.25)
            tokens += context.encode("no;")
    return await context.score(context.decode(turn.token_ids), turn.finish)


TURNS = [
    turn(),
    turn("no;", "again", number=1),
    turn("", "ok", "length", number=2),
]


async def test_each_request_of_a_loop_of_three_turns_has_what_it_adds_to_its_context(stage: Stage) -> None:
    coordinator = stage.coordinator
    stage.use(three_turns)
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease())
    for each in TURNS:
        need = await coordinator.receive(GenerateRequest)
        before = sequence(TURNS[: each.turn])
        assert (need.turn, need.given) == (each.turn, each.given)
        assert (need.prefix_tokens, need.prefix) == (len(before) // 4, context_digest(before) if before else "")
        assert need.max_tokens == min(MAX_TOKENS, MAX_MODEL_LENGTH - len(before + each.given) // 4)
        await coordinator.send(answer(each, before=TURNS[: each.turn]))
    scored = await coordinator.receive(TrajectoryScored)
    assert (scored.reward, scored.turn_rewards, scored.text) == (2.25, [0.25, 0.0, 2.0], "ok")
    (item,) = stage.reward.items
    assert (item["prompt"], item["completion"], item["finish"]) == ("xxx=", "ok", "length")
    assert item["turns"] == [
        {"kind": "model", "text": "hello"},
        {"kind": "observation", "text": "no;"},
        {"kind": "model", "text": "again"},
        {"kind": "model", "text": "ok"},
    ]


@pytest.mark.parametrize("known", [1, 2, 3])
async def test_a_second_runner_generates_only_the_missing_turns(stage: Stage, known: int) -> None:
    coordinator = stage.coordinator
    stage.use(three_turns)
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease(turns=TURNS[:known]))
    for each in TURNS[known:]:
        assert (await coordinator.receive(GenerateRequest)).turn == each.turn
        await coordinator.send(answer(each, before=TURNS[: each.turn]))
    scored = await coordinator.receive(TrajectoryScored)
    assert (scored.reward, scored.turn_rewards) == (2.25, [0.25, 0.0, 2.0])


async def test_a_request_for_a_later_turn_is_repeated_after_a_break(stage: Stage) -> None:
    coordinator = stage.coordinator
    stage.use(three_turns)
    await coordinator.receive(RegisterRunner)
    await coordinator.send(lease(turns=TURNS[:1]))
    need = await coordinator.receive(GenerateRequest)
    await coordinator.hang_up()
    await coordinator.receive(RegisterRunner)
    assert await coordinator.receive(GenerateRequest) == need
    await coordinator.send(answer(TURNS[0]), answer(TURNS[1], before=TURNS[:1]))
    assert (await coordinator.receive(GenerateRequest)).turn == 2


async def forgets_its_answer(context: Context) -> Score:
    first = await context.generate(context.prompt.token_ids)
    text = context.decode(first.token_ids).upper()  # encoding the model's text again gives other tokens
    await context.generate(context.prompt.token_ids + context.encode(text))
    raise AssertionError("this is not reached")


async def changes_its_mind(context: Context) -> Score:
    first = await context.generate(context.prompt.token_ids)
    await context.generate(context.prompt.token_ids + first.token_ids + context.encode("yes;"))
    raise AssertionError("this is not reached")


async def asks_twice_at_a_time(context: Context) -> Score:
    await asyncio.gather(*(context.generate(context.prompt.token_ids) for _ in range(2)))
    raise AssertionError("this is not reached")


async def never_asks(context: Context) -> Score:
    return Score(context.sample, 1.0)


async def rewards_too_early(context: Context) -> Score:
    context.reward(1.0)
    raise AssertionError("this is not reached")


async def rewards_nothing(context: Context) -> Score:
    await context.generate(context.prompt.token_ids)
    context.reward(float("nan"))
    raise AssertionError("this is not reached")


async def rewards_a_turn_too_many(context: Context) -> Score:
    await context.generate(context.prompt.token_ids)
    return Score(context.sample, 1.0, turn_rewards=[0.5, 0.5])


async def returns_no_score(context: Context) -> Any:
    await context.generate(context.prompt.token_ids)
    return 1.0


def returns(**fields: Any) -> Loop:
    """Return a loop of one turn whose score has ``fields``."""

    async def loop(context: Context) -> Score:
        await context.generate(context.prompt.token_ids)
        return Score(**{"sample": context.sample, "reward": 1.0, **fields})

    return loop


async def scores_token_ids(context: Context) -> Score:
    turn = await context.generate(context.prompt.token_ids)
    return await context.score(turn.token_ids, turn.finish)  # type: ignore[arg-type]


async def raises_half_a_character(context: Context) -> Score:
    raise ValueError("\ud83d")


async def cancels_itself(context: Context) -> Score:
    await context.generate(context.prompt.token_ids)
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    await asyncio.sleep(3600)
    raise AssertionError("this is not reached")


async def exits(context: Context) -> Score:
    sys.exit("enough")


def exits_in_a_task(error: BaseException) -> Loop:
    """Return a loop that starts a task, which raises ``error``: the parser of a tool's arguments calls sys.exit."""

    async def tool() -> None:
        raise error

    async def loop(context: Context) -> Score:
        await context.generate(context.prompt.token_ids)
        await asyncio.gather(tool())
        raise AssertionError("this is not reached")

    return loop


async def exits_in_an_empty_context(context: Context) -> Score:
    """In a task of a task: the second one inherits a context that the loop made."""

    async def tool() -> None:
        raise SystemExit(2)

    async def starts_the_tool() -> None:
        await asyncio.create_task(tool())

    await context.generate(context.prompt.token_ids)
    await asyncio.create_task(starts_the_tool(), context=contextvars.Context())
    raise AssertionError("this is not reached")


class OddError(BaseException):
    """An exception that is no Exception."""


class SilentError(BaseException):
    """An exception without a text."""

    def __str__(self) -> str:
        raise OddError


ODD = [
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (SystemExit(3), "SystemExit: 3"),
    (GeneratorExit("end"), "GeneratorExit: end"),
    (OddError("odd"), "OddError: odd"),
    (SilentError(), "SilentError"),
    (BaseExceptionGroup("all", [OddError()]), "BaseExceptionGroup: all (1 sub-exception)"),
]


def raises(error: BaseException) -> Loop:
    """Return a loop that raises ``error`` after its first turn."""

    async def loop(context: Context) -> Score:
        await context.generate(context.prompt.token_ids)
        raise error

    return loop


async def awaits_what_was_cancelled(context: Context) -> Score:
    work = asyncio.create_task(asyncio.sleep(3600))
    work.cancel()
    await work
    raise AssertionError("this is not reached")


async def leaves_while_a_turn_is_generated(context: Context) -> Score:
    work = asyncio.create_task(context.generate(context.prompt.token_ids))
    await asyncio.sleep(0)
    work.cancel()
    return Score(context.sample, 1.0)


async def gives_tokens_as_a_list(context: Context) -> Score:
    await context.generate([1, 2])  # type: ignore[arg-type]
    raise AssertionError("this is not reached")


@pytest.mark.parametrize(
    ("loop", "turns", "reason"),
    [
        (forgets_its_answer, TURNS[:1], "turn 1 does not start with the context and the answer of turn 0"),
        (changes_its_mind, TURNS[:2], "turn 1 was generated from another context"),
        (asks_twice_at_a_time, [], "asks for another turn while turn 0 is generated"),
        (never_asks, [], "no turn was generated"),
        (rewards_too_early, [], "before the first turn"),
        (rewards_nothing, TURNS[:1], "turn 0 the reward nan"),
        (rewards_a_turn_too_many, TURNS[:1], "rewards of 2 turns, but 1 turns"),
        (single_turn, TURNS[:2], "made 1 turns now and 2 before"),
        (returns_no_score, TURNS[:1], "returned float, not a Score"),
        (returns(metrics={"length": float("nan")}), TURNS[:1], "the metric length of its score is nan"),
        (returns(metrics={"length": None}), TURNS[:1], "TypeError"),
        (returns(metrics={"\ud83d": 1.0}), TURNS[:1], "cannot be sent"),
        (returns(reward=None), TURNS[:1], "TypeError"),
        (scores_token_ids, TURNS[:1], "a completion of type bytes to score, not text"),
        (raises_half_a_character, [], "ValueError: ?"),
        (cancels_itself, TURNS[:1], "the loop was cancelled"),
        (exits, [], "SystemExit: enough"),
        *((raises(error), TURNS[:1], reason) for error, reason in ODD),
        (exits_in_a_task(SystemExit(2)), TURNS[:1], "a task of its loop raised SystemExit: 2"),
        (exits_in_an_empty_context, TURNS[:1], "a task of its loop raised SystemExit: 2"),
        (exits_in_a_task(KeyboardInterrupt()), TURNS[:1], "a task of its loop raised KeyboardInterrupt"),
        (exits_in_a_task(OddError("odd")), TURNS[:1], "OddError: odd"),
        (raises(asyncio.CancelledError()), TURNS[:1], "the loop was cancelled"),
        (raises(ValueError("x" * 5000)), TURNS[:1], f"ValueError: {'x' * 4083}…"),
        (awaits_what_was_cancelled, [], "awaited a task that was cancelled"),
        (leaves_while_a_turn_is_generated, [], "returned while turn 0 was generated"),
        (gives_tokens_as_a_list, [], "not the bytes of"),
    ],
)
async def test_an_error_of_a_loop_fails_its_sample_and_no_other(
    stage: Stage, loop: Loop, turns: list[TurnTokens], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_trajectory.log, "disabled", True)  # xdist cannot send a log with half a character
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    stage.use(loop)
    await coordinator.send(lease("g0.0", turns=turns))
    while isinstance(failed := await coordinator.received.get(), GenerateRequest):
        pass
    assert isinstance(failed, TrajectoryFailed) and failed.sample == "g0.0" and reason in failed.reason
    stage.use(single_turn)
    await coordinator.send(lease("g0.1", turns=[turn()]))
    assert (await coordinator.receive(TrajectoryScored)).sample == "g0.1"


@pytest.mark.parametrize("error", [*(error for error, _ in ODD), ValueError("late")], ids=lambda e: type(e).__name__)
async def test_a_cancelled_lease_ends_silently_whatever_its_loop_raises_then(
    stage: Stage, error: BaseException
) -> None:
    raised = asyncio.Event()

    async def loop(context: Context) -> Score:
        try:
            await context.generate(context.prompt.token_ids)
        finally:
            raised.set()
            raise error
        raise AssertionError("this is not reached")

    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    stage.use(loop)
    await coordinator.send(lease("g0.0"))
    await coordinator.receive(GenerateRequest)
    await coordinator.send(Cancel(["g0.0"]))
    await raised.wait()
    stage.use(single_turn)
    await coordinator.send(lease("g0.1", turns=[turn()]))
    assert (await coordinator.receive(TrajectoryScored)).sample == "g0.1"


async def test_a_task_that_is_destroyed_with_its_event_loop_fails_nothing(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease("g0.0"))
    await stage.coordinator.receive(GenerateRequest)
    trajectory = stage.runner._trajectories["g0.0"]
    trajectory._task.get_coro().close()
    assert not trajectory.finished


@pytest.mark.parametrize(("row", "reason"), [(15, "StopIteration"), (16, "KeyboardInterrupt")])
async def test_whatever_a_source_raises_fails_its_trajectory_and_is_not_kept(
    stage: Stage, row: int, reason: str
) -> None:
    await stage.coordinator.receive(RegisterRunner)
    for sample in ("g0.0", "g0.1"):
        await stage.coordinator.send(lease(sample, row=row))
        assert reason in (await stage.coordinator.receive(TrajectoryFailed)).reason
    assert not stage.prompts._kept


class Plain(str):
    """A text that msgpack does not encode as it is."""


def generates(**arguments: Any) -> Loop:
    """Return a loop that asks for a turn with ``arguments`` beside its context."""

    async def loop(context: Context) -> Score:
        turn = await context.generate(**{"token_ids": context.prompt.token_ids, **arguments})
        return Score(context.sample, float(len(turn.token_ids)))

    return loop


COUNT, TEXTS = "; give a whole number of at least 1", " in stop; give texts of 1 to 128 characters"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_tokens": 16 / 2}, f"with max_tokens 8.0{COUNT}"),
        ({"max_tokens": True}, f"with max_tokens True{COUNT}"),
        ({"max_tokens": 0}, f"with max_tokens 0{COUNT}"),
        ({"max_tokens": -5}, f"with max_tokens -5{COUNT}"),
        ({"max_tokens": "7\n"}, f"with max_tokens '7\\n'{COUNT}"),
        ({"stop": "END"}, "with stop 'END'; give a list of texts"),
        ({"stop": ""}, "with stop ''; give a list of texts"),
        ({"stop": 5}, "with stop 5; give a list of texts"),
        ({"stop": b"x"}, "with stop b'x'; give a list of texts"),
        ({"stop": None}, "with stop None; give a list of texts"),
        ({"stop": [b"x"]}, f"with b'x'{TEXTS}"),
        ({"stop": ["x", None]}, f"with None{TEXTS}"),
        ({"stop": [1]}, f"with 1{TEXTS}"),
        ({"stop": [""]}, f"with ''{TEXTS}"),
        ({"stop": ["x" * 129]}, f"with '{'x' * 98}…{TEXTS}"),
        ({"stop": ["\ud800"]}, f"with '\\ud800'{TEXTS}"),
        ({"stop": ["x"] * 17}, "with 17 strings in stop; give at most 16"),
    ],
)
async def test_a_wrong_argument_fails_its_sample_and_nothing_is_sent(
    stage: Stage, arguments: dict[str, Any], reason: str
) -> None:
    coordinator = stage.coordinator
    await coordinator.receive(RegisterRunner)
    stage.use(generates(**arguments))
    await coordinator.send(lease("g0.0"))
    failed = await coordinator.receive(TrajectoryFailed)
    assert (failed.sample, failed.reason) == ("g0.0", f"the loop asks for turn 0 {reason}")
    stage.use(single_turn)
    await coordinator.send(lease("g0.1", turns=[turn()]))
    assert (await coordinator.receive(TrajectoryScored)).sample == "g0.1"


@pytest.mark.parametrize("token_ids", [[1, 2], "abcd", bytearray(8), array("i", [1, 2]), None, b"", b"abc"])
async def test_token_ids_of_a_wrong_type_fail_their_sample(stage: Stage, token_ids: Any) -> None:
    await stage.coordinator.receive(RegisterRunner)
    stage.use(generates(token_ids=token_ids))
    await stage.coordinator.send(lease("g0.0"))
    failed = await stage.coordinator.receive(TrajectoryFailed)
    assert failed.reason == "the context of turn 0 is not the bytes of at least one int32 token id"


async def test_a_wrong_argument_also_fails_a_turn_that_was_generated_before(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    stage.use(generates(max_tokens=0))
    await stage.coordinator.send(lease("g0.0", turns=[turn()]))
    assert "max_tokens 0" in (await stage.coordinator.receive(TrajectoryFailed)).reason


async def test_arguments_of_derived_types_are_sent_as_plain_values(stage: Stage) -> None:
    await stage.coordinator.receive(RegisterRunner)
    stage.use(generates(max_tokens=signal.SIGQUIT, stop=(Plain("END"),)))
    await stage.coordinator.send(lease("g0.0"))
    request = await stage.coordinator.receive(GenerateRequest)
    assert (request.max_tokens, request.stop) == (3, ["END"])


@pytest.mark.parametrize("own", [[], [-0.4, 0.4]])
async def test_the_reward_that_a_loop_returns_is_sent_unchanged(stage: Stage, own: list[float]) -> None:
    async def two_turns(context: Context) -> Score:
        first = await context.generate(context.prompt.token_ids)
        await context.generate(context.prompt.token_ids + first.token_ids + context.encode("no;"))
        for value in own:
            context.reward(value)
        return Score(context.sample, 1.0, turn_rewards=[-0.4])

    stage.use(two_turns)
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(turns=TURNS[:2]))
    scored = await stage.coordinator.receive(TrajectoryScored)
    assert scored.reward == 1.0 and scored.turn_rewards[0] == -0.4


async def test_numbers_of_numpy_are_sent_and_the_last_answer_is_the_text(stage: Stage) -> None:
    numbers = {"reward": np.float32(0.5), "metrics": {"length": np.int64(3)}, "turn_rewards": [np.float32(0.5)]}
    stage.use(returns(**numbers))
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease(turns=TURNS[:1]))
    scored = await stage.coordinator.receive(TrajectoryScored)
    assert (scored.reward, scored.metrics, scored.text) == (0.5, {"length": 3.0}, "hello")


async def test_a_loop_reads_its_remaining_room_and_may_end_early(stage: Stage) -> None:
    rooms = []

    async def until_full(context: Context) -> Score:
        rooms.append(context.room)
        tokens = context.prompt.token_ids
        while context.room >= 6:
            answer = await context.generate(tokens)
            tokens += answer.token_ids + context.encode("!")
            rooms.append(context.room)
        return Score(context.sample, 0.5, turn_rewards=[0.25])

    stage.use(until_full)
    await stage.coordinator.receive(RegisterRunner)
    await stage.coordinator.send(lease())
    turns: list[TurnTokens] = []
    for number in range(4):
        need = await stage.coordinator.receive(GenerateRequest)
        assert need.max_tokens == min(MAX_TOKENS, MAX_MODEL_LENGTH - need.prefix_tokens - len(need.given) // 4)
        result = TurnTokens(number, need.given, Letters().encode("sixsix"), "stop")
        await stage.coordinator.send(answer(result, before=turns))
        turns.append(result)
    scored = await stage.coordinator.receive(TrajectoryScored)
    assert rooms == [28, 22, 15, 8, 1]
    assert (scored.reward, scored.turn_rewards) == (0.5, [0.25, 0.0, 0.0, 0.25])
