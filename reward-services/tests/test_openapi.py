"""The OpenAPI document of docs/ describes what the server does."""

from __future__ import annotations

import json
from pathlib import Path

import fastjsonschema
import httpx
import pytest

from rljob.protocol.score_messages import ScoreItem, ScoreRequest
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.openapi import document
from rljob.rewards.pool import Pool
from rljob.rewards.server import build_app

PAGE = Path(__file__).parents[2] / "docs" / "reward-openapi.json"
ITEM = {"sample": "a", "task": "t", "prompt": "1+1=", "completion": "2", "finish": "stop", "problem": {"answer": "2"}}
TOKEN = {"Authorization": "Bearer secret"}


def reward(completion: str) -> tuple[float, dict[str, float]]:
    return 1 / len(completion), {"length": len(completion)}


@pytest.fixture
async def client():
    pool = Pool(RewardEvaluator(reward, "r"), "r", processes=1, timeout_seconds=10)
    transport = httpx.ASGITransport(app=build_app(pool, "secret"))
    async with pool, httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        await pool.wait_until_ready()
        yield client


def fits(schema: dict, value: object) -> bool:
    whole = schema | {"components": document()["components"], "$schema": "http://json-schema.org/draft-07/schema"}
    try:
        fastjsonschema.compile(whole, use_default=False)(value)
    except fastjsonschema.JsonSchemaValueException:
        return False
    return True


def test_the_page_is_up_to_date() -> None:
    assert json.loads(PAGE.read_text()) == document(), "run: make docs"


def test_the_document_has_the_routes_of_the_server() -> None:
    app = build_app(Pool(RewardEvaluator(reward, "r"), "r", processes=1, timeout_seconds=10))
    served = {(route.path, method.lower()) for route in app.routes for method in route.methods - {"HEAD"}}
    assert served == {(path, method) for path, methods in document()["paths"].items() for method in methods}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"items": [ITEM, ITEM | {"sample": "b", "completion": ""}]}, TOKEN, 200),
        ({"items": [ITEM | {"response_tokens": 1, "metadata": {"split": "train"}, "turns": []}]}, TOKEN, 200),
        ({"items": [{"sample": "a"}]}, TOKEN, 422),
        ({"items": [ITEM | {"response_tokens": "1"}]}, TOKEN, 422),
        ({}, TOKEN, 422),
        ({"items": [ITEM] * 65}, TOKEN, 413),
        ({"items": [ITEM]}, {}, 401),
    ],
)
async def test_a_request_is_answered_as_documented(client, body: dict, headers: dict, status: int) -> None:
    operation = document()["paths"]["/v1/score"]["post"]
    answer = await client.post("/v1/score", json=body, headers=headers)
    assert answer.status_code == status
    [(kind, content)] = operation["responses"][str(status)]["content"].items()
    assert answer.headers["content-type"].startswith(kind)
    if status == 200:
        assert fits(content["schema"], answer.json())
        assert not fits(content["schema"], {"scores": [{"sample": "a"}]}), "the schema refuses other documents"
    request = operation["requestBody"]["content"]["application/json"]["schema"]
    assert fits(request, body) is (status in (200, 413, 401))


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_a_probe_is_answered_as_documented(client, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")


def test_every_field_of_a_request_is_documented() -> None:
    schemas = document()["components"]["schemas"]
    for kind in (ScoreItem, ScoreRequest):
        assert list(schemas[kind.__name__]["properties"]) == list(kind.__struct_fields__)
