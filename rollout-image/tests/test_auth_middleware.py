"""All routes of a server require its key."""

import asyncio
from types import SimpleNamespace

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


class VllmEngine:
    """The parts of vLLM's client of its engine that the routes use."""

    def __init__(self):
        self.calls = []
        self.renderer = self.engine_core = self

    async def clear_mm_cache_async(self):
        self.calls.append("clear")

    async def pause_scheduler_async(self, mode, clear_cache):
        self.calls.append(("pause", mode, clear_cache))


async def ask_vllm(engine, path, body, monkeypatch, key=b"Bearer right"):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    parts = [{"body": body[:5], "more_body": True}, {"body": body[5:]}]
    sent = []

    async def receive():
        return parts.pop(0) if parts else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "headers": [(b"authorization", key)], "path": path, "app": app}
    await RequireVllmKey(None)(scope, receive, send)
    return sent[0]["status"], sent[1].get("body")


async def test_rljob_s_routes_of_vllm_are_behind_the_key(monkeypatch):
    engine = VllmEngine()
    body = b'{"pause": {"mode": "keep", "clear_cache": true}}'
    assert (await ask_vllm(engine, "/rljob/update", body, monkeypatch, b"Bearer wrong"))[0] == 401
    assert engine.calls == []
    assert (await ask_vllm(engine, "/rljob/update", body, monkeypatch))[0] == 200
    assert engine.calls == ["clear", ("pause", "keep", True)]
