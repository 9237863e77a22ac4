from __future__ import annotations

import asyncio
import signal
import time

import httpx
import msgspec
import pytest

from rljob.protocol import score_messages, service_routes
from rljob.protocol.score_messages import Score, ScoreItem, ScoreReply, ScoreRequest
from rljob.rewards import server
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.pool import Pool
from rljob.rewards.sdk import RewardServer
from rljob.rewards.server import build_app


def length(completion: str) -> tuple[float, dict[str, float]]:
    return len(completion), {"half": len(completion) / 2}


score = RewardEvaluator(length, "length")


@pytest.fixture
async def client():
    pool = Pool(score, "length", processes=1, timeout_seconds=10)
    transport = httpx.ASGITransport(app=build_app(pool))
    async with pool, httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        await pool.wait_until_ready()
        yield client


async def test_a_request_is_answered_with_scores_in_order(client):
    items = [ScoreItem(f"g{i}.0", "sums", "", "x" * i, "stop", {"answer": i}) for i in range(3)]
    answer = await client.post("/v1/score", content=msgspec.json.encode(ScoreRequest(items)))
    assert answer.status_code == 200
    expected = [Score(f"g{i}.0", float(i), {"half": i / 2}, "") for i in range(3)]
    assert msgspec.json.decode(answer.content, type=ScoreReply).scores == expected


async def test_a_request_without_items_is_answered(client):
    assert (await client.post("/v1/score", content=b'{"items":[]}')).json() == {"scores": []}


def body(**changes: object) -> bytes:
    return b'{"items":[%s]}' % (
        msgspec.json.encode({**msgspec.to_builtins(ScoreItem("g0.0", "sums", "", "", "stop", {})), **changes})
    )


def raw(problem: bytes) -> bytes:
    return body().replace(b'"problem":{}', b'"problem":{"a":%s}' % problem)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"items":[{"sample":1}]}',
        b'{"items":[{}]}',
        b"\xff",
        pytest.param(body().replace(b"g0.0", b"\xff\xfe"), id="not UTF-8"),
        pytest.param(body().replace(b"g0.0", b"\\ud800"), id="a lone surrogate"),
        pytest.param(raw(b"NaN"), id="NaN"),
        pytest.param(raw(b"1e999"), id="infinite"),
        pytest.param(raw(b"9" * 5000), id="an integer of 5,000 digits"),
        pytest.param(raw(b"[" * 200_000 + b"]" * 200_000), id="deep"),
        pytest.param(body(other=1)[:-2] + b',"x":' + b"[" * 200_000, id="deep in an unknown field"),
    ],
)
async def test_a_malformed_body_is_rejected_with_the_reason(client, body):
    answer = await client.post("/v1/score", content=body)
    assert answer.status_code == 422
    assert answer.text.startswith("the body is not a ScoreRequest: ") and answer.text.count("\n") == 1


async def test_health_and_metrics_are_plain_http(client):
    for path in ("/healthz", "/readyz"):
        assert (await client.get(path)).status_code == 200
    names = {line.split()[2] for line in (await client.get("/metrics")).text.splitlines() if line.startswith("# TYPE")}
    assert {
        "rljob_reward_samples_total",
        "rljob_reward_seconds",
        "rljob_reward_timeouts_total",
        "rljob_reward_worker_crashes_total",
        "rljob_reward_failures_total",
    } <= names


@pytest.mark.parametrize(
    ("request_body", "sentence"),
    [
        (body(sample="s" * 257), "items[0].sample has 257 characters; send at most 256"),
        (body(task="s" * 20_000), "items[0].task has 20,000 characters; send at most 256"),
        (body(finish="s" * 257), "items[0].finish has 257 characters; send at most 256"),
        (body(prompt="ä" * 11), "items[0].prompt has 11 characters; send at most 10"),
        (body(completion="s" * 11), "items[0].completion has 11 characters; send at most 10"),
        (
            body(turns=[{"kind": "model", "text": ""}, {"kind": "model", "text": "s" * 11}]),
            "items[0].turns[1].text has 11 characters; send at most 10",
        ),
        (
            b'{"items":[%s]}' % b",".join([body()[len('{"items":[') : -2]] * 65),
            "the request has 65 items; send at most 64",
        ),
    ],
)
async def test_a_request_beyond_a_bound_is_rejected_with_413(client, monkeypatch, request_body, sentence):
    monkeypatch.setattr(score_messages, "MAX_TEXT", 10)
    answer = await client.post("/v1/score", content=request_body)
    assert (answer.status_code, answer.text) == (413, f"{sentence}\n")


async def test_a_request_of_too_many_values_is_rejected_before_it_is_decoded(client, monkeypatch):
    monkeypatch.setattr(service_routes, "MAX_REQUEST_MARKS", 1000)
    text = await client.post("/v1/score", content=body(problem={"answer": "12, [3], {4}" * 1000}))
    assert text.status_code == 200, "characters of a string are no values"
    monkeypatch.setattr(server, "_decoder", None)
    answer = await client.post("/v1/score", content=body(problem={"answer": [[]] * 1000}))
    sentence = "the request has more than 1,000 strings, brackets and commas; send fewer samples or smaller rows\n"
    assert (answer.status_code, answer.text) == (413, sentence)


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_no_traceback():
    sent, messages = [], iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "query_string": b""}
    await build_app(Pool(score, "r", processes=1, timeout_seconds=10))(scope, receive, send)
    assert sent[0]["status"] == 400


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}, {"Authorization": b"Bearer \xe4"}]
)
async def test_a_service_with_a_token_answers_401_without_it_and_reads_nothing(headers):
    async def parts():
        pytest.fail("the body is read")
        yield b""

    pool = Pool(score, "r", processes=1, timeout_seconds=10)
    transport = httpx.ASGITransport(app=build_app(pool, "secret"))
    async with pool, httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        await pool.wait_until_ready()
        answer = await client.post("/v1/score", content=parts(), headers=headers)
        assert answer.status_code == 401
        assert answer.text == "this request requires the token that rljob gave to the job's runner\n"
        assert [(await client.get(path)).status_code for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        answer = await client.post("/v1/score", content=b'{"items":[]}', headers={"Authorization": "Bearer secret"})
        assert answer.json() == {"scores": []}


async def test_a_request_is_refused_while_too_many_samples_wait(monkeypatch):
    monkeypatch.setattr(server, "MAX_WAITING", 2)
    pool = Pool(score, "r", processes=1, timeout_seconds=10)
    transport = httpx.ASGITransport(app=build_app(pool))
    async with httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        items = [ScoreItem(f"g0.{i}", "sums", "", "a", "stop", {}) for i in range(2)]
        waiting = asyncio.create_task(pool.score(items))  # the pool has no worker yet
        await asyncio.sleep(0)
        answer = await client.post("/v1/score", content=b'{"items":[]}')
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.text == "2 samples wait for a worker; repeat the request later, or add processes\n"
        async with pool:
            assert [each.reward for each in await waiting] == [1.0, 1.0]
            assert (await client.post("/v1/score", content=b'{"items":[]}')).status_code == 200


async def test_a_service_whose_workers_are_not_set_up_refuses_samples_and_is_not_ready(tmp_path):
    class SetUp:
        def set_up(self):
            if not (tmp_path / "there").exists():
                raise KeyError("no\nmodel")

        def __call__(self, completion):
            return 1.0

    pool = Pool(RewardEvaluator(SetUp(), "r"), "r", processes=1, timeout_seconds=10)
    transport = httpx.ASGITransport(app=build_app(pool))
    body = msgspec.json.encode(ScoreRequest([ScoreItem("g0.0", "sums", "", "a", "stop", {})]))
    async with httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        answer = await client.post("/v1/score", content=body)
        assert (answer.status_code, answer.text) == (503, "reward r cannot score now: its worker is being set up\n")
        async with pool:
            await pool.wait_until_ready()
            answer = await client.post("/v1/score", content=body)
            sentence = "reward r cannot score now: set_up raised KeyError: 'no\\nmodel'\n"
            assert (answer.status_code, answer.headers["retry-after"], answer.text) == (503, "1", sentence)
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.text) == (503, "set_up raised KeyError: 'no\\nmodel'\n")
            assert (await client.get("/healthz")).status_code == 200
            (tmp_path / "there").touch()
            async with asyncio.timeout(60):
                while (await client.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.01)
            assert (await client.post("/v1/score", content=body)).json()["scores"][0]["reward"] == 1.0


async def test_a_service_listens_when_a_worker_is_set_up():
    pool = Pool(score, "r", processes=1, timeout_seconds=10)
    app = build_app(pool)
    async with app.router.lifespan_context(app):
        assert pool.not_ready == ""


async def test_a_service_listens_while_its_set_up_takes_long(monkeypatch):
    class SetUp:
        def set_up(self):
            time.sleep(1000)

        def __call__(self, completion):
            return 1.0

    monkeypatch.setattr(server, "LISTEN_SECONDS", 0.01)
    app = build_app(Pool(RewardEvaluator(SetUp(), "r"), "r", processes=1, timeout_seconds=10))
    transport = httpx.ASGITransport(app=app)
    client = httpx.AsyncClient(transport=transport, base_url="http://reward")
    async with app.router.lifespan_context(app), client:
        assert (await client.get("/readyz")).status_code == 503


async def test_a_signal_ends_a_service_whose_workers_are_being_set_up(monkeypatch, tmp_path):
    class SetUp:
        def set_up(self):
            (tmp_path / "begun").touch()
            time.sleep(1000)

        def __call__(self, completion):
            return 1.0

    monkeypatch.setattr(server, "LISTEN_SECONDS", 1000.0)
    pool = Pool(RewardEvaluator(SetUp(), "r"), "r", processes=1, timeout_seconds=10)
    service = RewardServer(build_app(pool), "127.0.0.1:0", "", 1000)
    service.pool = pool
    serving = asyncio.create_task(service._serve())
    async with asyncio.timeout(60):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.001)
        service.handle_exit(signal.SIGTERM, None)
        await serving
    assert pool.workers == set()
