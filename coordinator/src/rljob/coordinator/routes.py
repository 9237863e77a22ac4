"""The HTTP and WebSocket endpoints of the coordinator."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Response, WebSocket, WebSocketDisconnect
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rljob.coordinator.connection import SocketConnection
from rljob.coordinator.message_router import DECODERS, MessageRouter
from rljob.coordinator.metrics import REFUSED, REGISTRY, RunCollector
from rljob.coordinator.run import Run
from rljob.coordinator.shard_route import shard_route
from rljob.coordinator.status_report import status_of, without_reasons
from rljob.protocol.run_status import encode_status

log = logging.getLogger(__name__)


def build_app(run: Run, tokens: Mapping[str, str]) -> FastAPI:
    """Return the application. ``tokens``: role → token."""
    app = FastAPI(title="rljob coordinator", docs_url=None, redoc_url=None, openapi_url=None)
    router = MessageRouter(run)
    REGISTRY.register(RunCollector(run))

    def allowed(role: str, authorization: str) -> bool:
        expected = tokens.get(role)
        return expected is not None and hmac.compare_digest(authorization.encode(), f"Bearer {expected}".encode())

    app.router.routes.append(shard_route(run, allowed))

    @app.websocket("/v1/connect/{role}")
    async def connect(socket: WebSocket, role: str) -> None:
        if role not in DECODERS or not allowed(role, socket.headers.get("authorization", "")):
            REFUSED.labels(role if role in DECODERS else "unknown").inc()
            await socket.close()  # before accept: HTTP 403
            return
        await socket.accept()
        await _serve(router, SocketConnection(role, socket), socket)

    @app.get("/v1/status")
    async def status(authorization: Annotated[str, Header()] = "") -> Response:
        return _status(run, reasons=allowed("owner", authorization))

    @app.post("/v1/suspend")
    async def suspend(authorization: Annotated[str, Header()] = "") -> Response:
        if not allowed("owner", authorization):
            REFUSED.labels("owner").inc()
            raise HTTPException(401, "this request requires the owner's token")
        run.suspend()
        return _status(run)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        return Response("ok\n", media_type="text/plain")

    return app


def add_status(app: FastAPI, run: Run) -> None:
    """Add GET /v1/status for readers who may read prompts and answers."""

    @app.get("/v1/status")
    async def status() -> Response:
        return _status(run)


def _status(run: Run, reasons: bool = True) -> Response:
    """Return the status. ``reasons``: also why samples failed, which may quote prompts and answers."""
    status = status_of(run)
    return Response(encode_status(status if reasons else without_reasons(status)), media_type="application/json")


async def _serve(router: MessageRouter, connection: SocketConnection, socket: WebSocket) -> None:
    """Receive frames until the connection closes."""
    sender = asyncio.create_task(connection.send_loop())
    try:
        while True:
            router.receive(connection, await _receive(socket))
    except WebSocketDisconnect:
        log.info("%s %s disconnected", connection.role, connection.instance)
    finally:
        sender.cancel()
        router.lost(connection)


async def _receive(socket: WebSocket) -> bytes:
    """Return the next frame. WebSocketProtocol turns a text frame into bytes, which the router then rejects."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000), message.get("reason"))
    data: bytes = message["bytes"]
    return data
