"""The HTTP routes of an environment service; :mod:`rljob.protocol.episode_messages` describes the protocol."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from rljob.environments.metrics import REGISTRY, REJECTED
from rljob.environments.sdk_types import EpisodeError
from rljob.environments.session_table import SessionTable
from rljob.protocol.episode_messages import (
    MAX_ACTION,
    SESSION_PATTERN,
    OpenSession,
    StepRequest,
)
from rljob.protocol.heartbeat import beating
from rljob.protocol.http_server import token_check
from rljob.protocol.service_routes import NO_TOKEN, RequestRejectedError, add_probes, check_marks, read_body

_open_decoder = msgspec.json.Decoder(OpenSession)
_step_decoder = msgspec.json.Decoder(StepRequest)
_session_name = re.compile(SESSION_PATTERN)
Message = TypeVar("Message")
Answer = Callable[[Request], Awaitable[bytes]]

EXPIRY_SECONDS = 1.0
FAILED = 500
TOO_SLOW = 504


def build_session_app(table: SessionTable, token: str = "") -> FastAPI:
    """Return the application. It ends all sessions at shutdown.

    Args:
        table: the sessions.
        token: that requests must send as bearer token; empty: none.
    """
    is_token = token_check([token])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        expiring = asyncio.create_task(_keep_expiring(table))
        with beating():
            yield
        expiring.cancel()
        await table.close_all()

    async def open_session(request: Request) -> bytes:
        return await table.open(_checked_opening(_decode(_open_decoder, await read_body(request))))

    async def step(request: Request) -> bytes:
        message = _decode(_step_decoder, await read_body(request))
        if len(message.action) > MAX_ACTION:
            raise RequestRejectedError(
                413, f"the action has {len(message.action):,} characters; send at most {MAX_ACTION:,}"
            )
        return await table.step(request.path_params["session"], message)

    async def close(request: Request) -> bytes:
        table.close(request.path_params["session"])
        return b"{}"

    def route(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            try:
                if token and not is_token(request.headers.get("authorization", "")):
                    raise RequestRejectedError(401, NO_TOKEN)
                return Response(await answer(request), media_type="application/json")
            except RequestRejectedError as error:
                REJECTED.inc()
                return error.response()
            except EpisodeError as error:
                return Response(f"{error}\n", TOO_SLOW if error.hung else FAILED, media_type="text/plain")

        return respond

    app = FastAPI(title="rljob environment", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    # Routes of Starlette: those of FastAPI inspect and validate each call, which takes longer than a step of a game.
    app.add_route("/v1/sessions/{session}/steps", route(step), methods=["POST"])
    app.add_route("/v1/sessions", route(open_session), methods=["POST"])
    app.add_route("/v1/sessions/{session}", route(close), methods=["DELETE"])
    add_probes(app, REGISTRY)
    return app


async def _keep_expiring(table: SessionTable) -> None:
    while True:
        await asyncio.sleep(EXPIRY_SECONDS)
        table.expire()


def _decode(decoder: msgspec.json.Decoder[Message], body: bytes) -> Message:
    check_marks(body, "a smaller row")
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        raise RequestRejectedError(
            422, f"the body is not what the path requires: {error}; docs/environment-openapi.json describes it"
        ) from None


def _checked_opening(message: OpenSession) -> OpenSession:
    if not _session_name.fullmatch(message.session):
        raise RequestRejectedError(422, f"the name of the session does not match {SESSION_PATTERN}")
    return message
