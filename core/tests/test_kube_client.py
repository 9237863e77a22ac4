"""Errors by response, lines and events of watches, replaced credentials, proxies, names of servers, backoff."""

import asyncio
import contextlib
import random
import ssl
from dataclasses import replace

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.tests.certificates import certificate
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


async def test_requests_go_through_the_proxy_of_the_kubeconfig_with_the_credentials():
    seen = []

    async def forward(request):
        seen.append((request.headers["Host"], request.headers["Authorization"], request.headers["User-Agent"]))
        return web.json_response({"from": "proxy"})

    app = web.Application()
    app.router.add_get("/{path:.*}", forward)
    async with TestServer(app) as proxy:
        access = Access("http://api.invalid:1", token="t", proxy=str(proxy.make_url("/")))
        async with ApiClient(access, "test") as client:
            answer = await client.send("get", "GET", PODS.path("n", "p"), {}, aiohttp.ClientTimeout(total=5))
    assert answer == b'{"from": "proxy"}' and seen == [("api.invalid:1", "Bearer t", "test")]


@contextlib.asynccontextmanager
async def https_server(path, key):
    """Serve {} with TLS on the loopback address; yield the URL."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(path, key)

    async def answer(request):
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_the_certificate_is_checked_for_the_name_of_tls_server_name(tmp_path):
    path, key = certificate(tmp_path / "server", "DNS:api.example")
    timeout = aiohttp.ClientTimeout(total=5)
    async with https_server(path, key) as url:
        named = Access(url, ssl.create_default_context(cafile=str(path)), server_name="api.example")
        async with ApiClient(named, "test") as client:
            assert await client.send("get", "GET", "/api", {}, timeout) == b"{}"
        async with ApiClient(replace(named, server_name=""), "test") as client:
            with pytest.raises(errors.UnavailableError, match="certificate"):
                await client.send("get", "GET", "/api", {}, timeout)


async def test_a_replaced_authority_is_read_again(tmp_path):
    path, key = certificate(tmp_path / "server", "DNS:api.example")
    other, _ = certificate(tmp_path / "other", "DNS:api.example")
    authority = tmp_path / "ca.crt"
    authority.write_bytes(other.read_bytes())
    timeout = aiohttp.ClientTimeout(total=5)
    async with https_server(path, key) as url:
        tls = ssl.create_default_context(cafile=str(authority))
        access = Access(url, tls, authority_file=authority, server_name="api.example")
        async with ApiClient(access, "test") as client:
            for _ in range(2):
                with pytest.raises(errors.UnavailableError, match="certificate"):
                    await client.send("get", "GET", "/api", {}, timeout)
            authority.write_bytes(path.read_bytes())
            with pytest.raises(errors.UnavailableError, match="certificate"):
                await client.send("get", "GET", "/api", {}, timeout)
            assert await client.send("get", "GET", "/api", {}, timeout) == b"{}"
