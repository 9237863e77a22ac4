"""The endpoint for agent programs, with OpenAI's client: calls become turns, or are refused with one sentence."""

import asyncio
import fcntl
import json
import sys
import tempfile
from array import array
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
import uvloop

from rljob.api.tasks import Task, TaskAgent
from rljob.protocol.branches import before
from rljob.protocol.contexts import context_digest
from rljob.protocol.runner_protocol import (
    GenerateResult,
    LeaseTrajectory,
    PoolAnswered,
    TrajectoryFailed,
    TrajectoryScored,
)
from rljob.protocol.score_messages import Score
from rljob.runner.agents import agent_endpoint
from rljob.runner.agents.agent_command import AgentCommand
from rljob.runner.agents.agent_endpoint import AgentEndpoint
from rljob.runner.agents.agent_program import AgentFunction, load_program
from rljob.runner.agents.leased_agent import AgentRuntime
from rljob.runner.chat import ChatTemplate
from rljob.runner.context import TrajectoryError
from rljob.runner.leased_trajectory import LeasedTrajectory, TaskRuntime
from rljob.runner.loops.agent_loop import agent
from rljob.runner.pools.leased_questions import PoolRuntime
from rljob.runner.pools.question import Question
from rljob.runner.prompts import Prompt

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 0
ASK = [{"role": "user", "content": "hi"}]


class Letters:
    """A tokenizer whose tokens are letters; <end> is the stop token."""

    stop_token_ids = (END,)

    def encode(self, text: str, special: bool = True) -> bytes:
        return array("i", map(ord, text.replace("<end>", "\x00"))).tobytes()

    def decode(self, token_ids: bytes) -> str:
        return "".join(map(chr, array("i", token_ids))).replace("\x00", "")


class Prompts:
    async def prompt(self, task, split, row):
        return Prompt({"question": "hi", "seed": row}, "", b"")


class LengthReward:
    """Rewards a text with its length."""

    token_ids = False

    def __init__(self) -> None:
        self.items = []

    async def score(self, item):
        self.items.append(item)
        return Score(item.sample, float(len(item.completion)))


def make_template() -> ChatTemplate:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "chat_template.jinja").write_text(CHATML)
        return ChatTemplate(Path(folder))


class Stage:
    """Runs programs against an endpoint; the engine writes ``answers`` in turn, each with ``gate`` open."""

    def __init__(self, endpoint) -> None:
        self.endpoint, self.codec, self.chat = endpoint, Letters(), make_template()
        self.reward = LengthReward()
        self.requests, self.asked = [], []  # and their contexts as token ids
        self.questions = []  # to the pool
        self.gate = asyncio.Event()
        self.gate.set()
        self.trajectory = None

    @property
    def contexts(self):
        """The contexts of the turns, as text."""
        return ["".join(map(chr, array("i", context))).replace("\x00", "<end>") for context in self.asked]

    def start(self, program, length=500, scored=True, sampling=None, pools=()):
        """Start a trajectory; return the queue of its messages."""
        fields = {"name": "chat", "data": {"seeds": {}}, "loop": "agent", "agent": {"function": "mine:solve"}}
        task = Task.model_validate(
            fields | {"reward": "r" if scored else None, "sampling": sampling or {"maxTokens": 20}}
        )
        if not isinstance(program, AgentFunction | AgentCommand):
            program = AgentFunction(program, ("base_url", "api_key", "row", "seed"))
        runtime = AgentRuntime(program, self.endpoint, self.chat, self.codec, [END], length, task.scored, 3)
        frozen = PoolRuntime(dict.fromkeys(pools, self), ["main"])
        kit = TaskRuntime(task, agent, self.reward if scored else None, length, 1.0, 600.0, None, runtime, frozen)
        lease = LeaseTrajectory(sample="g0.0", task="chat", row=4, split="train", turns=[], attempt=2, lease=7)
        sent = asyncio.Queue()
        self.trajectory = LeasedTrajectory(lease, kit, Prompts(), self.codec, sent.put_nowait)
        return sent

    async def answer(self, question, seed, seconds):
        """Answer as the pool ``teacher``."""
        self.questions.append(question)
        if question.content[0]["content"] == "refuse":
            raise TrajectoryError("pool teacher refused the question of the loop (HTTP 400: no)")
        return f"hint {len(self.questions)}", "length"

    async def play(self, program, answers, **options):
        """Return the result of a trajectory."""
        sent, pending, known = self.start(program, **options), list(answers), {None: b""}  # turn → all tokens after it
        while True:
            message = await sent.get()
            if isinstance(message, TrajectoryScored | TrajectoryFailed):
                return message
            if isinstance(message, PoolAnswered):
                self.trajectory.questions.receive(message.answer)
                continue
            self.requests.append(message)
            key = (message.turn, message.branch)
            earlier = known[before(key)]
            prefix = (len(earlier), context_digest(earlier) if earlier else "")
            assert (4 * message.prefix_tokens, message.prefix) == prefix
            context = earlier + message.given
            self.asked.append(context)
            await self.gate.wait()
            text = pending.pop(0)
            finish = "length" if text.endswith("…") else "stop"
            token_ids = self.codec.encode(text.removesuffix("…"))
            result = GenerateResult("g0.0", message.turn, token_ids, finish, context_digest(context), message.branch)
            self.trajectory.receive(result)
            known[key] = context + token_ids


@pytest.fixture
async def stage():
    async with AgentEndpoint().serving() as endpoint:
        yield Stage(endpoint)


def client(base_url, api_key, **options):
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=httpx.AsyncClient(trust_env=False), max_retries=0, **options
    )


def asking(*calls, returns=None, **body):
    """Return a program that makes these calls, each with the messages of the calls before and their answers."""

    async def solve(base_url, api_key, row, seed):
        history = []
        async with client(base_url, api_key) as model:
            for messages in calls:
                history += messages
                reply = await model.chat.completions.create(model="any", messages=history, **body)
                history.append(reply.choices[0].message.model_dump())
        return returns

    return solve


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_model_is_a_frozen_pool_is_answered_by_it_and_is_no_turn(stage, stream):
    async def solve(base_url, api_key, row, seed):
        async with client(base_url, api_key) as model:
            listed = [each.id async for each in model.models.list()]
            asked = {"messages": [user("hint?")], "temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "stop": ["."]}
            if stream:
                chunks = [
                    chunk async for chunk in await model.chat.completions.create(model="teacher", stream=True, **asked)
                ]
                hint, finish = chunks[0].choices[0].delta.content, chunks[-1].choices[0].finish_reason
            else:
                choice = (await model.chat.completions.create(model="teacher", **asked)).choices[0]
                hint, finish = choice.message.content, choice.finish_reason
            assert (listed, hint, finish) == (["policy", "teacher"], "hint 1", "length")
            with pytest.raises(openai.BadRequestError, match="pool teacher refused the question"):
                await model.chat.completions.create(model="teacher", messages=[user("refuse")])
            with pytest.raises(openai.BadRequestError, match="with temperature 'hot'"):
                await model.chat.completions.create(model="teacher", messages=[user("x")], temperature="hot")
            await model.chat.completions.create(model="policy", messages=[user(hint)])

    result = await stage.play(solve, ["yes"], pools=["teacher"])
    assert isinstance(result, TrajectoryScored) and (result.turns, result.reward) == (1, 3.0)
    assert stage.contexts == ["<user>hint 1<end>\n<assistant>"]
    hint = Question("teacher", [{"role": "user", "content": "hint?"}], 3, 0.5, 0.9, (".",))
    default = Question("teacher", [{"role": "user", "content": "refuse"}], 20, 1.0, 1.0, ())
    assert stage.questions == [hint, default]


async def test_calls_become_turns_whose_tokens_are_never_encoded_again(stage):
    solve = asking([{"role": "system", "content": "be brief"}, user("hi")], [user("more")], [user("x"), user("y")])
    result = await stage.play(solve, ["a b <end>", "cut…", "<end>"])
    first = "<system>be brief<end>\n<user>hi<end>\n<assistant>"
    second = f"{first}a b <end>\n<user>more<end>\n<assistant>"
    third = f"{second}cut<end>\n<user>x<end>\n<user>y<end>\n<assistant>"
    assert stage.contexts == [first, second, third]
    assert isinstance(result, TrajectoryScored)
    assert (result.reward, result.turns, result.text, result.attempt, result.lease) == (0.0, 3, "", 2, 7)
    assert result.metrics == {"turns": 3.0, "context_limit": 0.0, "forks": 0.0}
    (item,) = stage.reward.items
    assert (item.prompt, item.problem) == (first, {"question": "hi", "seed": 4})
    assert [(turn.kind, turn.text) for turn in item.turns if turn.kind == "model"] == [
        ("model", "a b "), ("model", "cut"), ("model", "")
    ]  # fmt: skip


async def test_the_reply_has_the_fields_of_openai(stage):
    replies = []

    async def solve(base_url, api_key):
        async with client(base_url, api_key) as model:
            replies.append(await model.chat.completions.create(model="gpt", messages=ASK))
            models = await model.models.list()
            replies.append([each.id for each in models.data])

    await stage.play(AgentFunction(solve, ("base_url", "api_key")), ["ab…"])
    reply, models = replies
    assert (reply.model, reply.object, reply.choices[0].finish_reason) == ("gpt", "chat.completion", "length")
    assert (reply.choices[0].message.role, reply.choices[0].message.content) == ("assistant", "ab")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (21, 2, 23)
    assert models == ["policy"]


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_has_the_answer_and_the_usage_if_it_is_asked_for(stage, usage):
    chunks = []

    async def solve(base_url, api_key):
        async with client(base_url, api_key) as model:
            options = {"stream_options": {"include_usage": True}} if usage else {}
            chunks.extend(
                [c async for c in await model.chat.completions.create(model="m", messages=ASK, stream=True, **options)]
            )

    await stage.play(AgentFunction(solve, ("base_url", "api_key")), ["ab<end>"])
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ab"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "stop"]
    assert [c.usage.completion_tokens for c in chunks if c.usage] == ([3] if usage else [])


async def test_a_stream_is_kept_alive_while_the_answer_is_generated(stage, monkeypatch):
    monkeypatch.setattr(agent_endpoint, "COMMENT_SECONDS", 0.0)
    stage.gate.clear()
    lines = []

    async def solve(base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"messages": ASK, "stream": True}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{base_url}/chat/completions", json=body) as reply,
        ):
            async for line in reply.content:
                lines.append(line)
                stage.gate.set()

    await stage.play(AgentFunction(solve, ("base_url", "api_key")), ["ab<end>"])
    assert lines[0].startswith(b": ") and lines[-2] == b"data: [DONE]\n"


@pytest.mark.parametrize(
    ("returns", "scored", "reward"),
    [(None, True, 2.0), ("four", True, 4.0), (0.5, True, 2.5), (3, False, 3.0), (True, False, 1.0)],
)
async def test_a_program_returns_nothing_a_text_or_a_reward(stage, returns, scored, reward):
    result = await stage.play(asking(ASK, returns=returns), ["ab<end>"], scored=scored)
    assert isinstance(result, TrajectoryScored) and result.reward == reward


@pytest.mark.parametrize(
    ("returns", "scored", "reason"),
    [
        ({"a": 1}, True, "returned a value of type dict; return None, a number"),
        (None, False, "returned no reward, and its task has none; return a number, or name a reward"),
        ("text", False, "returned no reward, and its task has none"),
        (float("nan"), True, "the reward nan"),
    ],
)
async def test_a_result_without_meaning_fails_the_sample(stage, returns, scored, reason):
    result = await stage.play(asking(ASK, returns=returns), ["ab<end>"], scored=scored)
    assert isinstance(result, TrajectoryFailed) and reason in result.reason


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_an_error_of_the_program_is_the_reason_of_the_sample(stage, kind, in_thread):
    def fail(row):
        raise kind("no idea")

    async def solve(row):
        fail(row)

    result = await stage.play(AgentFunction(fail if in_thread else solve, ("row",)), [])
    assert isinstance(result, TrajectoryFailed) and result.reason == f"its agent raised {kind.__name__}: no idea"


async def test_a_program_without_a_call_fails_its_sample(stage):
    result = await stage.play(asking(returns=1.0), [])
    assert isinstance(result, TrajectoryFailed)
    assert result.reason == "its agent has no answer of the model: it made no call"


async def test_a_function_that_is_not_async_runs_in_a_thread(stage):
    def solve(base_url, api_key, row, seed):
        with openai.OpenAI(base_url=base_url, api_key=api_key, http_client=httpx.Client(trust_env=False)) as model:
            reply = model.chat.completions.create(model="m", messages=[user(f"{row['question']} {seed < 2**52}")])
        return reply.choices[0].message.content + "!"

    result = await stage.play(solve, ["ab<end>"])
    assert result.reward == 3.0 and stage.contexts == ["<user>hi True<end>\n<assistant>"]


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "most"), [({}, 20), ({"max_tokens": 3}, 3), ({"max_completion_tokens": 64_000, "max_tokens": 1}, 20)]
)
async def test_a_request_may_shorten_its_answer(stage, body, most):
    await stage.play(asking(ASK, **body), ["ab<end>"])
    assert [request.max_tokens for request in stage.requests] == [most]


async def test_the_sampling_of_the_task_counts_and_not_that_of_a_request(stage):
    body = {"temperature": 0.0, "top_p": 0.1, "seed": 4, "presence_penalty": 1.0, "extra_body": {"top_k": 1}}
    result = await stage.play(asking(ASK, **body), ["ab<end>"], sampling={"temperature": 0.5})
    assert isinstance(result, TrajectoryScored) and stage.requests[0].temperature == 0.5


async def test_a_stop_string_of_a_request_ends_its_answer_and_no_other(stage):
    async def solve(base_url, api_key, row, seed):
        async with client(base_url, api_key) as model:
            reply = await model.chat.completions.create(model="m", messages=ASK, stop=["Obs:"])
            history = [*ASK, reply.choices[0].message.model_dump(), user("more")]
            texts.append(reply.choices[0].message.content)
            reply = await model.chat.completions.create(model="m", messages=history)
            texts.append(reply.choices[0].message.content)

    texts = []
    await stage.play(solve, ["do Obs:", "do Obs:<end>"], sampling={"maxTokens": 20, "stop": ["#"]})
    assert [request.stop for request in stage.requests] == [["#", "Obs:"], ["#"]]
    assert texts == ["do ", "do Obs:"]
    assert stage.contexts[1] == f"{stage.contexts[0]}do Obs:<end>\n<user>more<end>\n<assistant>"
    assert [turn.text for turn in stage.reward.items[0].turns if turn.kind == "model"] == texts


# --- refused calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"n": 2}, "n", "n is not supported here; remove it"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format is not supported"),
        ({"logprobs": True}, "logprobs", "logprobs is not supported"),
        ({"best": 2}, "best", "unknown field `best`"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens", "Expected `int"),
        ({"stop": [""]}, "stop", "a string of stop has 0 characters"),
        ({"stop": ["a"] * 17}, "stop", "stop has 17 strings; give at most 16"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "an answer is not continued"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "messages[0].role is 'tool'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "messages[0].content[0] is not of type text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}, user("a")]},
            "messages[0].tool_calls",
            "messages[0].tool_calls is not supported",
        ),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(stage, body, param, sentence):
    errors = []

    async def solve(base_url, api_key):
        async with client(base_url, api_key) as model:
            with pytest.raises(openai.BadRequestError) as caught:
                await model.chat.completions.create(
                    model="m", messages=body.get("messages", ASK), extra_body={k: v for k, v in body.items()}
                )
            errors.append(caught.value)
            await model.chat.completions.create(model="m", messages=ASK)

    result = await stage.play(AgentFunction(solve, ("base_url", "api_key")), ["ab<end>"])
    (error,) = errors
    assert sentence in error.message and error.param == param
    assert isinstance(result, TrajectoryScored), "a program may correct its call"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": 3}'])
async def test_a_body_that_is_no_request_is_refused(stage, body):
    replies = []

    async def solve(base_url, api_key):
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session,
            session.post(f"{base_url}/chat/completions", data=body) as reply,
        ):
            replies.append((reply.status, json.loads(await reply.read())["error"]["message"]))

    await stage.play(AgentFunction(solve, ("base_url", "api_key")), [])
    ((status, message),) = replies
    assert status == 400 and "the body is no request of chat completions" in message


async def test_a_key_is_valid_while_its_program_runs(stage):
    used = []

    async def solve(base_url, api_key, row, seed):
        used.extend([base_url, api_key])
        async with client(base_url, "rljob-guess") as model:
            with pytest.raises(openai.AuthenticationError, match="the API key is of no agent that runs"):
                await model.chat.completions.create(model="m", messages=ASK)
        await asking(ASK)(base_url, api_key, row, seed)

    assert isinstance(await stage.play(solve, ["ab<end>"]), TrajectoryScored)
    with pytest.raises(openai.AuthenticationError) as caught:
        await asking(ASK)(*used, {}, 0)
    assert caught.value.code == "invalid_api_key" and len(stage.requests) == 1


@pytest.mark.parametrize("header", ["fixed", "the key of another one"])
async def test_the_key_may_be_in_the_path(stage, header):
    async def solve(base_url, api_key, row, seed):
        url = base_url.replace("/v1", f"/sessions/{api_key}/v1")
        with pytest.raises(openai.AuthenticationError):
            await asking(ASK)(url.replace(api_key, "guess"), "fixed", row, seed)
        await asking(ASK)(url, header, row, seed)
        async with client(url, header) as model:
            assert [each.id for each in (await model.models.list()).data] == ["policy"]

    result = await stage.play(solve, ["ab<end>"])
    assert isinstance(result, TrajectoryScored) and result.turns == 1


async def test_other_routes_are_refused_in_the_shape_of_openai(stage):
    async with client(stage.endpoint.url, "x") as model:
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings; use POST /v1/chat"):
            await model.embeddings.create(model="m", input="a")


async def test_a_cancelled_trajectory_ends_the_session_of_its_program(stage):
    used, calls = [], []

    async def solve(base_url, api_key, row, seed):
        used.extend([base_url, api_key])
        calls.append(asyncio.create_task(asking(ASK)(base_url, api_key, row, seed)))  # outlives the cancelled program
        await asyncio.shield(calls[0])

    sent = stage.start(solve)
    await sent.get()
    stage.trajectory.cancel()
    with pytest.raises(openai.AuthenticationError, match="the sample of this agent has ended"):
        await calls[0]
    with pytest.raises(openai.AuthenticationError, match="of no agent that runs"):
        await asking(ASK)(*used, {}, 0)
    assert sent.empty()


async def test_a_program_that_ignores_its_cancellation_calls_no_more(stage):
    refused = asyncio.get_running_loop().create_future()

    async def solve(base_url, api_key, row, seed):
        try:
            await asking(ASK)(base_url, api_key, row, seed)
        except asyncio.CancelledError:
            try:
                await asking(ASK)(base_url, api_key, row, seed)
            except openai.AuthenticationError as error:
                refused.set_result(str(error))

    sent = stage.start(solve)
    await sent.get()
    stage.trajectory.cancel()
    assert "of no agent that runs" in await refused


# --- calls that do not continue the one before -----------------------------------------------------------------------


def calling(*histories, returns=None):
    """Return a program that makes calls with these messages, and returns a value."""

    async def solve(base_url, api_key, row, seed):
        async with client(base_url, api_key) as model:
            for messages in histories:
                await model.chat.completions.create(model="m", messages=messages)
        return returns

    return solve


ANSWER = {"role": "assistant", "content": "ab"}


FIRST = "<user>hi<end>\n<assistant>"


@pytest.mark.parametrize(
    ("second", "context"),
    [
        ([*ASK, {"role": "assistant", "content": "other"}, user("x")], "<user>hi<end>\n<assistant>other<end>\n<user>x"),
        ([user("HI"), ANSWER, user("x")], "<user>HI<end>\n<assistant>ab<end>\n<user>x"),
        ([{"role": "system", "content": "hi"}, ANSWER, user("x")], "<system>hi<end>\n<assistant>ab<end>\n<user>x"),
        ([user("a new subject")], "<user>a new subject"),
    ],
)
async def test_a_call_that_continues_no_answer_begins_a_branch_with_all_its_messages(stage, second, context):
    result = await stage.play(calling(ASK, second, [*second, ANSWER, user("y")]), ["ab<end>"] * 3)
    assert isinstance(result, TrajectoryScored) and result.metrics["forks"] == 1.0
    assert stage.contexts[1:] == [
        f"{context}<end>\n<assistant>", f"{context}<end>\n<assistant>ab<end>\n<user>y<end>\n<assistant>"
    ]  # fmt: skip
    assert [(request.turn, request.branch) for request in stage.requests] == [(0, ""), (0, "0.1/0.1"), (1, "0.1/0.1")]
    assert [request.prefix_tokens for request in stage.requests[:2]] == [0, 0]


@pytest.mark.parametrize("returns", [None, 2.5])
async def test_the_reward_of_a_program_is_that_of_the_conversation_with_the_last_answer(stage, returns):
    """The first conversation is left: its history is rewritten."""
    new = [user("a new subject")]
    more = [*new, ANSWER, user("y")]
    result = await stage.play(calling(ASK, [*ASK, ANSWER, user("x")], new, more, returns=returns), [
        "ab<end>", "ab<end>", "ab<end>", "last<end>"
    ])  # fmt: skip
    [item] = stage.reward.items
    assert [turn.text for turn in item.turns] == ["ab", "\n<user>y\n<assistant>", "last"]
    assert (item.completion, item.response_tokens) == ("last", len("last") + 1)
    assert (result.text, result.branch) == ("last", "0.1/0.1")
    assert result.turn_rewards == [], "all of the reward is that of the last turn of the last branch"
    assert result.reward == 4 + (returns or 0)


async def test_a_second_call_after_an_answer_shares_its_tokens(stage):
    """The first continuation is rewritten; then both are continued."""
    more, other = [*ASK, ANSWER, user("more")], [*ASK, ANSWER, user("other")]
    histories = (ASK, more, other, [*other, ANSWER, user("z")], [*more, ANSWER, user("y")], more)
    result = await stage.play(calling(*histories), ["ab<end>"] * 6)
    assert isinstance(result, TrajectoryScored) and (result.turns, result.metrics["forks"]) == (6, 2.0)
    keys = [(0, ""), (1, ""), (1, "1.1/1.1"), (2, "1.1/1.1"), (2, ""), (1, "1.1/1.2")]
    assert [(request.turn, request.branch) for request in stage.requests] == keys
    common = f"{FIRST}ab<end>\n"
    assert stage.contexts[2] == f"{common}<user>other<end>\n<assistant>"
    assert stage.contexts[5] == stage.contexts[1] == f"{common}<user>more<end>\n<assistant>"
    given = ["".join(map(chr, array("i", request.given))).replace("\x00", "<end>") for request in stage.requests]
    assert given[2] == "\n<user>other<end>\n<assistant>", "what both have is sent once"


async def test_of_two_equal_answers_each_is_continued_once(stage):
    """So the calls of parallel workers with equal answers are sequences of their own."""
    more = [*ASK, ANSWER, user("more")]
    await stage.play(calling(ASK, ASK, more, more), ["ab<end>"] * 4)
    keys = [(0, ""), (0, "0.1/0.1"), (1, ""), (1, "0.1/0.1")]
    assert [(request.turn, request.branch) for request in stage.requests] == keys


async def test_calls_are_answered_at_the_same_time(stage):
    replies = []

    async def solve(base_url, api_key, row, seed):
        async with client(base_url, api_key) as model:

            async def ask(messages):
                reply = await model.chat.completions.create(model="m", messages=messages)
                replies.append(reply.id)
                return reply.choices[0].message.model_dump()

            first = await ask(ASK)
            stage.gate.clear()
            together = [asyncio.create_task(ask([*ASK, first, user(text)])) for text in ("a", "b", "b")]
            while len(stage.trajectory.pending) < 3:
                await asyncio.sleep(0)
            stage.gate.set()
            await asyncio.gather(*together)

    result = await stage.play(solve, ["ab<end>", "1<end>", "2<end>", "3<end>"])
    assert isinstance(result, TrajectoryScored) and (result.turns, result.metrics["forks"]) == (4, 2.0)
    assert sorted({context.partition("ab")[2] for context in stage.contexts[1:]}) == [
        "<end>\n<user>a<end>\n<assistant>", "<end>\n<user>b<end>\n<assistant>"
    ]  # fmt: skip
    assert len(set(replies)) == 4


@pytest.mark.parametrize("spelling", [" ab\n", [{"type": "text", "text": "ab"}]])
async def test_an_echo_may_differ_in_white_space_and_form(stage, spelling):
    echo = {"role": "assistant", "content": spelling, "refusal": None, "tool_calls": None, "reasoning": "none"}
    result = await stage.play(calling(ASK, [*ASK, echo, user("x")]), ["ab <end>", "c<end>"])
    assert isinstance(result, TrajectoryScored)
    assert stage.contexts[1] == "<user>hi<end>\n<assistant>ab <end>\n<user>x<end>\n<assistant>"


@pytest.mark.parametrize("count", ["0", "1"])
async def test_only_a_repeated_request_gets_the_answer_of_the_first(stage, count):
    texts = []

    async def solve(base_url, api_key, row, seed):
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for headers in ({}, {"x-stainless-retry-count": count}):
                async with session.post(
                    f"{base_url}/chat/completions", json={"messages": ASK}, headers=headers
                ) as reply:
                    texts.append((await reply.json()).get("choices"))

    result = await stage.play(solve, ["ab<end>", "cd<end>"])
    assert isinstance(result, TrajectoryScored)
    assert [text[0]["message"]["content"] for text in texts] == (["ab", "ab"] if count == "1" else ["ab", "cd"])
    assert len(stage.requests) == (1 if count == "1" else 2)


async def test_a_repeated_request_joins_the_call_that_is_answered(stage):
    async def solve(base_url, api_key, row, seed):
        stage.gate.clear()
        with pytest.raises(openai.APITimeoutError):
            async with client(base_url, api_key, timeout=0.05) as model:
                await model.chat.completions.create(model="m", messages=ASK)
        stage.gate.set()
        async with client(base_url, api_key) as model:
            again = {"x-stainless-retry-count": "1"}
            reply = await model.chat.completions.create(model="m", messages=ASK, extra_headers=again)
        return reply.choices[0].message.content

    result = await stage.play(solve, ["ab<end>"])
    assert isinstance(result, TrajectoryScored) and (result.reward, result.turns) == (2.0, 1)


# --- the context limit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "turns"), [(21, 0), (22, 1), (45, 1), (46, 2)])
async def test_a_call_without_room_gets_an_empty_answer_of_finish_length(stage, length, turns):
    """21 tokens of the first context, 3 of the answer, 21 of the next message."""
    finishes = []

    async def solve(base_url, api_key, row, seed):
        async with client(base_url, api_key) as model:
            for messages in (ASK, [*ASK, ANSWER, user("x")]):
                reply = await model.chat.completions.create(model="m", messages=messages)
                finishes.append((reply.choices[0].message.content, reply.choices[0].finish_reason))
                if reply.choices[0].finish_reason == "length":
                    return

    result = await stage.play(solve, ["ab<end>", "ab<end>"], length=length)
    assert finishes == [("ab", "stop")] * turns + [("", "length")] * (turns < 2)
    if turns:
        assert (result.turns, result.metrics["context_limit"]) == (turns, float(turns < 2))
        assert stage.requests[0].max_tokens == min(20, length - 21)
    else:
        assert result.reason == (
            "its agent has no answer of the model: its first call leaves no room in maxModelLength"
        )


# --- programs ---------------------------------------------------------------------------------------------------------


def takes_one(row): ...
def takes_all(**given): ...
def takes_more(row, api_key, other): ...
def takes_defaults(row, *rest, limit=3): ...


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("takes_one", ("row",)), ("takes_all", ("base_url", "api_key", "row", "seed")), ("takes_defaults", ("row",))],
)
def test_a_program_gets_what_it_names(name, arguments):
    assert load_program(TaskAgent(function=f"{__name__}:{name}"), "spec").arguments == arguments


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (f"{__name__}:takes_more", r"a\.function: .* has the parameter other; an agent gets base_url, api_key, row"),
        (f"{__name__}:Letters", "is not a function"),
        (f"{__name__}:ASK", "is not a function"),
        ("no_such_module:f", r"a\.function: module no_such_module cannot be imported"),
    ],
)  # fmt: skip
def test_what_is_no_program_is_refused_by_name(reference, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_program(TaskAgent(function=reference), "a")


# --- commands ---------------------------------------------------------------------------------------------------------

CURL = """
import json, os, sys, urllib.request
body = {"messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


def python(program, *words):
    return AgentCommand([sys.executable, "-I", "-S", "-c", program.replace("{", "{{").replace("}", "}}"), *words])


@pytest.mark.parametrize(
    ("prints", "reward"),
    [("", 2.0), ("print('four')", 4.0), ("print(json.load(open('row.json'))['seed'] + 10)", 2.0)],
)
async def test_a_command_prints_the_text_to_score(stage, prints, reward):
    result = await stage.play(python(CURL + prints, "say {question}"), ["ab<end>"])
    assert isinstance(result, TrajectoryScored) and result.reward == reward
    assert stage.contexts == ["<user>say hi<end>\n<assistant>"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("sys.stderr.write('first\\nno idea\\n'); sys.exit(3)", "exited with code 3: no idea"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9"),
        ("print('x' * (1 << 20))", "printed more than 1,048,576 bytes; let it print less"),
    ],
)
async def test_a_command_that_fails_is_the_reason_of_its_sample(stage, program, reason):
    result = await stage.play(python(f"{CURL}\n{program}", "hi"), ["ab<end>"])
    assert isinstance(result, TrajectoryFailed) and result.reason == f"its agent {sys.executable} {reason}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["/no/such/program"], "cannot be started: "), ([sys.executable, "{other}"], "there is no column 'other'")],
)
async def test_a_command_that_cannot_be_started_fails_its_sample(stage, words, reason):
    result = await stage.play(AgentCommand(words), [])
    assert isinstance(result, TrajectoryFailed) and reason in result.reason


async def test_a_command_gets_no_token_of_the_job_and_an_empty_directory(stage, monkeypatch):
    for name in ("RLJOB_TOKEN", "RLJOB_REWARD_TOKEN_FILE"):
        monkeypatch.setenv(name, "secret")
    seen = "print([n for n in os.environ if 'TOKEN' in n], os.listdir(), os.environ['RLJOB_AGENT_SEED'].isdigit())"
    await stage.play(python(CURL + seen, "hi"), ["ab<end>"])
    assert stage.reward.items[0].completion == "[] ['row.json'] True"


async def test_the_processes_of_a_command_end_with_its_sample(stage, tmp_path):
    """A cancelled sample kills the command and its child, which holds a lock until then."""
    lock = tmp_path / "lock"
    lock.touch()
    program = (
        f"import fcntl, os, time\nfile = open({str(lock)!r})\nfcntl.flock(file, fcntl.LOCK_EX)\nchild = os.fork()\n"
        f"if child: {CURL.strip().replace(chr(10), '; ')}\ntime.sleep(3600)"
    )
    sent = stage.start(python(program, "hi"))
    await sent.get()
    with lock.open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stage.trajectory.cancel()
        await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)


def test_a_command_runs_in_the_event_loop_of_the_runner():
    command = AgentCommand(["sh", "-c", "echo $OPENAI_BASE_URL $OPENAI_API_KEY; sleep 3600 >&- 2>&- & echo $0", "{q}"])
    printed = uvloop.run(command.run(base_url="http://a/v1", api_key="k", row={"q": "é"}, seed=1))
    assert printed == "http://a/v1 k\né"


def test_a_command_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.command\[0\]: there is no program no-such-agent; install it where"):
        load_program(TaskAgent(command=["no-such-agent"]), "a")
    assert load_program(TaskAgent(command=["sh", "{question}"]), "a") == AgentCommand(["sh", "{question}"])
