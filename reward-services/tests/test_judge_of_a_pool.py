"""The reward `judge` with a frozen pool of the job: its engines go and come back, and no sample is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from e2e.fakes.chat_server import ChatServer
from rljob.api.rewards import REWARDS, NotScored, Unavailable
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.protocol.watched_socket import reading_peer_socket
from rljob.rewards import model_api
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.judge_reward import JudgeReward
from rljob.rewards.pool import Pool
from rljob.rewards.server import build_app

ITEM = {"sample": "s0", "task": "sums", "prompt": "1+1=", "completion": "2", "finish": "stop", "problem": {}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_api, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(model_api, "LAST_BACKOFF_SECONDS", 0.001)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., JudgeReward]:
    """Maker of rewards whose pool has engines at these addresses."""

    def make(*urls: str) -> JudgeReward:
        monkeypatch.setenv("RLJOB_POOL_URLS", json.dumps({"judge": urls}))
        monkeypatch.setenv("RLJOB_POOL_TOKEN", "secret")
        return JudgeReward(REWARDS["judge"].parse({"pool": "judge"}), [])

    return make


@asynccontextmanager
async def running(*servers: ChatServer) -> AsyncIterator[list[str]]:
    started = [TestServer(server.app()) for server in servers]
    for each in started:
        await each.start_server()
    try:
        yield [str(each.make_url("")).rstrip("/") for each in started]
    finally:
        for each in started:
            await each.close()


def verdicts(*replies: web.Response | str) -> ChatServer:
    left = iter(replies)
    return ChatServer(lambda message: next(left, "<score>10</score>"))


async def test_the_engines_of_a_pool_are_asked_in_turn_with_the_token_of_the_pools(
    judge: Callable[..., JudgeReward],
) -> None:
    servers = [verdicts(), verdicts()]
    async with running(*servers) as urls:
        reward = judge(*urls)
        for _ in range(4):
            assert (await reward(prompt="", completion="", problem={}))[0] == 1.0
        await reward.api.close()
    assert [server.tokens for server in servers] == [["Bearer secret"] * 2] * 2
    assert servers[0].bodies[0]["model"] == "judge"


async def test_a_server_that_stands_for_a_pool_may_have_another_name_of_the_model(
    judge: Callable[..., JudgeReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLJOB_POOL_MODEL", "large")
    server = verdicts()
    async with running(server) as urls:
        reward = judge(*urls)
        await reward(prompt="", completion="", problem={})
        await reward.api.close()
    assert server.bodies[0]["model"] == "large"


async def test_a_request_goes_to_another_engine_while_one_is_gone(judge: Callable[..., JudgeReward]) -> None:
    server = verdicts()
    async with running(server) as urls:
        reward = judge(f"http://127.0.0.1:{unused_port()}", *urls)
        assert (await reward(prompt="", completion="", problem={}))[0] == 1.0
        await reward.api.close()


async def test_a_message_that_ends_several_engines_is_not_scored(judge: Callable[..., JudgeReward]) -> None:
    broken = [web.Response(status=500, text="the engine ended") for _ in range(3)]
    server = verdicts(broken[0], web.Response(status=503), broken[1], broken[2])
    async with running(server) as urls:
        reward = judge(*urls)
        with pytest.raises(
            NotScored, match="the judge failed 3 times on this request \\(HTTP 500: the engine ended\\)"
        ):
            await reward(prompt="", completion="", problem={})
        assert (await reward(prompt="", completion="other", problem={}))[0] == 1.0
        await reward.api.close()


@pytest.mark.parametrize("completion", ["2", "3"])
async def test_the_failures_of_a_message_are_remembered_while_its_sample_is_asked_again(
    judge: Callable[..., JudgeReward], monkeypatch: pytest.MonkeyPatch, completion: str
) -> None:
    waits = asyncio.Event()

    def seconds(value: str | None) -> float:
        if value:
            waits.set()
        return float(value or 0)

    monkeypatch.setattr(model_api, "retry_after_seconds", seconds)
    gone = web.Response(status=503, headers={"Retry-After": "60"})
    server = verdicts(web.Response(status=500), web.Response(status=500), gone, web.Response(status=500))
    async with running(server) as urls:
        reward = judge(*urls)
        asking = asyncio.create_task(reward(prompt="", completion="2", problem={}))
        await waits.wait()
        asking.cancel()
        with pytest.raises(Unavailable, match="no engine of the judge answers \\(HTTP 503"):
            await asking
        if completion == "2":
            with pytest.raises(NotScored, match="failed 3 times"):
                await reward(prompt="", completion="2", problem={})
        else:
            assert (await reward(prompt="", completion="3", problem={}))[0] == 1.0
        await reward.api.close()


@pytest.mark.parametrize(("end", "error"), [(3.0, NotScored), (1.5, Unavailable)])
async def test_a_message_is_asked_again_unless_it_had_most_of_its_time_with_an_engine(
    judge: Callable[..., JudgeReward], monkeypatch: pytest.MonkeyPatch, end: float, error: type[Exception]
) -> None:
    times = iter([0.0, 1.0, end])  # begin, second engine, end of the sample's time
    monkeypatch.setattr(model_api, "monotonic", lambda: next(times))
    started, forever = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        started.set()
        await forever.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", slow)
    async with TestServer(app) as server:
        reward = judge(f"http://127.0.0.1:{unused_port()}", str(server.make_url("")))
        asking = asyncio.create_task(reward(prompt="", completion="", problem={}))
        await started.wait()
        asking.cancel()
        with pytest.raises(error):
            await asking
        await reward.api.close()
        forever.set()


async def test_a_message_is_asked_again_if_no_engine_was_reached(
    judge: Callable[..., JudgeReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a pod that is gone answers nothing, so that an attempt to connect takes all the time."""
    connecting, forever = asyncio.Event(), asyncio.Event()

    async def connect(*_: object, **__: object) -> None:
        connecting.set()
        await forever.wait()

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
    reward = judge("http://127.0.0.1:1")
    asking = asyncio.create_task(reward(prompt="", completion="", problem={}))
    await connecting.wait()
    asking.cancel()
    with pytest.raises(Unavailable, match="no engine of the judge answers \\(no connection within the time limit\\)"):
        await asking
    await reward.api.close()


async def test_a_connection_that_takes_too_long_is_no_failure_of_the_engine(
    judge: Callable[..., JudgeReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = aiohttp.TCPConnector.connect, iter([aiohttp.ConnectionTimeoutError("no answer")] * 5)

    async def connect(self: aiohttp.TCPConnector, *arguments: Any, **options: Any) -> Any:
        for error in errors:
            raise error
        return await real(self, *arguments, **options)

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
    async with running(verdicts()) as urls:
        reward = judge(*urls)
        assert (await reward(prompt="", completion="", problem={}))[0] == 1.0
        assert next(errors, None) is None
        await reward.api.close()


async def test_connections_notice_an_engine_that_vanished(judge: Callable[..., JudgeReward]) -> None:
    async with running(verdicts()) as urls:
        reward = judge(*urls)
        await reward(prompt="", completion="", problem={})
        assert reward.api._session.connector._socket_factory is reading_peer_socket  # type: ignore[attr-defined,union-attr]
        await reward.api.close()


def test_a_pool_that_the_service_does_not_know_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLJOB_POOL_URLS", raising=False)
    with pytest.raises(ValueError, match="pool 'judge' is not in RLJOB_POOL_URLS, which rljob sets"):
        JudgeReward(REWARDS["judge"].parse({"pool": "judge"}), [])


def absent(**_: object) -> float:
    raise Unavailable("no replica answers")


async def test_the_service_asks_the_runner_to_come_again_for_the_samples_that_it_cannot_score_now() -> None:
    def scorer(completion: str) -> float:
        if completion == "3":
            raise Unavailable("no replica answers")
        return 0.5

    pool = Pool(RewardEvaluator(scorer, "mine"), "mine", processes=1, timeout_seconds=10)
    app = build_app(pool)
    asgi = httpx.ASGITransport(app)
    items = [ITEM, ITEM | {"sample": "s1", "completion": "3"}]
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=asgi, base_url="http://reward") as client:
        scores = (await client.post("/v1/score", json={"items": items})).json()["scores"]
    assert [(score["sample"], score["reward"], score["later"]) for score in scores] == [
        ("s0", 0.5, False),
        ("s1", 0, True),
    ]
    assert scores[1]["error"] == "reward mine cannot score now: no replica answers"


def test_a_sample_that_cannot_be_scored_now_has_no_score_yet() -> None:
    scores: list[Score] = []
    RewardEvaluator(absent, "mine").score_all([ScoreItem(**ITEM)], scores.append)
    assert scores[0].later and scores[0].error == "reward mine cannot score now: no replica answers"
