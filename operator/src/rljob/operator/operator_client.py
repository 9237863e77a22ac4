"""Kubernetes client of the operator: verbs, limits, retries, and the fencing of writes.

A request is retried here only if that is safe: reads, and requests that the server did not handle (429). Every other
failure is an error for the caller, which reconciles again later. Answers are bytes: the caller decodes what it needs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from rljob.kube.access import Access
from rljob.kube.client import ApiClient
from rljob.kube.errors import TooManyRequestsError, UnavailableError
from rljob.kube.resource_kinds import APPLY_PATCH, MERGE_PATCH, Resource
from rljob.operator.object_kinds import FIELD_MANAGER

PAGE = 500
"""Objects in a page of a list."""
TRIES = 3
LONGEST_WAIT_SECONDS = 10.0
"""With a longer Retry-After the caller gets the error."""


class FencedError(Exception):
    """A write was not sent, because this operator does not hold the lease any more."""


def _no_count(verb: str, code: str) -> None:
    """Default of ``count``."""


class OperatorClient:
    """Requests to one API server.

    Args:
        access: address and credentials.
        connections: concurrent requests, watches not counted.
        timeout_s: longest time for one request.
        count: called after every request with verb and HTTP status ("error" without a response).
    """

    def __init__(
        self,
        access: Access,
        *,
        connections: int = 32,
        timeout_s: float = 15.0,
        count: Callable[[str, str], None] = _no_count,
    ) -> None:
        self._api = ApiClient(access, FIELD_MANAGER, count=count)
        self._slots = asyncio.Semaphore(connections)
        self._timeout = self._write_timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(5.0, timeout_s))
        self.may_write: Callable[[], bool] = lambda: True
        """Called before every write except to Leases; see :mod:`rljob.operator.lease`."""
        self.writes: Counter[str] = Counter()
        """Writes that were sent, by verb and plural, including Leases and Events."""

    def limit_writes(self, seconds: float) -> None:
        """Set an upper bound for the duration of writes; reads may take longer."""
        total = min(seconds, self._timeout.total or seconds)
        self._write_timeout = aiohttp.ClientTimeout(total=total, connect=min(5.0, total))

    async def __aenter__(self) -> OperatorClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._api.close()

    async def version(self) -> bytes:
        """Return what the API server reports as its version."""
        return await self._api.send("get", "GET", "/version", {}, self._timeout)

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
        """Return one page of a list, read consistently. ``token``: metadata.continue of the previous page."""
        query = {"limit": str(limit), "labelSelector": selector, "fieldSelector": fields, "continue": token}
        return await self._request("list", "GET", resource, namespace, query=query)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> bytes:
        """Create an object and return the stored object."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("create", "POST", resource, namespace, query=query, body=body)

    async def update(self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]) -> bytes:
        """Replace an object; if ``body`` has a resourceVersion, only if the object has not changed."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("update", "PUT", resource, namespace, name, query=query, body=body)

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        subresource: str = "",
        manager: str = FIELD_MANAGER,
    ) -> bytes:
        """Server-side apply with force; return the object. A uid in ``body`` must be the uid of the object."""
        query = {"fieldManager": manager, "force": "true"}
        return await self._request("apply", "PATCH", resource, namespace, name, subresource, query, body, APPLY_PATCH)

    async def merge_patch(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> bytes:
        """Change some fields of an object by a merge patch, and return the object."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("patch", "PATCH", resource, namespace, name, subresource, query, body, MERGE_PATCH)

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> bytes:
        """Delete the object with this uid; the garbage collector deletes its dependents. ``grace_seconds``: 0 deletes a
        pod without waiting for its kubelet."""
        body: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._request("delete", "DELETE", resource, namespace, name, body=body)

    def watch(
        self, resource: Resource, namespace: str, *, selector: str, version: str, seconds: int
    ) -> AsyncIterator[bytes]:
        """Return the lines of a watch, each an event; the server ends it after ``seconds``.

        Raises:
            ApiError: on iteration: the watch is refused, or its connection is closed.
        """
        query = {"labelSelector": selector}
        return self._api.watch(resource.path(namespace), query, version=version, seconds=seconds)

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
        """Send one request and return the answer. Tests override this method to inject faults.

        Raises:
            ApiError: see :func:`rljob.kube.errors.error_of`; UnavailableError if no answer comes.
        """
        timeout = self._timeout if method == "GET" else self._write_timeout
        return await self._api.send(verb, method, path, query, timeout, body, content_type)
