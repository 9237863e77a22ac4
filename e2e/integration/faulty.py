"""Clients of the operator that inject faults between its decisions and the real API server."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rljob.kube.errors import ApiError, GoneError, TooManyRequestsError, UnavailableError
from rljob.operator.object_kinds import Resource
from rljob.operator.operator_client import OperatorClient


class CrashingClient(OperatorClient):
    """Simulates an operator that crashes at its ``at``-th write: before the request, or before the answer arrives."""

    at = 0
    """Number of the write, from 1; 0: never."""
    after = False
    """Whether the write is sent; its answer is never received."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = 0
        self.crashed = asyncio.Event()
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
                with contextlib.suppress(ApiError):  # the crashed operator does not receive the result
                    await super().send(verb, method, resource, path, *rest)
            self.crashed.set()
        await asyncio.Event().wait()
        raise AssertionError("a crashed operator must not continue")


def crashing_client(at: int, after: bool) -> type[CrashingClient]:
    """Return the class of a client that crashes at its ``at``-th write."""
    return type("Crashing", (CrashingClient,), {"at": at, "after": after})


class RandomClient(OperatorClient):
    """Fails a share of all requests: before they are sent, or afterwards so that the answer is lost."""

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
    """Return the class of a client that fails ``share`` of all requests."""
    return type("Unreliable", (RandomClient,), {"share": share, "seed": seed})


class HoldingClient(OperatorClient):
    """Delays the watch events of the resources in ``held`` while ``flow`` is clear."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flow = asyncio.Event()
        self.flow.set()
        self.held = frozenset[str]()
        """Plural names of resources whose events are delayed."""

    async def watch(self, resource: Resource, *arguments: Any, **options: Any) -> AsyncIterator[bytes]:
        async for line in super().watch(resource, *arguments, **options):
            if resource.plural in self.held:
                await self.flow.wait()
            yield line


class BreakingClient(OperatorClient):
    """Breaks watches, and rejects new ones as too old."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.broken = asyncio.Event()
        self.gone = 0
        """Number of watches that are still rejected as too old."""
        self.cut = set[str]()
        """Plural names of resources whose watches were broken."""

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
    """Lists in pages of two objects."""

    async def list(self, resource: Resource, namespace: str = "", **options: Any) -> bytes:
        return await super().list(resource, namespace, **{**options, "limit": 2})


class InterferingClient(OperatorClient):
    """Calls a function of the test before each write, which can change objects as another client does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.interfere: Callable[[str, str, Mapping[str, Any] | None], Awaitable[None]] | None = None
        """Called with verb, path and body of each write before it is sent."""

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
        if method != "GET" and resource.plural != "leases" and self.interfere is not None:
            await self.interfere(verb, path, body)
        return await super().send(verb, method, resource, path, query, body, content_type)
