"""Requests to an engine's HTTP server, with the errors of :mod:`rljob.rollout.adapters.base`."""

from __future__ import annotations

from typing import Any, TypeVar

import aiohttp
import msgspec

from rljob.protocol.frames import DECODE_ERRORS
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError

KEEP_ALIVE_SECONDS = 600
"""Time that the client keeps idle connections. A server must keep them longer; otherwise a request may use a connection
that the server is closing."""
MAX_ERROR_BYTES = 500  # of a server's error that an exception message repeats

_encode = msgspec.json.Encoder().encode
_Decoded = TypeVar("_Decoded")


class EngineHttp:
    """Connections to one server. Needs a running event loop. Requests have no time limit: the caller sets it.

    Args:
        engine: name of the engine, for errors.
        url: of the server, without a trailing slash.
        key: sent as ``Authorization: Bearer KEY``.
    """

    def __init__(self, engine: str, url: str, key: str) -> None:
        self._engine = engine
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            raise_for_status=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def connect(self, path: str) -> Any:
        """Return a context manager of a WebSocket connection to ``path``: without compression, with messages of any
        length."""
        return self._session.ws_connect(self._url + path, compress=0, max_msg_size=0)

    async def answers(self, path: str) -> bool:
        """Return whether the server answers GET ``path`` with 200."""
        try:
            async with self._session.get(self._url + path) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def post(self, path: str, body: Any = None) -> bytes:
        """POST ``body`` as JSON (None: no body) and return the body of the response.

        Raises:
            BadRequestError: the server answered 4xx.
            EngineGoneError: the server answered with another error, or not at all.
        """
        try:
            async with self._session.post(self._url + path, data=None if body is None else _encode(body)) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"{self._engine} does not answer: {error}") from None
        if response.status == 200:
            return content
        reason = f"{self._engine} answered {response.status}: {content[:MAX_ERROR_BYTES].decode(errors='replace')}"
        raise BadRequestError(reason) if 400 <= response.status < 500 else EngineGoneError(reason)

    async def call(self, path: str, body: Any, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded:
        """POST ``body`` as JSON and return the decoded response.

        Raises:
            BadRequestError, EngineGoneError: see :meth:`post`; EngineGoneError also if the response cannot be decoded.
        """
        try:
            return decoder.decode(await self.post(path, body))
        except DECODE_ERRORS as error:
            raise EngineGoneError(f"the answer of {self._engine} cannot be read: {error}") from None
