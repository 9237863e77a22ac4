"""The HTTP routes of a reward service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI, Request, Response

from rljob.protocol.heartbeat import beating
from rljob.protocol.http_server import token_check
from rljob.protocol.score_messages import ScoreItem, ScoreReply, ScoreRequest, excess
from rljob.protocol.service_routes import (
    NO_TOKEN,
    RequestRejectedError,
    add_probes,
    busy,
    check_marks,
    read_body,
    unavailable,
)
from rljob.rewards.metrics import REGISTRY, REJECTED
from rljob.rewards.pool import Pool

_decoder = msgspec.json.Decoder(ScoreRequest)
_encoder = msgspec.json.Encoder()


LISTEN_SECONDS = 5.0
"""The service begins to listen when a worker is set up, but at the latest after this time."""
MAX_WAITING = 4096
"""Samples that wait for a worker. With more, a request gets status 429; the runner repeats it."""


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
            with contextlib.suppress(TimeoutError):  # then it listens, and refuses requests
                async with asyncio.timeout(LISTEN_SECONDS):
                    await pool.wait_until_ready()
            with beating():
                yield

    app = FastAPI(title="rljob reward", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        try:
            if token and not is_token(request.headers.get("authorization", "")):
                raise RequestRejectedError(401, NO_TOKEN)
            if pool.waiting >= MAX_WAITING:
                raise busy(f"{pool.waiting:,} samples wait for a worker; repeat the request later, or add processes")
            items = _decode(await read_body(request))
            if items and pool.not_ready:
                raise unavailable(f"reward {pool.name} cannot score now: {pool.not_ready}")
        except RequestRejectedError as error:
            REJECTED.inc()
            return error.response()
        reply = ScoreReply(await pool.score(items), pool.deterministic)
        return Response(_encoder.encode(reply), media_type="application/json")

    add_probes(app, REGISTRY, lambda: pool.not_ready)
    return app


def _decode(body: bytes) -> list[ScoreItem]:
    """Return the items of a body. msgspec takes a third less time than a pydantic model, on large samples half."""
    check_marks(body, "fewer samples or smaller rows")
    try:
        items = _decoder.decode(body).items
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        remedy = "send the JSON of rljob.protocol.score_messages.ScoreRequest"
        raise RequestRejectedError(422, f"the body is not a ScoreRequest: {error}; {remedy}") from None
    if sentence := excess(items):
        raise RequestRejectedError(413, sentence)
    return items
