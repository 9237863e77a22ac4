"""/healthz, /readyz and /metrics of the operator, with limits for peers without a token.

kopf has a liveness server too, without a limit of its connections. It therefore listens on loopback only, and /healthz
here returns its answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rljob.operator.metrics import Metrics
from rljob.protocol.http_server import HttpServer
from rljob.protocol.startup import host_and_port

TEXT = "text/plain; charset=utf-8"
METHODS = ("GET", "HEAD")
KOPF_SECONDS = 4.0
"""Timeout of the request to kopf: below that of the kubelet's probe."""
KOPF_BYTES = 64 * 1024
"""Bytes of kopf's answer that are passed on; a user's probes may return anything."""

Application = Callable[[Any, Any, Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]
"""An ASGI application."""


def build_app(metrics: Metrics, ready: Callable[[], bool], liveness: str = "") -> Application:
    """Return the application.

    Args:
        ready: the caches are filled, or the operator is on standby.
        liveness: URL of kopf's liveness server, which answers after its start only; empty: it has none.
    """

    async def app(scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        if scope["path"] == "/healthz" and scope["method"] in METHODS and liveness:
            status, content_type, body = await _answer_of_kopf(liveness)
        else:
            status, content_type, body = _answer(scope["method"], scope["path"], metrics, ready)
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _answer(method: str, path: str, metrics: Metrics, ready: Callable[[], bool]) -> tuple[int, str, bytes]:
    """Return status, content type and body of the answer to a request."""
    if path not in ("/healthz", "/readyz", "/metrics"):
        return 404, TEXT, b"not found\n"
    if method not in METHODS:
        return 405, TEXT, b"use GET\n"
    if path == "/metrics":
        return 200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry)
    if path == "/readyz" and not ready():
        return 503, TEXT, b"the caches are not filled yet\n"
    return 200, TEXT, b"ok\n"


async def _answer_of_kopf(url: str) -> tuple[int, str, bytes]:
    """Return status, content type and body of kopf's liveness server; 503 if it does not answer."""
    timeout = aiohttp.ClientTimeout(total=KOPF_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status, response.headers.get("Content-Type", TEXT), await response.content.read(KOPF_BYTES)
    except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
        return 503, TEXT, f"kopf does not answer: {type(error).__name__}\n".encode()


@asynccontextmanager
async def serving(app: Application, listen: str, **options: Any) -> AsyncIterator[int]:
    """Serve ``app`` at host:port while entered; yield the port. ``options``: of :class:`HttpServer`.

    Raises:
        OSError: the address is in use or not local.
    """
    host, port = host_and_port(listen)
    sockets = await _bind(host, int(port))
    server = HttpServer(app, signals=False, lifespan="off", log_config=None, log_level="warning", **options)
    running, listening = (asyncio.create_task(each) for each in (server.serve(sockets), server.listening.wait()))
    try:
        await asyncio.wait((running, listening), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        listening.cancel()
        await running


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to all addresses of ``host``; without a host, to all addresses of this machine."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    try:
        for family, kind, protocol, _, address in found:
            try:
                sockets.append(socket.socket(family, kind, protocol))
            except OSError as error:  # this kernel has no IPv6
                problem = error
                continue
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sockets[-1].bind(address)
    except OSError:
        for each in sockets:
            each.close()
        raise
    if problem is not None and not sockets:
        raise problem
    return sockets
