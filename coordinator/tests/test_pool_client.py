"""The requests to the engines of a frozen pool, in virtual time: only the HTTP session is a fake."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import aiohttp
import pytest
from yarl import URL

from rljob.api.roles import Rollout
from rljob.runner.context import TrajectoryError
from rljob.runner.pools import pool_client
from rljob.runner.pools.pool_client import EXTRA_SECONDS, STARTING_SECONDS, PoolClient
from rljob.runner.pools.question import Question
from rljob.simulation.virtual_time import run_in_virtual_time

STALL_SECONDS = 60.0
CHAT = Question("teacher", [{"role": "user", "content": "hint?"}], 9, 0.5, 0.9, ("end",))
TEXT = Question("teacher", "hint:", 9, 0.0, 1.0, ())
REFUSED = aiohttp.ClientConnectorError(mock.Mock(), ConnectionRefusedError(111, "refused"))

Reply = tuple[int, dict[str, str], bytes]
Engine = Callable[[dict[str, Any]], Coroutine[Any, Any, Reply]]


def reply(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"finish_reason": "stop", **choice}]}).encode()


async def answers(body: dict[str, Any]) -> Reply:
    await asyncio.sleep(1.0)
    return 200, {}, reply(text="text") if "prompt" in body else reply(message={"content": "chat"})


def says(status: int, body: bytes = b"no", **headers: str) -> Engine:
    async def engine(_: dict[str, Any]) -> Reply:
        return status, headers, body

    return engine


def raises(error: Exception) -> Engine:
    async def engine(_: dict[str, Any]) -> Reply:
        await asyncio.sleep(0.1)
        raise error

    return engine


async def hangs(_: dict[str, Any]) -> Reply:
    await asyncio.sleep(1e9)
    raise AssertionError


class Content:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self, most: int) -> bytes:
        part, self._body = self._body[:most], self._body[most:]
        return part


class Session:
    """Engines by host. ``sent``: host, path and body of each request; ``most``: in flight at a host."""

    def __init__(self, **engines: Engine) -> None:
        self.engines = engines
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    @asynccontextmanager
    async def post(self, url: URL, data: bytes, headers: Any, timeout: Any, allow_redirects: bool) -> Any:
        host, body = str(url.host), json.loads(data)
        self.sent.append((host, url.path, body))
        self.headers.append(headers)
        self._now[host] += 1
        self.most[host] = max(self.most[host], self._now[host])
        try:
            async with asyncio.timeout(timeout.total):
                status, replied, content = await self.engines.get(host, raises(REFUSED))(body)
        finally:
            self._now[host] -= 1
        yield mock.Mock(status=status, headers=replied, content=Content(content))

    @property
    def hosts(self) -> list[str]:
        return [host for host, _, _ in self.sent]


async def addresses(url: URL) -> list[str]:
    return ["10.0.0.1", "10.0.0.2"]


def run(session: Any, main: Callable[[PoolClient], Coroutine[Any, Any, Any]], *urls: str, **pool: Any) -> Any:
    """Return the result of ``main``, and the seconds that it took."""

    async def program() -> Any:
        settings = Rollout.model_validate({"name": "teacher", "model": "big", **pool})
        client = PoolClient(settings, urls or ["http://10.0.0.1:1", "http://10.0.0.2:1"], session, "key", STALL_SECONDS)
        began = asyncio.get_running_loop().time()
        try:
            return await main(client), asyncio.get_running_loop().time() - began
        finally:
            await client.close()

    with mock.patch.object(pool_client, "addresses_of", addresses):
        return run_in_virtual_time(program())


@pytest.fixture(autouse=True)
def longest_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)


def engines(one: Engine, two: Engine) -> Session:
    return Session(**{"10.0.0.1": one, "10.0.0.2": two})


async def warm(client: PoolClient) -> None:
    """Ask once: the pool has answered."""
    await client.answer(CHAT, 1, None)


def failing(main: Callable[[PoolClient], Coroutine[Any, Any, Any]]) -> Callable[[PoolClient], Coroutine[Any, Any, str]]:
    async def caught(client: PoolClient) -> str:
        with pytest.raises(TrajectoryError) as error:
            await main(client)
        assert "\n" not in str(error.value)
        return str(error.value)

    return caught


def test_a_chat_and_a_text_are_sent_with_their_sampling_and_the_token() -> None:
    session = engines(answers, answers)

    async def both(client: PoolClient) -> Any:
        return [await client.answer(CHAT, 7, None), await client.answer(TEXT, 8, None)]

    assert run(session, both)[0] == [("chat", "stop"), ("text", "stop")]
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["end"], "seed": 7}
    chat, text = session.sent
    assert chat[1:] == (
        "/v1/chat/completions", {"model": "teacher", "messages": CHAT.content, "stream": False, **sampling}
    )  # fmt: skip
    assert text[1] == "/v1/completions" and text[2]["prompt"] == "hint:" and text[2]["seed"] == 8
    assert {headers["Authorization"] for headers in session.headers} == {"Bearer key"}


async def ask_many(client: PoolClient) -> Any:
    return await asyncio.gather(*(client.answer(CHAT, i, None) for i in range(40)))


@pytest.mark.parametrize("urls", [(), ("http://sums-replicas-rollout-teacher:8080",)], ids=["list", "name"])
def test_questions_are_spread_over_the_engines_each_with_its_limit(urls: tuple[str, ...]) -> None:
    session = engines(answers, answers)
    found, seconds = run(session, ask_many, *urls, maxConcurrency=4)
    assert found == [("chat", "stop")] * 40
    assert session.most == {"10.0.0.1": 4, "10.0.0.2": 4} and seconds < 6


@pytest.mark.parametrize("broken", [raises(REFUSED), says(503), says(429), says(500), raises(aiohttp.ClientError("x"))])
def test_an_engine_that_is_away_or_fails_loses_no_question(broken: Engine) -> None:
    session = engines(answers, broken)
    found, _ = run(session, ask_many, maxConcurrency=8)
    assert found == [("chat", "stop")] * 40 and session.hosts.count("10.0.0.2") <= 40


def test_a_slow_engine_does_not_hold_questions_that_another_can_answer() -> None:
    session = engines(answers, hangs)

    async def some(client: PoolClient) -> int:
        tasks = [asyncio.create_task(client.answer(CHAT, i, None)) for i in range(40)]
        await asyncio.sleep(50)
        done = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        return done

    assert run(session, some, maxConcurrency=2)[0] == 38


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            says(400, b'{"message": "too\n long"}'),
            'refused a question (HTTP 400: {"message": "too long"})',
        ),
        (says(401), "refused a question (HTTP 401: no)"),
        (says(200, b"{}"), "answered something else than a completion"),
        (says(200, b'{"choices": []}'), "answered something else than a completion"),
        (says(200, b"\xff" * 9), "answered something else than a completion"),
        (says(200, reply(message={"content": None})), "answered without a text"),
        (says(200, reply(finish_reason="tool_calls", text="x")), "did not complete its answer (finish_reason 'tool_c"),
        (says(200, b"x" * (pool_client.MAX_REPLY_BYTES + 1)), "answered more than 4,194,304 bytes; lower max_tokens"),
    ],
)
def test_a_question_that_an_engine_refuses_fails_at_once(engine: Engine, message: str) -> None:
    session = engines(engine, engine)
    sentence, _ = run(session, failing(warm))
    assert sentence.startswith("pool teacher ") and message in sentence and len(session.sent) == 1


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (says(500), "an engine answered HTTP 500: no"),
        (raises(aiohttp.ServerDisconnectedError()), "an engine broke the connection (Server disconnected)"),
        (hangs, f"an engine did not answer within {STALL_SECONDS + EXTRA_SECONDS:g} s"),
    ],
)
def test_a_question_on_which_engines_fail_three_times_fails_its_sample(engine: Engine, message: str) -> None:
    session = engines(engine, engine)
    sentence, _ = run(session, failing(warm))
    assert sentence == f"pool teacher failed 3 times on one question: {message}"
    assert len(session.sent) == 3 and len(set(session.hosts)) == 2, "not twice in a row at the same engine"


def test_a_question_may_have_its_own_time_limit() -> None:
    async def impatient(client: PoolClient) -> Any:
        await client.answer(CHAT, 1, 2.0)

    sentence, seconds = run(engines(hangs, hangs), failing(impatient))
    assert "did not answer within 2 s" in sentence and 6 <= seconds < 10


@pytest.mark.parametrize("away", [raises(REFUSED), says(503, **{"Retry-After": "1"})])
def test_a_pool_that_is_gone_fails_the_questions_that_waited_too_long(away: Engine) -> None:
    session = engines(answers, away)

    async def gone(client: PoolClient) -> Any:
        await warm(client)
        session.engines["10.0.0.1"] = away
        await asyncio.gather(*(client.answer(CHAT, i, None) for i in range(5)))

    sentence, seconds = run(session, failing(gone))
    assert sentence.startswith(f"no engine of pool teacher has answered for {STALL_SECONDS:g} s (")
    assert STALL_SECONDS <= seconds < STALL_SECONDS + 12


def test_a_pool_whose_model_is_loading_has_an_hour() -> None:
    session = engines(says(503), says(503))

    async def loads(client: PoolClient) -> Any:
        asked = asyncio.create_task(client.answer(CHAT, 1, None))
        await asyncio.sleep(10 * STALL_SECONDS)
        session.engines["10.0.0.2"] = answers
        return await asked

    assert run(session, loads)[0] == ("chat", "stop")
    sentence, seconds = run(engines(says(503), says(503)), failing(warm))
    assert f"has answered for {STARTING_SECONDS:g} s (HTTP 503: no)" in sentence
    assert STARTING_SECONDS <= seconds < STARTING_SECONDS + 12


def test_questions_that_wait_for_a_busy_pool_are_not_given_up() -> None:
    """Each question takes longer than stallSeconds, and the pool answers one at a time."""

    async def slow(body: dict[str, Any]) -> Reply:
        await asyncio.sleep(1.4 * STALL_SECONDS)
        return await answers(body)

    session = engines(slow, slow)

    async def some(client: PoolClient) -> Any:
        return await asyncio.gather(*(client.answer(CHAT, i, 200.0) for i in range(6)))

    found, _ = run(session, some, "http://10.0.0.1:1", maxConcurrency=1)
    assert found == [("chat", "stop")] * 6 and session.most == {"10.0.0.1": 1}


def test_a_name_without_addresses_is_a_pool_that_is_away() -> None:
    async def unknown(url: URL) -> list[str]:
        raise OSError("Name or service not known")

    async def program() -> Any:
        client = PoolClient(Rollout(name="teacher", model="big"), ["http://teacher"], mock.Mock(), "", STALL_SECONDS)
        with pytest.raises(TrajectoryError, match=r"no engine of pool teacher .* \(none is ready\)"):
            await client.answer(CHAT, 1, None)
        await client.close()

    with mock.patch.object(pool_client, "addresses_of", unknown):
        run_in_virtual_time(program())


def test_a_cancelled_question_leaves_room_for_the_next() -> None:
    session = engines(hangs, hangs)

    async def cancelled(client: PoolClient) -> Any:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await client.answer(CHAT, 1, None)
        session.engines["10.0.0.1"] = answers
        return await client.answer(CHAT, 1, None)

    assert run(session, cancelled, "http://10.0.0.1:1", maxConcurrency=1)[0] == ("chat", "stop")


def scored(*logprobs: float | None, tokens: Sequence[int] = (5, 6, 7)) -> bytes:
    """Return a reply of vLLM with the log-probabilities of a prompt."""
    known = [
        None if logprob is None else {str(token): {"logprob": logprob, "rank": 1, "decoded_token": "x"}}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return json.dumps({"choices": [{"text": "y", "finish_reason": "length", "prompt_logprobs": known}]}).encode()


TOKENS = array("i", [5, 6, 7]).tobytes()


def test_an_engine_gives_the_log_probabilities_of_tokens() -> None:
    session = engines(*[says(200, scored(None, -1.5, -0.25))] * 2)
    assert run(session, lambda client: client.logprobs(TOKENS))[0] == [0.0, -1.5, -0.25]
    assert session.sent[0][1:] == (
        "/v1/completions",
        {"model": "teacher", "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}
        | {"stream": False},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (b"{}", "answered something else than log-probabilities"),
        (reply(text="y"), "answered no log-probabilities of the 3 tokens"),
        (scored(None, -1.0, tokens=(5, 6)), "answered no log-probabilities of the 3 tokens"),
        (scored(None, -1.0, -1.0, tokens=(5, 6, 8)), "answered no finite log-probability of token 7"),
        (scored(None, None, -1.0), "answered no finite log-probability of token 6"),
    ],
)
def test_other_replies_fail_the_sample(reply: bytes, sentence: str) -> None:
    with pytest.raises(TrajectoryError, match=f"pool teacher {sentence}"):
        run(engines(says(200, reply), says(200, reply)), lambda client: client.logprobs(TOKENS))
