"""Asynchronous client of the Kubernetes API (aiohttp): requests, watches, and one pool of connections.

Responses are bytes; the caller decodes the fields that it needs. This client never retries: whether a retry is safe
depends on the request, which the caller knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Self

import aiohttp
import msgspec

from rljob.kube.access import Access
from rljob.kube.errors import UnavailableError, error_of
from rljob.kube.http_session import open_session
from rljob.kube.watch import split_lines

STALL_SECONDS = 100.0
"""A watch without a byte for this time is broken: the API server sends bookmarks about once a minute."""
CONNECT_SECONDS = 10.0
CLOSING_SECONDS = 0.1
"""TLS connections end shortly after ``close()`` returns; aiohttp's documentation recommends a short sleep."""
UNAUTHORIZED = 401
FIRST_ERROR = 400
_CONNECTION_ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


def _no_count(verb: str, code: str) -> None:
    """Default of ``count``."""


class ApiClient:
    """Requests to one API server. Connections are opened on demand; :meth:`close` closes them.

    Args:
        access: address and credentials.
        agent: value of the header User-Agent.
        count: called with verb and HTTP status ("error" if there is no response) after every request.
    """

    def __init__(self, access: Access, agent: str, *, count: Callable[[str, str], None] = _no_count) -> None:
        self._access = access
        self._agent = agent
        self._count = count
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. A later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(CLOSING_SECONDS)

    async def send(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """Send one request and return the body of the response.

        Args:
            verb: Kubernetes verb (get, list, create, …), for metrics and errors.
            method: HTTP method.
            path: see :meth:`rljob.kube.resource_kinds.Resource.path`.
            query: parameters; empty values are omitted.
            timeout: limit for the whole request.
            body: object, which is encoded as JSON.
            content_type: content type of ``body``.

        Raises:
            ApiError: see :func:`rljob.kube.errors.error_of`; UnavailableError if there is no response.
        """
        try:
            async with self._open(method, path, query, timeout, body, content_type) as response:
                answer: bytes = await response.read()
        except _CONNECTION_ERRORS as error:
            raise self._unavailable(verb, path, error) from error
        self._count(verb, str(response.status))
        if response.status >= FIRST_ERROR:
            raise self._refused(response, answer)
        return answer

    async def watch(
        self, path: str, query: Mapping[str, str], *, version: str, seconds: int, stall_seconds: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch. Each line is an event (see :mod:`rljob.kube.watch`).

        Args:
            path: path of a collection.
            query: selectors.
            version: resourceVersion at which the watch starts.
            seconds: time after which the server ends the watch.
            stall_seconds: maximum time without a byte; STALL_SECONDS if None.

        Raises:
            ApiError: the API server refuses the watch, or the connection is lost.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
            **query,
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=stall_seconds or STALL_SECONDS)
        counted = False
        try:
            async with self._open("GET", path, query, timeout, None, "") as response:
                self._count("watch", str(response.status))
                counted = True
                if response.status >= FIRST_ERROR:
                    raise self._refused(response, await response.read())
                async for line in split_lines(response.content):
                    yield line
        except _CONNECTION_ERRORS as error:
            raise self._unavailable("watch", path, error, counted=counted) from error

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        body: Mapping[str, Any] | None,
        content_type: str,
    ) -> Any:
        if self._session is None or self._session.closed:
            self._session = open_session(self._access, self._agent)
        headers = {}
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = msgspec.json.encode(body)
        return self._session.request(
            method,
            self._access.server + path,
            params={key: value for key, value in query.items() if value},
            data=data,
            headers=headers,
            timeout=timeout,
        )

    def _refused(self, response: aiohttp.ClientResponse, body: bytes) -> Exception:
        if response.status == UNAUTHORIZED:
            self._access.forget_credentials()  # the token may have been replaced before it expired
        return error_of(response.status, body, response.headers.get("Retry-After"))

    def _unavailable(self, verb: str, path: str, error: BaseException, *, counted: bool = False) -> UnavailableError:
        if not counted:
            self._count(verb, "error")
        cause = str(error) or type(error).__name__
        return UnavailableError(0, "", f"{verb} {path}: no answer from the API server: {cause}")
