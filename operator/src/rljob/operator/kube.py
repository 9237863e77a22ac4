"""Client of the Kubernetes API: the few verbs the operator needs, over one pool of connections.

Answers are given back as bytes: who reads them knows which fields it wants. Every request has a time-out and a bounded
answer. What is tried again here is only what cannot do harm: reads, and what the server says it did not handle (429).
Everything else is an error for the caller, who reconciles again later.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from rljob.kube.access import Access
from rljob.operator.errors import FencedError, TooManyRequestsError, UnavailableError, error_of
from rljob.operator.resources import Resource

FIELD_MANAGER = "rljob-operator"
PAGE = 500
"""Objects in a page of a list."""
TRIES = 3
LONGEST_WAIT_SECONDS = 10.0
"""Of what a server may ask for by Retry-After."""
STALL_SECONDS = 100.0
"""A watch without a byte for so long is dead: bookmarks come about once a minute."""
CLOSING_SECONDS = 0.1
"""TLS connections end a little later than they are closed; aiohttp's documentation says to give them a moment."""
_CONNECTION_ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


def _count_nothing(verb: str, code: str) -> None:
    """Count requests for nobody."""


class Client:
    """Requests to one API server.

    Args:
        access: where it is and who we are.
        connections: most requests at a time, watches not counted.
        timeout_s: longest time for one request.
        count: told verb and HTTP status ("error" if none came) of every request.
    """

    def __init__(
        self,
        access: Access,
        *,
        connections: int = 32,
        timeout_s: float = 15.0,
        count: Callable[[str, str], None] = _count_nothing,
    ) -> None:
        self._access = access
        self._slots = asyncio.Semaphore(connections)
        self._timeout = self._write_timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(5.0, timeout_s))
        self._count = count
        self._session: aiohttp.ClientSession | None = None
        self.may_write: Callable[[], bool] = lambda: True
        """Asked before every write but to Leases; see :mod:`rljob.operator.lease`."""
        self.writes: Counter[str] = Counter()
        """Writes that were sent, by verb and plural, Leases and Events too."""

    def limit_writes(self, seconds: float) -> None:
        """Have no write take longer than this, however long reads may."""
        total = min(seconds, self._timeout.total or seconds)
        self._write_timeout = aiohttp.ClientTimeout(total=total, connect=min(5.0, total))

    async def __aenter__(self) -> Client:
        # The limit is ours (semaphore): a watch holds a connection for minutes and must not take a request's place.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._access.security() or True, keepalive_timeout=60),
            headers={"Accept": "application/json", "User-Agent": FIELD_MANAGER},
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(CLOSING_SECONDS)

    async def get(self, resource: Resource, namespace: str, name: str) -> bytes:
        """Return an object."""
        return await self._request("get", "GET", resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        selector: str = "",
        fields: str = "",
        token: str = "",
        limit: int = PAGE,
    ) -> bytes:
        """Return one page of a list, read consistently. ``token``: metadata.continue of the page before."""
        query = {"limit": str(limit), "labelSelector": selector, "fieldSelector": fields, "continue": token}
        return await self._request("list", "GET", resource, namespace, query=query)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> bytes:
        """Make an object and return it as it is stored."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("create", "POST", resource, namespace, query=query, body=body)

    async def update(self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]) -> bytes:
        """Replace an object; with its resourceVersion in ``body`` only if it has not changed."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("update", "PUT", resource, namespace, name, query=query, body=body)

    async def apply(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> bytes:
        """Apply (server side, by force) and return the object. A uid in ``body`` must be the object's."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        kind = "application/apply-patch+yaml"
        return await self._request("apply", "PATCH", resource, namespace, name, subresource, query, body, kind)

    async def merge_patch(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> bytes:
        """Change some fields of an object and return it."""
        query = {"fieldManager": FIELD_MANAGER}
        kind = "application/merge-patch+json"
        return await self._request("patch", "PATCH", resource, namespace, name, subresource, query, body, kind)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> bytes:
        """Delete the object that has this uid; the garbage collector deletes what it owns."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        return await self._request("delete", "DELETE", resource, namespace, name, body=body)

    async def watch(
        self, resource: Resource, namespace: str, *, selector: str, version: str, seconds: int
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a watch that ends after ``seconds``, each an event.

        Raises:
            ApiError: it cannot be begun, or breaks off.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=STALL_SECONDS)
        try:
            async with self._open("GET", resource.path(namespace), query, None, "", timeout) as response:
                self._count("watch", str(response.status))
                if response.status >= 400:
                    raise error_of(response.status, await response.read(), response.headers.get("Retry-After"))
                async for line in _lines(response.content):
                    yield line
        except _CONNECTION_ERRORS as error:
            self._count("watch", "error")
            raise UnavailableError(0, "", _sentence("watching", resource, error)) from error

    async def _request(
        self,
        verb: str,
        method: str,
        resource: Resource,
        namespace: str,
        name: str = "",
        subresource: str = "",
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        path = resource.path(namespace, name, subresource)
        for attempt in range(TRIES):
            try:
                async with self._slots:
                    if method != "GET":
                        self._note_write(verb, resource)
                    return await self.send(verb, method, resource, path, query or {}, body, content_type)
            except TooManyRequestsError as error:
                if attempt == TRIES - 1 or error.retry_after > LONGEST_WAIT_SECONDS:
                    raise
                await asyncio.sleep(error.retry_after or 1.0)
            except UnavailableError:
                if method != "GET" or attempt == TRIES - 1:
                    raise
                await asyncio.sleep(0.1 * (attempt + 1))
        raise AssertionError("the last try returns or raises")

    def _note_write(self, verb: str, resource: Resource) -> None:
        if resource.plural != "leases" and not self.may_write():
            raise FencedError(f"no {verb} of {resource.plural}: this operator does not hold the lease any more")
        self.writes[f"{verb} {resource.plural}"] += 1

    async def send(
        self,
        verb: str,
        method: str,
        resource: Resource,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
    ) -> bytes:
        """Send one request and return the answer. Tests override this to inject faults.

        Raises:
            ApiError: as :func:`rljob.operator.errors.error_of` says; UnavailableError when no answer comes.
        """
        timeout = self._timeout if method == "GET" else self._write_timeout
        try:
            async with self._open(method, path, query, body, content_type, timeout) as response:
                answer: bytes = await response.read()
        except _CONNECTION_ERRORS as error:
            self._count(verb, "error")
            raise UnavailableError(0, "", _sentence(verb, resource, error)) from error
        self._count(verb, str(response.status))
        if response.status >= 400:
            raise error_of(response.status, answer, response.headers.get("Retry-After"))
        return answer

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        assert self._session is not None, "entered before it is used"
        headers = self._access.headers()
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


def _sentence(verb: str, resource: Resource, error: BaseException) -> str:
    what = str(error) or type(error).__name__
    return f"{verb} of {resource.plural}: no answer from the API server: {what}"


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: StreamReader.readline bounds them at 128 KiB, and an object may have 1.5 MiB."""
    parts: list[bytes] = []
    async for chunk in stream.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            parts.append(end)
            line = b"".join(parts)
            parts.clear()
            if line:
                yield line
        if rest:
            parts.append(rest)
