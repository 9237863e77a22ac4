from __future__ import annotations

import httpx
import msgspec
import pytest

from rljob.protocol.score_messages import Score, ScoreItem, ScoreReply, ScoreRequest
from rljob.rewards.pool import Pool
from rljob.rewards.server import build_app


def score(item: ScoreItem) -> Score:
    return Score(item.sample, float(len(item.completion)), {"half": len(item.completion) / 2}, "")


@pytest.fixture
async def client():
    pool = Pool(score, "length", processes=1, timeout_seconds=10)
    transport = httpx.ASGITransport(app=build_app(pool))
    async with pool, httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        yield client


async def test_a_request_is_answered_with_scores_in_order(client):
    items = [ScoreItem(f"g{i}.0", "sums", "", "x" * i, "stop", {"answer": i}) for i in range(3)]
    answer = await client.post("/v1/score", content=msgspec.json.encode(ScoreRequest(items)))
    assert answer.status_code == 200
    expected = [Score(f"g{i}.0", float(i), {"half": i / 2}, "") for i in range(3)]
    assert msgspec.json.decode(answer.content, type=ScoreReply).scores == expected


async def test_a_request_without_items_is_answered(client):
    assert (await client.post("/v1/score", content=b'{"items":[]}')).json() == {"scores": []}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"items":[{"sample":1}]}', b'{"items":[{}]}', b"\xff"])
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
