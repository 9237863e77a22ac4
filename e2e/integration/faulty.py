"""Clients of the operator that misbehave: between its decisions and the real API server."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rljob.kube.errors import ApiError, GoneError, TooManyRequestsError, UnavailableError
from rljob.operator.object_kinds import Resource
from rljob.operator.operator_client import OperatorClient


class DyingClient(OperatorClient):
    """Of an operator that dies at a write: of its ``at``-th nothing, or no more than the request, gets out."""

    at = 0
    """0: never."""
    after = False
    """The write is done, and its answer is never seen."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = 0
        self.died = asyncio.Event()
        self.last = ""

    async def send(self, verb: str, method: str, resource: Resource, path: str, *rest: Any) -> bytes:
        if method == "GET" or resource.plural == "leases":
            return await super().send(verb, method, resource, path, *rest)
        self.count += 1
        if not self.at or self.count < self.at:
            return await super().send(verb, method, resource, path, *rest)
        if self.count == self.at:
            self.last = f"{verb} {path}"
            if self.after:
                with contextlib.suppress(ApiError):  # nobody learns how it ended
                    await super().send(verb, method, resource, path, *rest)
            self.died.set()
        await asyncio.Event().wait()
        raise AssertionError("the dead do not go on")


def dying(at: int, after: bool) -> type[DyingClient]:
    """Return the class of a client that dies at its ``at``-th write."""
    return type("Dying", (DyingClient,), {"at": at, "after": after})


class RandomClient(OperatorClient):
    """A part of all requests fails: before they are sent, or afterwards so that the answer is lost."""

    share = 0.3
    seed = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.random = random.Random(self.seed)
        self.injected = 0

    async def send(self, verb: str, method: str, resource: Resource, path: str, *rest: Any) -> bytes:
        if resource.plural == "leases" or self.random.random() > self.share:
            return await super().send(verb, method, resource, path, *rest)
        self.injected += 1
        fault = self.random.randrange(4)
        if fault == 0:
            raise UnavailableError(500, "InternalError", "injected: etcd is busy")
        if fault == 1:
            raise TooManyRequestsError(429, "TooManyRequests", "injected: too many requests", 0.05)
        if fault == 2:
            raise UnavailableError(0, "", "injected: the connection was reset")
        await super().send(verb, method, resource, path, *rest)
        raise UnavailableError(504, "Timeout", "injected: done, but the answer is lost")


def unreliable(share: float, seed: int) -> type[RandomClient]:
    """Return the class of a client of which ``share`` of all requests fail."""
    return type("Unreliable", (RandomClient,), {"share": share, "seed": seed})


class HoldingClient(OperatorClient):
    """Holds back what watches say while ``hold`` is clear."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flow = asyncio.Event()
        self.flow.set()
        self.held = frozenset[str]()
        """Resources whose events are held back."""

    async def watch(self, resource: Resource, *arguments: Any, **options: Any) -> AsyncIterator[bytes]:
        async for line in super().watch(resource, *arguments, **options):
            if resource.plural in self.held:
                await self.flow.wait()
            yield line


class BreakingClient(OperatorClient):
    """Watches can be made to end, and to be too old when they begin again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.broken = asyncio.Event()
        self.gone = 0
        """So many watches are told that they are too old."""
        self.cut = set[str]()
        """Resources whose watches were made to end."""

    async def watch(self, resource: Resource, *arguments: Any, **options: Any) -> AsyncIterator[bytes]:
        if self.gone:
            self.gone -= 1
            raise GoneError(410, "Expired", "injected: too old resource version")
        lines = super().watch(resource, *arguments, **options)
        while True:
            reading = asyncio.ensure_future(anext(lines, b""))
            breaking = asyncio.create_task(self.broken.wait())
            try:
                await asyncio.wait([reading, breaking], return_when=asyncio.FIRST_COMPLETED)
            finally:
                breaking.cancel()
                if not reading.done():
                    reading.cancel()
            if not reading.done() or reading.cancelled() or self.broken.is_set():
                self.cut.add(resource.plural)
                raise UnavailableError(0, "", "injected: the connection was reset")
            if not reading.result():
                return
            yield reading.result()


class PagingClient(OperatorClient):
    """Lists in pages of two."""

    async def list(self, resource: Resource, namespace: str = "", **options: Any) -> bytes:
        return await super().list(resource, namespace, **{**options, "limit": 2})


class MeddlingClient(OperatorClient):
    """Somebody else does something just before chosen requests of the operator."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.meddle: Callable[[str, str, Mapping[str, Any] | None], Awaitable[None]] | None = None
        """Told verb, path and body of each write before it is sent."""

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
        if method != "GET" and resource.plural != "leases" and self.meddle is not None:
            await self.meddle(verb, path, body)
        return await super().send(verb, method, resource, path, query, body, content_type)
