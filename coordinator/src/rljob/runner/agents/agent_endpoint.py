"""The endpoint of the runner for agent programs: HTTP on loopback, like OpenAI's API.

Each program has a key of its own, which selects its sample; it ends with the program.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ExceptionHandler

from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.http_server import HttpServer
from rljob.runner.agents.agent_session import REPEATED, AgentSession
from rljob.runner.agents.chat_reply import Answer, completion, events
from rljob.runner.agents.chat_request import ChatCall, read_call
from rljob.runner.agents.refused_call import RefusedCallError

HOST = "127.0.0.1"
MAX_BODY_BYTES = 16 << 20
MOST_CONNECTIONS = 4096
"""Without a key in the header: programs may have it in the path."""
IDLE_SECONDS = 600
"""Clients keep connections. If the server closed one while a client sends a request, the client would send it again."""
MOST_DESCRIPTORS = 65_536
"""The limit of the process is raised to this number, if it may be: both ends of a connection may be in this process."""
COMMENT_SECONDS = 10.0
"""Between two comments in a stream whose answer is not complete."""


class AgentEndpoint:
    """The sessions of the programs that run, by key."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._server = HttpServer(
            self._app(),
            HttpLimits(body_bytes=MAX_BODY_BYTES, idle_seconds=IDLE_SECONDS, connections=MOST_CONNECTIONS),
            self._is_key,
            host=HOST,
            port=0,
            log_config=None,
            signals=False,
        )
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[AgentEndpoint]:
        """Serve; ``url`` is the base URL for clients."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_DESCRIPTORS)), hard))
        serving = asyncio.create_task(self._server.serve())
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if serving.done():
            await serving
            raise RuntimeError("the endpoint for agents cannot listen")
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://{HOST}:{port}/v1"
        try:
            yield self
        finally:
            self._server.should_exit = True
            await serving

    def begin(self, session: AgentSession) -> str:
        """Return the key of a new program."""
        key = f"rljob-{secrets.token_hex(16)}"
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """End the session of a key, if it has not ended: later calls are refused."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def _is_key(self, authorization: str) -> bool:
        return authorization.removeprefix("Bearer ") in self._sessions

    def _app(self) -> FastAPI:
        app = FastAPI(title="rljob agents", docs_url=None, redoc_url=None, openapi_url=None)
        for prefix in ("", "/sessions/{key}"):
            app.add_route(f"{prefix}/v1/chat/completions", self._chat, methods=["POST"])
            app.add_route(f"{prefix}/v1/models", self._models, methods=["GET"])
        app.add_route("/{path:path}", self._unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        refuse: ExceptionHandler = _refuse
        app.add_exception_handler(RefusedCallError, refuse)
        return app

    def _session(self, request: Request) -> AgentSession:
        """Return the session of the key in the header, or in the path for programs that set another key."""
        session = self._sessions.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        session = session or self._sessions.get(request.path_params.get("key", ""))
        if session is None:
            raise RefusedCallError(
                "the API key is of no agent that runs; use the one that the agent got, until it ends",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _chat(self, request: Request) -> Response:
        session, body = self._session(request), await request.body()
        call = read_call(body)
        repeated = request.headers.get(REPEATED, "0") != "0"
        answering = asyncio.ensure_future(session.complete(call, body, repeated))
        if call.stream:
            return await _stream(answering, call)
        return Response(completion(await answering, call), media_type="application/json")

    async def _models(self, request: Request) -> Response:
        names = ["policy", *self._session(request).pools]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "rljob"} for name in names]
        return Response(msgspec.json.encode({"object": "list", "data": models}), media_type="application/json")

    async def _unknown(self, request: Request) -> Response:
        raise RefusedCallError(
            f"there is no {request.method} {request.url.path}; use POST /v1/chat/completions", status=404
        )


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedCallError)
    return error.response()


async def _stream(answering: asyncio.Future[Answer], call: ChatCall) -> Response:
    """Return the answer as a stream. It has comments until the answer is complete; an error in the first seconds is no
    stream, a later one is an event."""
    await asyncio.wait({answering}, timeout=COMMENT_SECONDS)
    if answering.done():
        await answering

    async def body() -> AsyncIterator[bytes]:
        while not answering.done():
            yield b": the answer is generated\n\n"
            await asyncio.wait({answering}, timeout=COMMENT_SECONDS)
        try:
            for event in events(await answering, call):
                yield event
        except RefusedCallError as error:
            yield b"data: " + error.body() + b"\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")
