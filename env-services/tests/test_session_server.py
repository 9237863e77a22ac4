"""The HTTP routes of an environment service, and the OpenAPI document that describes them."""

from __future__ import annotations

import json
from pathlib import Path

import fastjsonschema
import httpx
import msgspec
import pytest

from rljob.environments import session_openapi
from rljob.environments.episode import Calls
from rljob.environments.session_server import build_session_app
from rljob.environments.session_table import SessionTable
from rljob.protocol.episode_messages import MAX_ACTION

PAGE = Path(__file__).parents[2] / "docs" / "environment-openapi.json"
TOKEN = {"Authorization": "Bearer secret"}
OPENING = {"session": "g0.0-a", "seed": 1, "row": {"seed": 2}}


class Echo:
    in_event_loop = True

    def reset(self, seed, row):
        return f"{seed} {row}", {}

    def step(self, action):
        if action == "raise":
            raise ValueError("no")
        return action, 1.0, action == "end", False, {"metrics": {"length": len(action)}}


@pytest.fixture
async def client():
    table = SessionTable(Echo, Calls("echo", 10.0), 2, 60.0)
    transport = httpx.ASGITransport(app=build_session_app(table, "secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://environment", headers=TOKEN) as client:
        yield client
    await table.close_all()


async def test_a_client_plays_an_episode(client):
    first = await client.post("/v1/sessions", json=OPENING)
    assert (first.status_code, first.json()["observation"]) == (200, "1 {'seed': 2}")
    for _ in range(2):
        step = await client.post("/v1/sessions/g0.0-a/steps", json={"step": 1, "action": "é\n"})
        assert step.json() == {
            "step": 1, "observation": "é\n", "reward": 1.0, "terminated": False, "truncated": False,
            "metrics": {"length": 2.0}, "means": {},
        }  # fmt: skip
    assert (await client.delete("/v1/sessions/g0.0-a")).status_code == 200
    assert (await client.delete("/v1/sessions/g0.0-a")).status_code == 200
    assert (await client.post("/v1/sessions/g0.0-a/steps", json={"step": 2, "action": ""})).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/v1/sessions", b"{", 422, "the body is not what the path requires"),
        ("/v1/sessions", {"session": "a"}, 422, "missing required field `seed`"),
        ("/v1/sessions", OPENING | {"session": "a/b"}, 422, "the name of the session does not match"),
        ("/v1/sessions", OPENING | {"session": "a" * 129}, 422, "the name of the session does not match"),
        ("/v1/sessions", OPENING | {"seed": 9}, 409, "session g0.0-a exists"),
        ("/v1/sessions/g0.0-a/steps", {"step": "1", "action": ""}, 422, "Expected `int`"),
        ("/v1/sessions", OPENING | {"row": {"a": [[]] * (1 << 19)}}, 413, "more than 1,048,576 strings, brackets and"),
        ("/v1/sessions/g0.0-a/steps", {"step": 1, "action": "x" * (MAX_ACTION + 1)}, 413, "send at most 1,048,576"),
        ("/v1/sessions/g0.0-a/steps", {"step": 3, "action": ""}, 409, "is at step 0; step 3 is not next"),
        (
            "/v1/sessions/g0.0-a/steps",
            {"step": 1, "action": "raise"},
            500,
            "echo: step raised ValueError: no",
        ),
        ("/v1/sessions/other/steps", {"step": 1, "action": ""}, 404, "there is no session other"),
    ],
)
async def test_an_invalid_request_is_refused_in_one_sentence(client, path, body, status, sentence):
    await client.post("/v1/sessions", json=OPENING)
    answer = await client.post(path, content=body if isinstance(body, bytes) else msgspec.json.encode(body))
    assert answer.status_code == status and sentence in answer.text and answer.text.count("\n") == 1


async def test_a_request_without_the_token_is_refused(client):
    for method, path in (("POST", "/v1/sessions"), ("POST", "/v1/sessions/a/steps"), ("DELETE", "/v1/sessions/a")):
        answer = await client.request(method, path, headers={"Authorization": "Bearer wrong"}, json=OPENING)
        assert answer.status_code == 401
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await client.get(path, headers={"Authorization": ""})).status_code == 200


async def test_too_many_sessions_are_asked_to_wait(client):
    for i in range(3):
        answer = await client.post("/v1/sessions", json=OPENING | {"session": f"s{i}"})
    assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"


async def test_the_document_describes_requests_and_replies(client):
    document = json.loads(PAGE.read_text())
    assert document == session_openapi.document(), "run make docs"

    def fits(path: str, value: object, reply: bool) -> bool:
        operation = document["paths"][path]["post"]
        content = operation["responses"]["200"] if reply else operation["requestBody"]
        schema = content["content"]["application/json"]["schema"] | {"components": document["components"]}
        try:
            fastjsonschema.compile(schema, use_default=False)(value)
        except fastjsonschema.JsonSchemaValueException:
            return False
        return True

    steps = "/v1/sessions/{session}/steps"
    assert fits("/v1/sessions", OPENING, False) and not fits("/v1/sessions", {"session": "a"}, False)
    assert fits("/v1/sessions", (await client.post("/v1/sessions", json=OPENING)).json(), True)
    step = {"step": 1, "action": "a"}
    assert fits(steps, step, False) and not fits(steps, {"step": 1}, False)
    assert fits(steps, (await client.post("/v1/sessions/g0.0-a/steps", json=step)).json(), True)
