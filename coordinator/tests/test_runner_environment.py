"""The runner's side of an environment: requests, tokens between answers, the loop `environment`."""

import asyncio
import functools
import json
import tempfile
from array import array
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.api.roles import Environment
from rljob.api.tasks import Seeds, Task
from rljob.protocol.contexts import context_digest
from rljob.protocol.episode_messages import MAX_REPLY_BYTES, Observation, OpenSession
from rljob.protocol.runner_protocol import (
    GenerateResult,
    LeaseTrajectory,
    TrajectoryFailed,
    TrajectoryScored,
    TurnTokens,
)
from rljob.protocol.turn_states import state_digest
from rljob.runner import environment_client
from rljob.runner.chat import ChatTemplate
from rljob.runner.context import TrajectoryError
from rljob.runner.conversation import Conversation
from rljob.runner.data.seed_rows import SeedRows
from rljob.runner.environment_client import EnvironmentClient
from rljob.runner.leased_episode import EnvironmentRuntime
from rljob.runner.leased_trajectory import LeasedTrajectory, TaskRuntime
from rljob.runner.loops.episode_loop import environment
from rljob.runner.prompts import Prompt, PromptMaker
from rljob.runner.service_http import service_session

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = ord("\x00")


class Letters:
    """A tokenizer whose tokens are letters; <end> is the stop token."""

    stop_token_ids = (END,)

    def encode(self, text: str, special: bool = True) -> bytes:
        return array("i", map(ord, text.replace("<end>", "\x00"))).tobytes()

    def decode(self, token_ids: bytes) -> str:
        return "".join(map(chr, array("i", token_ids))).replace("\x00", "")


def make_task(**changes) -> Task:
    fields = {
        "name": "maze",
        "data": {"seeds": {}},
        "loop": "environment",
        "environment": {"name": "maze", "maxTurns": 4, "observation": "\n[{observation}]"},
        "prompt": "go: {observation}",
        "sampling": {"maxTokens": 5},
    }
    return Task.model_validate(fields | changes)


# --- requests ---------------------------------------------------------------------------------------------------------


class FakeService:
    """Answers with the given replies in turn: an Observation, bytes, a status with text, or an exception."""

    def __init__(self) -> None:
        self.replies = []
        self.requests = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path, await request.text()))
        reply = self.replies.pop(0) if self.replies else {"step": 0, "observation": ""}
        if reply == "hang":
            await asyncio.sleep(60)
        if reply == "break":
            request.transport.close()
            return web.Response()
        if isinstance(reply, int):
            return web.Response(status=reply, text="why\n not")
        return web.Response(body=reply if isinstance(reply, bytes) else json.dumps(reply).encode())


@pytest.fixture
async def service(monkeypatch):
    monkeypatch.setattr(environment_client, "FIRST_BACKOFF_SECONDS", 0.001)
    fake, app = FakeService(), web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    async with TestServer(app) as server, service_session() as session:
        entry = Environment(name="maze", builtin="frozen_lake", timeout_seconds=10)
        fake.client = EnvironmentClient(entry, str(server.make_url("/")), session, "secret")
        yield fake
        await fake.client.close()


OPENING = OpenSession("a", 1, {})
FIRST = {"step": 0, "observation": "hi"}


@pytest.mark.parametrize("problems", [[503], [429, 429], ["break", "break"], [502, "break", 425]])
async def test_a_request_is_repeated_until_the_service_answers(service, problems):
    service.replies = [*problems, FIRST]
    assert await service.client.open(OPENING) == Observation(0, "hi")
    assert len(service.requests) == len(problems) + 1 and len(set(service.requests)) == 1


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (404, "environment maze: HTTP 404: why not"),
        (500, "environment maze: HTTP 500: why not"),
        (504, "environment maze: HTTP 504: why not"),
        (401, "requires a token"),
        (b"{", "answered something else than an observation"),
        (b'{"step": 0, "observation": "", "reward": NaN}', "answered something else than an observation"),
        ({"step": 1, "observation": ""}, "answered for step 1 instead of step 0"),
        ({"step": 0, "observation": "x" * (1 << 20 | 1)}, "answered an observation of 1,048,577 characters"),
        (b" " * (MAX_REPLY_BYTES + 1), "answered more than 8,388,608 bytes"),
        ({"step": 0, "observation": "", "reward": 1e999}, "something else than an observation"),
    ],
)
async def test_a_service_that_fails_or_answers_nonsense_fails_the_trajectory(service, reply, sentence):
    service.replies = [reply]
    with pytest.raises(TrajectoryError, match=sentence):
        await service.client.open(OPENING)
    assert len(service.requests) == 1


async def test_a_service_that_hangs_or_always_breaks_the_connection_fails_the_trajectory(service, monkeypatch):
    service.replies = ["break"] * 9
    with pytest.raises(TrajectoryError, match="broke the connection 5 times at step 3"):
        await service.client.step("a", 3, "go")
    service.replies = ["hang"]
    monkeypatch.setattr(service.client, "_limit", environment_client.aiohttp.ClientTimeout(total=0.05))
    with pytest.raises(TrajectoryError, match="did not answer within"):
        await service.client.step("a", 3, "go")


# --- tokens between answers -------------------------------------------------------------------------------------------


def chat_template(directory: Path, template: str) -> ChatTemplate:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ChatTemplate(directory)


@functools.cache
def chatml(joint: str) -> ChatTemplate:
    with tempfile.TemporaryDirectory() as directory:
        return chat_template(Path(directory), CHATML.replace("\n", joint))


CHAT = {"prompt": None, "messages": [{"role": "user", "content": "S {observation}"}]}


def test_a_plain_template_is_the_text_between_answers():
    conversation = Conversation(make_task(), Letters(), None, [END])
    assert Letters().decode(conversation.follow({"seed": 1}, "left", Letters().encode("a<end>"))) == "\n[left]"


@pytest.mark.parametrize(("answer", "first"), [("go<end>", "\n"), ("go", "\x00"), ("", "\x00")])
def test_a_chat_template_closes_the_answer_once(tmp_path, answer, first):
    conversation = Conversation(make_task(**CHAT), Letters(), chat_template(tmp_path, CHATML), [END])
    tokens = array("i", conversation.follow({"seed": 1}, "left", Letters().encode(answer)))
    assert "".join(map(chr, tokens)) == (first if first != "\n" else "") + "\n<user>\n[left]\x00\n<assistant>"


@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(st.tuples(st.text(max_size=6), st.booleans()), min_size=1, max_size=4),
    observation=st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8),
    joint=st.sampled_from(["\n", "", " \n"]),
)
def test_the_context_of_a_canonical_answer_is_the_whole_chat_rendered_at_once(answers, observation, joint):
    """Rendering the history again gives the same tokens, though no answer is ever rendered or encoded again."""
    chat = chatml(joint)
    task = make_task(**CHAT, environment={"name": "maze"})
    codec, said = Letters(), observation.replace("rljob", "")
    conversation = Conversation(task, codec, chat, [END])
    prompt = PromptMaker({"maze": task}, codec, chat).make("maze", {"seed": 1}, said)
    messages, tokens = [{"role": "user", "content": f"S {said}"}], prompt.token_ids
    for text, cut in answers:
        clean = text.encode(errors="replace").decode().replace("\x00", "").replace("<end>", "")
        answer = codec.encode(clean if cut else f"{clean}<end>")
        before = tokens + answer
        tokens = before + conversation.follow({"seed": 1}, said, answer)
        assert tokens.startswith(before)
        messages += [{"role": "assistant", "content": clean}, {"role": "user", "content": said}]
    assert tokens == codec.encode(chat.render(messages), special=False)


def test_a_template_that_changes_answers_is_refused(tmp_path):
    broken = CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')")
    conversation = Conversation(make_task(**CHAT), Letters(), chat_template(tmp_path, broken), [END])
    with pytest.raises(ValueError, match="does not write the content of an answer exactly once"):
        conversation.text({"seed": 1}, "left")


def test_seeds_of_the_splits_differ_and_repeat_after_train():
    rows = SeedRows(Seeds(train=3), 7)
    train = [rows.problem("train", row)["seed"] for row in range(6)]
    held_out = [rows.problem("heldOut", row)["seed"] for row in range(50)]
    assert train[:3] == train[3:] and len(set(train)) == 3 and len(set(held_out)) == 50
    assert {seed % 2 for seed in train} == {0} and {seed % 2 for seed in held_out} == {1}
    assert max(held_out) < 2**53 and (rows.size("train"), rows.size("heldOut")) == (3, None)
    assert SeedRows(Seeds(), 8).problem("train", 0)["seed"] != train[0]


# --- the loop ---------------------------------------------------------------------------------------------------------


class Maze:
    """A client whose environment needs three steps; the action `die` fails."""

    def __init__(self) -> None:
        self.openings, self.ended = [], []

    async def open(self, opening):
        self.openings.append(opening)
        return Observation(0, "start")

    async def step(self, session, number, action):
        if action == "die":
            raise TrajectoryError("environment maze: HTTP 404: there is no session")
        return Observation(
            number, f"at {number}", 0.5, number == 3, False, {"place": number}, {"valid": float(action != "bad")}
        )

    def end(self, session):
        self.ended.append(session)


class Prompts:
    async def prompt(self, task, split, row):
        return Prompt({"seed": row}, "", b"")


async def play(answers, turns=(), task=None, length=200):
    """Return the client, the sent messages, and the contexts of the turns of a trajectory with these answers."""
    task, codec, maze, sent = task or make_task(), Letters(), Maze(), asyncio.Queue()
    runtime = EnvironmentRuntime(
        task.environment, 5, maze, Conversation(task, codec, None, [END]), PromptMaker({"maze": task}, codec), 3
    )
    kit = TaskRuntime(task, environment, None, length, 1.0, 600.0, runtime)
    lease = LeaseTrajectory(sample="g0.0", task="maze", row=4, split="train", turns=list(turns))
    trajectory = LeasedTrajectory(lease, kit, Prompts(), codec, sent.put_nowait)
    contexts, pending, known = [], list(answers), b"".join(turn.given + turn.token_ids for turn in turns)
    while True:
        message = await sent.get()
        if isinstance(message, TrajectoryScored | TrajectoryFailed):
            return maze, message, contexts
        assert (4 * message.prefix_tokens, message.prefix) == (len(known), context_digest(known) if known else "")
        known += message.given
        contexts.append(codec.decode(known))
        text = pending.pop(0)
        finish, token_ids = "stop" if text.endswith("<end>") else "length", codec.encode(text)
        trajectory.receive(GenerateResult("g0.0", message.turn, token_ids, finish, context_digest(known)))
        known += token_ids


async def test_an_episode_becomes_one_sample_of_several_turns():
    maze, result, contexts = await play(["go<end>", "bad", "go<end>"])
    assert contexts == ["go: start", "go: startgo\n[at 1]", "go: startgo\n[at 1]bad\n[at 2]"]
    assert isinstance(result, TrajectoryScored)
    assert (result.reward, result.turn_rewards, result.turns, result.text) == (1.5, [0.5] * 3, 3, "go")
    assert result.metrics == {
        "valid": pytest.approx(2 / 3), "place": 3.0, "turns": 3.0, "terminated": 1.0, "truncated": 0.0,
        "turn_limit": 0.0, "context_limit": 0.0,
    }  # fmt: skip
    assert result.states == [state_digest(text) for text in ("start", "at 1", "at 2")]
    (opening,) = maze.openings
    assert opening.row == {"seed": 4} and maze.ended == [opening.session] and opening.session.startswith("g0.0-")


async def test_a_loop_that_runs_again_plays_the_episode_again_with_the_same_seed():
    first, result, contexts = await play(["a<end>", "b<end>", "c<end>"])
    codec = Letters()
    turns = [
        TurnTokens(i, codec.encode(given), codec.encode(f"{answer}<end>"), finish="stop")
        for i, (given, answer) in enumerate([("go: start", "a"), ("\n[at 1]", "b")])
    ]
    again, repeated, asked = await play(["c<end>"], turns)
    assert repeated == result and len(repeated.states) == 3 and asked == contexts[2:]
    assert again.openings[0].seed == first.openings[0].seed < 2**53
    assert again.openings[0].session != first.openings[0].session


async def test_the_turn_limit_ends_an_episode():
    task = make_task(environment={"name": "maze", "maxTurns": 2})
    _, result, contexts = await play(["a<end>", "b<end>"], task=task)
    assert (result.reward, result.metrics["turn_limit"], result.metrics["terminated"]) == (1.0, 1.0, 0.0)
    assert len(contexts) == 2


@pytest.mark.parametrize(("length", "turns"), [(25, 1), (26, 2), (34, 2), (35, 3)])
async def test_an_observation_that_leaves_no_room_for_an_answer_ends_the_episode(length, turns):
    """9 tokens of prompt and 5 of an answer, then 7 of an observation and room for 5: 26. Then 2 more, and 12: 35."""
    _, result, _ = await play(["abcd<end>", "b<end>", "c<end>"], length=length)
    assert (result.turns, result.metrics["context_limit"]) == (turns, float(turns < 3))


async def test_an_observation_that_leaves_no_room_may_fail_the_sample():
    task = make_task(environment={"name": "maze", "onContextLimit": "fail"})
    _, result, _ = await play(["abcd<end>"], task=task, length=18)
    assert isinstance(result, TrajectoryFailed) and "leaves no room for an answer" in result.reason


async def test_a_lost_session_fails_its_sample_with_the_reason_and_is_ended():
    maze, result, _ = await play(["a<end>", "die"])
    assert isinstance(result, TrajectoryFailed)
    assert result.reason == "environment maze: HTTP 404: there is no session" and len(maze.ended) == 1
