"""All routes of a server require its key."""

import pytest

from rljob.rollout.adapters.vllm.server_key import RequireVllmKey
from rljob.rollout.auth_middleware import RequireKey


async def ask(headers, kind="http"):
    served, sent = [], []

    async def app(scope, receive, send):
        served.append(scope)

    async def send(message):
        sent.append(message)

    await RequireKey(app, "right")({"type": kind, "headers": headers, "path": "/update_weights"}, None, send)
    return bool(served), sent


async def test_a_request_with_the_key_is_served():
    assert await ask([(b"host", b"x"), (b"authorization", b"Bearer right")]) == (True, [])


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"right")]])
async def test_anything_else_is_401(headers):
    served, sent = await ask(headers)
    assert not served
    assert sent[0]["status"] == 401


async def test_websockets_need_the_key_and_lifespan_events_do_not():
    served, sent = await ask([], kind="websocket")
    assert (served, sent[0]["type"]) == (False, "websocket.close")
    assert (await ask([], kind="lifespan"))[0]


async def test_in_vllm_the_key_is_that_of_its_own_check(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    served = []

    async def app(scope, receive, send):
        served.append(scope)

    scope = {"type": "http", "headers": [(b"authorization", b"Bearer right")], "path": "/health"}
    await RequireVllmKey(app)(scope, None, None)
    assert served == [scope]
