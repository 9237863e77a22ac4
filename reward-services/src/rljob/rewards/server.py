"""The HTTP routes of a reward service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from rljob.protocol.heartbeat import beating
from rljob.protocol.http_server import token_check
from rljob.protocol.score_messages import ScoreItem, ScoreReply, ScoreRequest, excess
from rljob.rewards.metrics import REGISTRY, REJECTED
from rljob.rewards.pool import Pool

_decoder = msgspec.json.Decoder(ScoreRequest)
_encoder = msgspec.json.Encoder()


MAX_WAITING = 4096
"""Samples that wait for a worker. With more, a request gets status 429; the runner repeats it."""
RETRY_SECONDS = "1"


class RequestRejectedError(Exception):
    """A request is answered with ``status`` and this sentence."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


def build_app(pool: Pool, token: str = "") -> FastAPI:
    """Return the application. It enters ``pool`` at startup and leaves it at shutdown.

    Args:
        pool: scores the samples.
        token: that requests for scores must send as bearer token; empty: none.
    """
    is_token = token_check([token])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            with beating():
                yield

    app = FastAPI(title="rljob reward", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        try:
            if token and not is_token(request.headers.get("authorization", "")):
                raise RequestRejectedError(401, "this request requires the token that rljob gave to the job's runner")
            if pool.waiting >= MAX_WAITING:
                busy = f"{pool.waiting:,} samples wait for a worker; repeat the request later, or add processes"
                raise RequestRejectedError(429, busy, {"Retry-After": RETRY_SECONDS})
            items = _decode(await _read(request))
        except RequestRejectedError as error:
            REJECTED.inc()
            return Response(f"{error}\n", error.status, error.headers, media_type="text/plain")
        return Response(_encoder.encode(ScoreReply(await pool.score(items))), media_type="application/json")

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        """Always 200: the reward is loaded before the service listens."""
        return Response("ok\n", media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return app


async def _read(request: Request) -> bytes:
    """Return the body, whose length :class:`rljob.protocol.http_server.HttpServer` bounds."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise RequestRejectedError(400, "the body is incomplete") from None


def _decode(body: bytes) -> list[ScoreItem]:
    """Return the items of a body. msgspec takes a third less time than a pydantic model, on large samples half."""
    try:
        items = _decoder.decode(body).items
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        remedy = "send the JSON of rljob.protocol.score_messages.ScoreRequest"
        raise RequestRejectedError(422, f"the body is not a ScoreRequest: {error}; {remedy}") from None
    if sentence := excess(items):
        raise RequestRejectedError(413, sentence)
    return items
