"""The engine of a frozen pool: serves a model that is not trained to rewards and loops.

The engine's server listens on loopback with a key of its own. This process listens for them, with the token of
the pools and the limits of all listeners, and forwards requests for :data:`PATHS`. It has no connection to the
coordinator: its engine gets no weights and no samples.

A client learns from the status whether its request reached an engine. 503: there is no server now, and the next one is
starting. 500: the server ended while it worked on the request. 429: too many requests wait. Others are the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from fastapi import FastAPI, Request, Response

from rljob.api.roles import Rollout
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.health_probe import record_ready
from rljob.protocol.http_server import HttpServer, token_check
from rljob.protocol.service_routes import RETRY_SECONDS, RequestRejectedError, busy, read_body
from rljob.protocol.startup import host_and_port
from rljob.rollout.engine_restarts import EngineRestarts
from rljob.rollout.supervisor import EngineProcess

log = logging.getLogger(__name__)

POOLING_PATHS = ("/classify", "/pooling")
PATHS = ("/v1/chat/completions", "/v1/completions", *POOLING_PATHS)
"""Paths of POST requests that are forwarded."""
MAX_REQUEST_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
WAITING_PER_SLOT = 16
"""Requests for each of the pool's maxConcurrency slots, one of them in work. With more, a request gets status 429."""
NO_TOKEN = "this request requires the token that rljob gave to rewards and runners"
DRAIN_SECONDS = 20 if os.environ.get("RLJOB_INSTANCE") else 1
"""For requests in work when this process ends; more in a pod, whose requests other pods take over."""


class FrozenEngine:
    """The listener of one engine, and its server.

    Args:
        pool: the manifest's entry.
        start_engine: starts a server of the pool.
        listen: HOST:PORT for them.
        token: that requests send as bearer token.
        stall_seconds: a server that answers nothing for this long, although it has requests, is replaced.
    """

    def __init__(
        self,
        pool: Rollout,
        start_engine: Callable[[], Awaitable[EngineProcess]],
        listen: str,
        token: str,
        stall_seconds: float,
    ) -> None:
        self._pool = pool
        self._stall_seconds = stall_seconds
        self._servers = EngineRestarts(start_engine, self._serve, self._report)
        self._session: aiohttp.ClientSession | None = None  # to a healthy server
        self._replace: asyncio.Future[str] | None = None
        self._in_flight = 0
        self._path = PATHS[0]  # of the last request
        self._answered = 0.0  # time of the loop
        self._listening: asyncio.Task[None] | None = None
        host, port = host_and_port(listen)
        check = token_check([token])
        self.server = HttpServer(
            build_app(self, check),
            HttpLimits(body_bytes=MAX_REQUEST_BYTES),
            check,
            signals=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            host=host,
            port=int(port),
            log_config=None,
            log_level="warning",
        )

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            EngineStartError: see :meth:`EngineRestarts.run`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._servers.run())
                tasks.create_task(self._watch())
                self._listening = tasks.create_task(self.server.serve())
        finally:
            await self._servers.stop()

    async def leave(self) -> None:
        """Accept no more requests; return when those in flight are answered, or after DRAIN_SECONDS."""
        record_ready(False)
        self.server.should_exit = True
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=DRAIN_SECONDS + 1)

    @property
    def model(self) -> str:
        """Name of the model in requests: that of the pool."""
        return self._pool.name

    async def forward(self, path: str, body: bytes) -> Response:
        """Return the server's answer to a request.

        Raises:
            RequestRejectedError: there is none; see the module.
        """
        session, engine = self._session, self._servers.engine
        if session is None or engine is None:
            raise _away("the engine is starting; repeat the request")
        if self._in_flight >= WAITING_PER_SLOT * self._pool.max_concurrency:
            raise busy(f"{self._in_flight:,} requests wait for the engine; repeat the request later")
        if not self._in_flight:
            self._note_answer()
        self._in_flight += 1
        self._path = path
        try:
            async with session.post(f"{engine.url}{path}", data=body) as response:
                content = await _read(response.content)
        except aiohttp.ClientConnectorError as error:
            raise _away(f"the engine does not answer: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestRejectedError(500, f"the engine ended while it worked on the request: {error}") from None
        finally:
            self._in_flight -= 1
        self._note_answer()
        if response.status >= 500 and not await engine.client.healthy():
            self._request_replacement(engine.explain("the engine inside the server is dead"))
        return Response(content, response.status, media_type=response.content_type)

    async def _serve(self, engine: EngineProcess) -> str:
        """Forward requests to a healthy server until it ends or is replaced; return the reason."""
        self._replace = asyncio.get_running_loop().create_future()
        ended = asyncio.create_task(engine.wait_ended())
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {engine.key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._session = session
        record_ready(True)
        log.info("serving the model %s", self.model)
        either: set[asyncio.Future[Any]] = {ended, self._replace}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            record_ready(False)
            self._session = None
            await session.close()  # ends its requests
        return ended.result() if ended.done() and not ended.cancelled() else self._replace.result()

    def _report(self, reason: str, last_lines: str, starting: bool, final: bool) -> None:
        """The log has the reason already, and the server's own lines."""

    def _request_replacement(self, reason: str) -> None:
        if self._replace is not None and not self._replace.done():
            self._replace.set_result(reason)

    def _note_answer(self) -> None:
        self._answered = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        """Replace a server that has requests and answers none. A long answer is no stall: if no request has ended
        during half of ``stall_seconds``, the server must answer a request of one token in the other half."""
        half = self._stall_seconds / 2
        while True:
            await asyncio.sleep(half / 4)
            session, engine = self._session, self._servers.engine
            silent = asyncio.get_running_loop().time() - self._answered
            if not self._in_flight or silent < half or session is None or engine is None:
                continue
            path, fields = _probe(self._path)
            probe = msgspec.json.encode({"model": self.model} | fields)
            with contextlib.suppress(aiohttp.ClientError, OSError):  # its end is noticed elsewhere
                try:
                    async with asyncio.timeout(half), session.post(f"{engine.url}{path}", data=probe):
                        self._note_answer()
                except TimeoutError:
                    if session is self._session:
                        self._request_replacement(
                            f"the engine answered nothing for {self._stall_seconds:g} s (failurePolicy.stallSeconds)"
                        )


def _probe(path: str) -> tuple[str, dict[str, Any]]:
    """Return path and fields of a small request that needs the engine; a model either generates or classifies."""
    if path in POOLING_PATHS:
        return path, {"input": [0]}
    return "/v1/completions", {"prompt": [0], "max_tokens": 1}


def _away(sentence: str) -> RequestRejectedError:
    """Return the refusal of a request that reached no engine."""
    return RequestRejectedError(503, sentence, {"Retry-After": RETRY_SECONDS})


def build_app(engine: FrozenEngine, is_token: Callable[[str], bool]) -> FastAPI:
    """Return the application of the listener."""
    app = FastAPI(title="rljob frozen pool", docs_url=None, redoc_url=None, openapi_url=None)

    async def forward(request: Request) -> Response:
        try:
            _check_token(request)
            body = await read_body(request)
            return await _unless_left(request, engine.forward(request.url.path, body))
        except RequestRejectedError as error:
            return error.response()

    async def models(request: Request) -> Response:
        try:
            _check_token(request)
        except RequestRejectedError as error:
            return error.response()
        listed = {"object": "list", "data": [{"id": engine.model, "object": "model", "owned_by": "rljob"}]}
        return Response(msgspec.json.encode(listed), media_type="application/json")

    def _check_token(request: Request) -> None:
        if not is_token(request.headers.get("authorization", "")):
            raise RequestRejectedError(401, NO_TOKEN)

    for path in PATHS:
        app.add_api_route(path, forward, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    return app


async def _unless_left(request: Request, answer: Awaitable[Response]) -> Response:
    """Return an answer; drop its request to the engine when the client leaves.

    Raises:
        RequestRejectedError: see :meth:`FrozenEngine.forward`, or the client has left.
    """
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise RequestRejectedError(499, "the client has left")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Return the body of an answer.

    Raises:
        RequestRejectedError: it is too long.
    """
    parts, size = [], 0
    while part := await content.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise RequestRejectedError(
                413, f"the answer has more than {MAX_ANSWER_BYTES:,} bytes; ask for fewer tokens"
            )
    return b"".join(parts)
