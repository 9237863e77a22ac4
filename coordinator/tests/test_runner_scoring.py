"""Requests to a reward service that is healthy, unavailable or failing."""

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob.api.roles import Reward
from rljob.protocol.score_messages import ScoreItem
from rljob.protocol.watched_socket import watched_socket
from rljob.runner import circuit_breaker, reward_http, scoring, service_http
from rljob.runner.scoring import RewardClient
from rljob.runner.service_http import service_session

Answer = Callable[[list[dict]], web.Response]


def reply(items: list[dict]) -> web.Response:
    scores = [{"sample": i["sample"], "reward": len(i["completion"]), "metrics": {}, "error": ""} for i in items]
    return web.json_response({"scores": scores})


class FakeService:
    """Answers with ``answer``; blocks replies while ``gate`` is cleared."""

    def __init__(self) -> None:
        self.requests: list[list[dict]] = []
        self.headers: list[str | None] = []  # Authorization of each request
        self.answer: Answer = reply
        self.fault: Callable[[list[dict]], Callable[[web.Request], web.Response] | None] = lambda items: None
        self.health: Callable[[], int] = lambda: 200
        self.stream: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, request: web.Request) -> web.StreamResponse:
        items = (await request.json())["items"]
        self.requests.append(items)
        self.headers.append(request.headers.get("Authorization"))
        await self.gate.wait()
        fault = self.fault(items)
        if self.stream is not None:
            return await self.stream(request)
        return self.answer(items) if fault is None else fault(request)

    async def healthz(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health())


def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BACKOFF_SECONDS", "LAST_BACKOFF_SECONDS"):
        monkeypatch.setattr(scoring, name, 0.001)
    for name in ("FIRST_OPEN_SECONDS", "LAST_OPEN_SECONDS"):
        monkeypatch.setattr(circuit_breaker, name, 0.001)


@pytest.fixture
async def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RewardClient]:
    short_waits(monkeypatch)
    async with TestServer(_app(service)) as server, service_session() as session:
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


async def test_samples_wait_and_share_a_request_while_all_requests_are_in_flight(
    client: RewardClient, service: FakeService
) -> None:
    service.gate.clear()
    tasks = []
    for i in range(6):
        tasks.append(asyncio.create_task(client.score(item(f"g0.{i}"))))
        await until(lambda: len(service.requests) == min(len(tasks), 2))
    service.gate.set()
    await asyncio.gather(*tasks)
    assert [len(request) for request in service.requests] == [1, 1, 4]


async def test_requests_to_an_unavailable_service_are_repeated_and_logged_once(
    client: RewardClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([503, 429, 502])

    def flaky(items: list[dict]) -> web.Response:
        status = next(failures, None)
        return reply(items) if status is None else web.Response(status=status)

    service.answer = flaky
    assert (await client.score(item("g0.0"))).reward == 3
    assert [record.message for record in caplog.records if record.name == service_http.__name__] == [
        "reward sums does not answer (HTTP 503); asking again until it does",
        "reward sums answers again",
    ]


async def test_each_reason_of_an_unavailable_service_is_logged_once(
    client: RewardClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one, that nothing listens, says less than a later one, that a set-up fails."""
    texts = ["7 samples wait", "9 samples wait", *(f"set_up raised {name}" for name in "ABACDEFG")]
    reasons = iter([*texts, ""])

    def flaky(items: list[dict]) -> web.Response:
        text = next(reasons)
        return web.Response(status=503, text=text) if text else reply(items)

    service.answer = flaky
    assert (await client.score(item("g0.0"))).reward == 3
    said = [record.message for record in caplog.records if record.name == service_http.__name__]
    logged = [line.partition("HTTP 503: ")[2].partition(")")[0] for line in said[:-1]]
    assert logged == ["7 samples wait", *(f"set_up raised {name}" for name in "ABCD")]
    assert said[-1] == "reward sums answers again"


async def test_a_service_that_restarts_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    short_waits(monkeypatch)
    hangs = FakeService()
    hangs.gate.clear()
    first = TestServer(_app(hangs))
    await first.start_server()
    async with service_session() as session:
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
        pytest.param(lambda items: web.Response(text="<html>", content_type="text/html"), id="no JSON"),
        pytest.param(lambda items: web.Response(body=b'{"scores":["\xff"]}'), id="not UTF-8"),
        pytest.param(lambda items: web.Response(text='{"x":' + "[" * 100_000), id="deep"),
        pytest.param(lambda items: web.Response(text='{"scores":[{"sample":"g0.1","reward":1e999}]}'), id="infinite"),
        pytest.param(lambda items: _score(reward=1.7e308), id="too large"),
        pytest.param(lambda items: _score(metrics={"a": -1e31}), id="a metric that is too large"),
        pytest.param(lambda items: web.Response(status=204), id="no content"),
        pytest.param(lambda items: web.Response(status=101), id="another protocol"),
        pytest.param(lambda items: _score(metrics={"a": "b"}), id="a metric of another type"),
        pytest.param(lambda items: _score(reward="1"), id="a reward of another type"),
        pytest.param(lambda items: _compressed(_score()), id="compressed"),
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
async def test_an_invalid_reply_fails_its_sample_and_no_other(
    client: RewardClient, service: FakeService, broken: Answer
) -> None:
    service.answer = lambda items: broken(items) if any(i["sample"] == "g0.1" for i in items) else reply(items)
    scores = await asyncio.gather(*(client.score(item(f"g0.{i}")) for i in range(3)))
    assert [bool(score.error) for score in scores] == [False, True, False]
    assert "sums" in scores[1].error


def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def _break(request: web.Request) -> web.Response:
    return web.Response(status=500, text="Internal\nServer Error")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(_hang_up, "reward sums broke the connection (", id="dies"),
        pytest.param(_break, "reward sums answered HTTP 500: Internal Server Error, 3 times on", id="answers 500"),
    ],
)
async def test_a_sample_fails_after_three_isolated_failures_of_the_service(
    client: RewardClient, service: FakeService, fault: Callable[[web.Request], web.Response], reason: str
) -> None:
    service.fault = lambda items: fault if any(i["sample"] == "g0.1" for i in items) else None
    scores = await asyncio.gather(*(client.score(item(f"g0.{i}")) for i in range(3)))
    assert [score.error.startswith(reason) for score in scores] == [False, True, False]
    assert scores[1].error.endswith("3 times on this sample alone")
    assert [len(request) for request in service.requests] == [3, 1, 1, 1, 1, 1, 1]


async def test_a_sample_that_kills_the_service_fails_no_other_sample(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests in flight fail when the service dies; an isolated request identifies the sample that kills it."""
    short_waits(monkeypatch)
    monkeypatch.setattr(scoring, "MAX_ITEMS", 1)
    out: list[tuple[web.Request, set[str]]] = []

    async def score(request: web.Request) -> web.Response:
        items = (await request.json())["items"]
        entry = (request, {one["sample"] for one in items})
        out.append(entry)
        await asyncio.sleep(0.001)  # the others arrive
        if "g0.1" in entry[1]:
            for other, _ in out:
                _hang_up(other) if other.transport is not None else None
        out.remove(entry)
        return reply(items)

    app = web.Application()
    app.router.add_post("/v1/score", score)
    async with TestServer(app) as server, service_session() as session:
        reward = Reward(name="sums", builtin="reasoning_gym", processes=4)
        client = RewardClient(reward, str(server.make_url("/")), session)
        scores = await asyncio.gather(*(client.score(item(f"g0.{i}")) for i in range(12)))
        await client.close()
    assert [i for i, score in enumerate(scores) if score.error] == [1]


async def test_a_sample_on_which_the_service_hangs_fails(
    client: RewardClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "EXTRA_SECONDS", -19.99)  # with two tries of ten seconds: 10 ms for one sample
    service.gate.clear()
    score = await client.score(item("g0.0"))
    assert score.error == "reward sums did not answer within 0 s, 3 times on this sample alone"


async def test_a_service_that_fails_once_loses_no_sample(client: RewardClient, service: FakeService) -> None:
    faults = iter([_hang_up, _break])
    service.fault = lambda items: next(faults, None)
    scores = await asyncio.gather(*(client.score(item(f"g0.{i}")) for i in range(3)))
    assert [score.error for score in scores] == ["", "", ""]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_the_message_of_a_refused_request_is_the_error_of_its_sample(
    client: RewardClient, service: FakeService, status: int
) -> None:
    service.answer = lambda items: web.Response(status=status, text="no,\nthanks")
    assert (await client.score(item("g0.0"))).error == f"reward sums refused the sample: HTTP {status}: no, thanks"


async def test_a_sample_that_cannot_be_sent_fails(client: RewardClient) -> None:
    score = await client.score(item("g0.0", "\ud800"))
    assert score.error.startswith("the sample cannot be sent to reward sums:")


async def test_a_row_that_is_nested_too_deeply_fails_its_sample(client: RewardClient) -> None:
    deep = item("g0.0")
    deep.problem["row"] = row = []
    for _ in range(sys.getrecursionlimit()):
        row.append(row := [])
    scores = await asyncio.gather(client.score(deep), client.score(item("g0.1")))
    assert scores[0].error.startswith("the sample cannot be sent to reward sums: maximum recursion depth")
    assert scores[1].reward == 3


async def test_a_request_that_is_too_long_is_sent_one_sample_at_a_time(
    client: RewardClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_REQUEST_BYTES", 430)
    scores = await asyncio.gather(*(client.score(item(f"g0.{i}", "x" * 100 * i)) for i in range(5)))
    assert [len(request) for request in service.requests] == [1, 1, 1]
    assert [bool(score.error) for score in scores] == [False, False, False, True, True]
    assert scores[4].error == (
        "the sample cannot be sent to reward sums: it has 622 bytes, and a request has at most 430; "
        "shorten its row or its answer"
    )


async def test_a_reply_is_read_up_to_its_bound(
    client: RewardClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_http, "MAX_SCORE_BYTES", 1000)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:  # until the client closes the connection
            await response.write(b" " * 1000)

    service.stream = endless
    score = await client.score(item("g0.0"))
    assert score.error == "reward sums answered more than 1,000 bytes; shorten its metrics"


async def test_a_slow_reply_is_read_up_to_the_time_limit(
    client: RewardClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "EXTRA_SECONDS", -19.99)  # with two tries of ten seconds: 10 ms for one sample

    async def drips(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.001)

    service.stream = drips
    score = await client.score(item("g0.0"))
    assert score.error == "reward sums did not answer within 0 s, 3 times on this sample alone"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(client: RewardClient, service: FakeService, status: int) -> None:
    headers = {"Location": "http://127.0.0.1:9/elsewhere"}
    service.answer = lambda items: web.Response(status=status, headers=headers)
    score = await client.score(item("g0.0"))
    where = f"http://127.0.0.1:9/elsewhere (HTTP {status})"
    assert score.error == f"reward sums redirects to {where}; redirects are not followed"
    assert len(service.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("secret", "refused the run's token (HTTP {}: no); it must accept its RLJOB_TOKEN"),
        ("", "requires a token (HTTP {}: no); rljob sends none to a reward with url"),
    ],
)
async def test_a_refused_token_is_the_reason_of_the_failed_sample(
    service: FakeService, status: int, token: str, reason: str
) -> None:
    service.answer = lambda items: web.Response(status=status, text="no")
    async with TestServer(_app(service)) as server, service_session() as session:
        client = RewardClient(Reward(name="sums", builtin="exact_match"), str(server.make_url("/")), session, token)
        assert (await client.score(item("g0.0"))).error == f"reward sums {reason.format(status)}"
        await client.close()
    assert service.headers == [f"Bearer {token}" if token else None]


async def test_a_long_error_of_the_service_is_cut(client: RewardClient, service: FakeService) -> None:
    service.answer = lambda items: _score(sample="g0.0", error="x" * 100_000)
    assert (await client.score(item("g0.0"))).error == "x" * 1000


async def test_a_defect_fails_the_samples_of_its_request_and_no_other(
    client: RewardClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(client, "_read", None)
        assert (await client.score(item("g0.0"))).error.startswith("reward sums could not be asked (TypeError: ")
    assert (await client.score(item("g0.1"))).reward == 3


async def test_the_start_waits_for_the_service_and_logs_it_once(
    client: RewardClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    states = iter([503, 502, 404])
    service.health = lambda: next(states)
    await client.wait_until_reachable()
    assert [record.message for record in caplog.records if record.name == service_http.__name__] == [
        "reward sums does not answer (HTTP 503); asking again until it does",
        "reward sums answers again",
    ]


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


def _score(**changes: object) -> web.Response:
    return web.json_response({"scores": [{"sample": "g0.1", "reward": 1, "metrics": {}, "error": "", **changes}]})


def _compressed(response: web.Response) -> web.Response:
    assert isinstance(response.body, bytes)
    return web.Response(body=gzip.compress(response.body), headers={"Content-Encoding": "gzip"})


def _app(service: FakeService) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/score", service.score)
    app.router.add_get("/healthz", service.healthz)
    return app


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def test_a_sample_that_cannot_be_scored_now_is_asked_again_and_no_other_waits(
    client: RewardClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LATER_SECONDS", 0.001)
    away = True

    def scores(items: list[dict]) -> web.Response:
        later = [item["completion"] == "?" and away for item in items]
        found = [
            {"sample": item["sample"], "reward": 1.0, "error": "no replica answers" if wait else "", "later": wait}
            for item, wait in zip(items, later, strict=True)
        ]
        return web.json_response({"scores": found})

    service.answer = scores
    waiting = [asyncio.create_task(client.score(item(f"g0.{i}", "?"))) for i in range(70)]
    assert [(await client.score(item(f"g1.{i}"))).reward for i in range(3)] == [1.0] * 3
    assert not any(task.done() for task in waiting)
    away = False
    assert [score.error for score in await asyncio.gather(*waiting)] == [""] * 70


async def test_samples_that_wait_for_later_end_with_the_client(client: RewardClient, service: FakeService) -> None:
    service.answer = lambda items: web.json_response(
        {"scores": [{"sample": each["sample"], "reward": 0.0, "error": "away", "later": True} for each in items]}
    )
    task = asyncio.create_task(client.score(item("g0.0")))
    await until(lambda: len(client._later) == 1)
    await client.close()
    task.cancel()
    assert all(timer.cancelled() for timer in client._later.values())


async def test_connections_to_services_notice_a_pod_that_vanished() -> None:
    async with service_session() as session:
        assert session.connector._socket_factory is watched_socket  # type: ignore[union-attr]
