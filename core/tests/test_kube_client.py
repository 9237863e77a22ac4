"""Errors by response, lines and events of watches, replaced credentials, backoff."""

import asyncio
import random

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob.kube import errors
from rljob.kube.access import Access
from rljob.kube.client import ApiClient
from rljob.kube.resource_kinds import PODS, RLJOBS
from rljob.kube.watch import decode_event, split_lines
from rljob.protocol.backoff import Backoff


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", errors.NotFoundError),
        (409, "Conflict", errors.ConflictError),
        (409, "AlreadyExists", errors.AlreadyExistsError),
        (410, "Expired", errors.GoneError),
        (422, "Invalid", errors.InvalidError),
        (403, "Forbidden", errors.ForbiddenError),
        (429, "TooManyRequests", errors.TooManyRequestsError),
        (500, "InternalError", errors.UnavailableError),
        (503, "", errors.UnavailableError),
        (401, "Unauthorized", errors.UnauthorizedError),
        (418, "", errors.ApiError),
    ],
)
def test_status_and_reason_select_the_error_class(code, reason, kind):
    error = errors.error_of(code, msgspec.json.encode({"reason": reason, "message": "no"}), "3")
    assert type(error) is kind and error.message == "no" and error.retry_after == 3.0


def test_the_text_of_a_proxy_s_response_is_the_message():
    error = errors.error_of(502, b"<html>bad gateway")
    assert isinstance(error, errors.UnavailableError) and "bad gateway" in error.message


def test_paths_follow_the_api():
    assert PODS.path("n", "p") == "/api/v1/namespaces/n/pods/p"
    assert RLJOBS.path("n", "j", "status") == "/apis/rljob.dev/v1alpha1/namespaces/n/rljobs/j/status"
    assert RLJOBS.path() == "/apis/rljob.dev/v1alpha1/rljobs"
    assert RLJOBS.api_version == "rljob.dev/v1alpha1" and PODS.api_version == "v1"


class Stream:
    def __init__(self, *chunks):
        self.chunks = chunks

    async def iter_any(self):
        for chunk in self.chunks:
            yield chunk


async def test_lines_of_a_watch_are_complete_for_any_chunks():
    long = b"x" * 300_000
    chunks = [b'{"a"', b":1}\n", b"\n{}", b"\n" + long[:100_000], long[100_000:], b"\nrest"]
    assert [line async for line in split_lines(Stream(*chunks))] == [b'{"a":1}', b"{}", long]


def test_an_error_event_is_raised():
    assert decode_event(b'{"type": "ADDED", "object": {"a": 1}}').type == "ADDED"
    with pytest.raises(errors.GoneError, match="too old"):
        decode_event(b'{"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}')


async def test_a_rejected_token_is_read_again(tmp_path):
    (tmp_path / "token").write_text("old\n")
    counted = []

    async def answer(request):
        return web.json_response({}, status=200 if request.headers["Authorization"] == "Bearer new" else 401)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    timeout = aiohttp.ClientTimeout(total=5)
    async with TestServer(app) as server:
        access = Access(str(server.make_url("")).rstrip("/"), token_file=tmp_path / "token")
        async with ApiClient(access, "test", count=lambda verb, code: counted.append((verb, code))) as client:
            with pytest.raises(errors.UnauthorizedError):
                await client.send("get", "GET", PODS.path("n", "p"), {}, timeout)
            (tmp_path / "token").write_text("new\n")
            assert await client.send("get", "GET", PODS.path("n", "p"), {}, timeout) == b"{}"
    with pytest.raises(errors.UnavailableError, match="get /api/v1/namespaces/n/pods/p: no answer"):
        await client.send("get", "GET", PODS.path("n", "p"), {}, timeout)
    await client.close()
    assert counted == [("get", "401"), ("get", "200"), ("get", "error")]


async def test_delays_double_up_to_a_bound_and_restart_after_a_success(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    delays = Backoff()
    for _ in range(8):
        await delays.wait()
    delays.reset()
    await delays.wait()
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.5]
