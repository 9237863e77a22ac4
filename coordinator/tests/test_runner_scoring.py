"""Asking a reward service for scores, whatever it does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from rljob.api.models import Reward
from rljob.protocol.rewards import ScoreItem
from rljob.runner import scoring
from rljob.runner.scoring import RewardClient

Answer = Callable[[list[dict]], web.Response]


def reply(items: list[dict]) -> web.Response:
    scores = [{"sample": i["sample"], "reward": len(i["completion"]), "metrics": {}, "error": ""} for i in items]
    return web.json_response({"scores": scores})


class FakeService:
    """Answers with ``answer``; holds requests back while ``gate`` is closed."""

    def __init__(self) -> None:
        self.requests: list[list[dict]] = []
        self.answer: Answer = reply
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, request: web.Request) -> web.Response:
        items = (await request.json())["items"]
        self.requests.append(items)
        await self.gate.wait()
        return self.answer(items)


@pytest.fixture
async def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RewardClient]:
    monkeypatch.setattr(scoring, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(scoring, "LAST_BACKOFF_SECONDS", 0.001)
    app = web.Application()
    app.router.add_post("/v1/score", service.score)
    async with TestServer(app) as server, ClientSession() as session:
        client = RewardClient(Reward(name="sums", builtin="reasoning_gym"), str(server.make_url("/")), session)
        yield client
        service.gate.set()
        await client.close()


def item(sample: str, completion: str = "abc") -> ScoreItem:
    return ScoreItem(sample, "sums", "1+1=", completion, "stop", {"question": "1+1=", "answer": "2", "metadata": {}})


async def test_samples_that_end_together_share_a_request(client: RewardClient, service: FakeService) -> None:
    scores = await asyncio.gather(*(client.score(item(f"g0.{i}", "x" * i)) for i in range(10)))
    assert [score.reward for score in scores] == list(range(10))
    assert [len(request) for request in service.requests] == [10]


async def test_a_request_holds_at_most_64_samples(client: RewardClient, service: FakeService) -> None:
    await asyncio.gather(*(client.score(item(f"g0.{i}")) for i in range(150)))
    assert sorted(len(request) for request in service.requests) == [22, 64, 64]


async def test_samples_gather_while_all_requests_are_out(client: RewardClient, service: FakeService) -> None:
    service.gate.clear()
    tasks = []
    for i in range(6):
        tasks.append(asyncio.create_task(client.score(item(f"g0.{i}"))))
        await until(lambda: len(service.requests) == min(len(tasks), 2))
    service.gate.set()
    await asyncio.gather(*tasks)
    assert [len(request) for request in service.requests] == [1, 1, 4]


async def test_a_service_that_is_away_is_asked_until_it_answers_and_logged_once(
    client: RewardClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([503, 500, 502])

    def flaky(items: list[dict]) -> web.Response:
        status = next(failures, None)
        return reply(items) if status is None else web.Response(status=status)

    service.answer = flaky
    assert (await client.score(item("g0.0"))).reward == 3
    assert [record.message for record in caplog.records if record.name == scoring.__name__] == [
        "reward sums does not answer (HTTP 503); asking again until it does",
        "reward sums answers again",
    ]


async def test_a_service_that_restarts_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(scoring, "LAST_BACKOFF_SECONDS", 0.001)
    hangs = FakeService()
    hangs.gate.clear()
    first = TestServer(_app(hangs))
    await first.start_server()
    async with ClientSession() as session:
        client = RewardClient(Reward(name="sums", builtin="reasoning_gym"), str(first.make_url("/")), session)
        asked = asyncio.create_task(client.score(item("g0.0")))
        await until(lambda: len(hangs.requests) == 1)
        for connection in list(first.runner.server.connections):  # the service dies in the middle of the request
            connection.transport.abort()
        port = first.port
        hangs.gate.set()
        await first.close()
        async with TestServer(_app(FakeService()), port=port):
            assert (await asked).reward == 3
        await client.close()


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda items: web.json_response({"scores": []}), id="no scores"),
        pytest.param(lambda items: web.json_response({"score": 1}), id="another shape"),
        pytest.param(lambda items: web.Response(text="<html>"), id="no JSON"),
        pytest.param(lambda items: web.Response(status=422, text="no such task"), id="refused"),
        pytest.param(
            lambda items: web.Response(
                text=json.dumps({"scores": [{"sample": "g0.1", "reward": float("nan"), "metrics": {}, "error": ""}]})
            ),
            id="not a number",
        ),
        pytest.param(
            lambda items: web.json_response(
                {"scores": [{"sample": "g9.9", "reward": 1, "metrics": {}, "error": ""} for _ in items]}
            ),
            id="other samples",
        ),
    ],
)
async def test_nonsense_fails_the_sample_it_is_about_and_no_other(
    client: RewardClient, service: FakeService, broken: Answer
) -> None:
    service.answer = lambda items: broken(items) if any(i["sample"] == "g0.1" for i in items) else reply(items)
    scores = await asyncio.gather(*(client.score(item(f"g0.{i}")) for i in range(3)))
    assert [bool(score.error) for score in scores] == [False, True, False]
    assert "sums" in scores[1].error


async def test_an_error_of_the_service_about_a_sample_is_passed_on(client: RewardClient, service: FakeService) -> None:
    service.answer = lambda items: web.json_response(
        {"scores": [{"sample": i["sample"], "reward": 0, "metrics": {}, "error": "took too long"} for i in items]}
    )
    assert (await client.score(item("g0.0"))).error == "took too long"


async def test_a_cancelled_sample_is_not_sent(client: RewardClient, service: FakeService) -> None:
    service.gate.clear()
    out = [asyncio.create_task(client.score(item(f"g0.{i}"))) for i in range(2)]
    await until(lambda: len(service.requests) == 1)
    out.append(asyncio.create_task(client.score(item("g1.0"))))
    await until(lambda: len(service.requests) == 2)
    late = [asyncio.create_task(client.score(item(f"g2.{i}"))) for i in range(2)]
    await asyncio.sleep(0)
    late[0].cancel()
    service.gate.set()
    await asyncio.gather(*out, late[1])
    assert [i["sample"] for request in service.requests for i in request] == ["g0.0", "g0.1", "g1.0", "g2.1"]


def _app(service: FakeService) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/score", service.score)
    return app


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)
