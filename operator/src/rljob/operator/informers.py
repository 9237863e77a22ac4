"""Keeps caches up to date while the operator runs: paged lists, then watches with bookmarks.

An informer has one reflector per namespace, or one for all. Failures are retried with back-off: a watch that ends or
stalls is restarted at its last version; a watch whose version is too old (410) is restarted with a list. Callbacks
receive only the key of the job whose object changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from rljob.kube.errors import ApiError, GoneError
from rljob.kube.watch import WatchEvent, decode_event
from rljob.manifests.names import JOB
from rljob.operator.api_types import Child, Pod
from rljob.operator.cache import Cache, CachedJob, child_reader, read_job, read_pod, version_of
from rljob.operator.change_filter import is_relevant
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import CHILDREN, PODS, RLJOBS
from rljob.operator.operator_client import OperatorClient
from rljob.operator.plan import Key
from rljob.protocol.backoff import LAST_SECONDS, Backoff

log = logging.getLogger(__name__)

WATCH_SECONDS = (240, 300)
"""Range of timeoutSeconds of watches; random, so that not all end together."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = "0"
    next: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


_page = msgspec.json.Decoder(_Page)


class Informer:
    """Fills one cache.

    Args:
        cache: to fill.
        selector: label selector.
        namespaces: to watch; all if empty.
        on_change: called with the key of the job when one of its objects changes.
    """

    def __init__(
        self,
        client: OperatorClient,
        cache: Cache[Any],
        selector: str,
        namespaces: Sequence[str],
        on_change: Callable[[Key], None],
        metrics: Metrics,
    ) -> None:
        self.cache = cache
        self._reflectors = [
            Reflector(client, cache, selector, namespace, on_change, metrics) for namespace in namespaces or ("",)
        ]

    async def run(self) -> None:
        """Keep the cache up to date. Never returns."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    async def synced(self) -> None:
        """Return when the first list is complete."""
        for reflector in self._reflectors:
            await reflector.synced.wait()

    @property
    def age(self) -> float:
        """Seconds since the last watch event; the maximum over the reflectors. Bookmarks arrive once a minute."""
        return max(time.monotonic() - reflector.last_event_at for reflector in self._reflectors)


class Reflector:
    """Lists and watches one resource in one namespace, or in all (empty)."""

    def __init__(
        self,
        client: OperatorClient,
        cache: Cache[Any],
        selector: str,
        namespace: str,
        on_change: Callable[[Key], None],
        metrics: Metrics,
    ) -> None:
        self.synced = asyncio.Event()
        self.last_event_at = time.monotonic()
        self._client, self._cache, self._selector, self._namespace = client, cache, selector, namespace
        self._on_change = on_change
        self._metrics = metrics
        self._version = ""
        """resourceVersion to watch from; empty: list first."""

    async def run(self) -> None:
        """List and watch. Never returns."""
        backoff = Backoff()
        while True:
            began = time.monotonic()
            try:
                await self._list_and_watch()
                reason = "ended"
            except GoneError:
                self._version, reason = "", "gone"
            except ApiError as error:
                reason = "error"
                # Broken or stalled connections are normal; refusals (rights, a missing CRD) are not.
                level = logging.INFO if error.code in (0, 429) else logging.WARNING
                log.log(level, "watch of %s: %s", self._cache.resource.plural, error)
            except msgspec.MsgspecError as error:
                # List again: the object of an event that cannot be decoded is missing in the cache.
                self._version, reason = "", "error"
                log.warning("watch of %s: an answer cannot be decoded: %s", self._cache.resource.plural, error)
            self._metrics.watch_restarts.labels(self._cache.resource.plural, reason).inc()
            if time.monotonic() - began > LAST_SECONDS:
                backoff.reset()
            await backoff.wait()

    async def _list_and_watch(self) -> None:
        if not self._version:
            await self._list()
            self.synced.set()
        seconds = random.randint(*WATCH_SECONDS)
        events = self._client.watch(
            self._cache.resource,
            self._namespace,
            selector=self._selector,
            version=self._version,
            seconds=seconds,
        )
        async for line in events:
            self.last_event_at = time.monotonic()
            self._handle(decode_event(line))

    async def _list(self) -> None:
        # Objects are decoded page by page, so that only one page of bytes is in memory.
        items: list[Any] = []
        version = "0"
        async for page in self._pages():
            version = page.metadata.resource_version
            items.extend(map(self._cache.read, page.items or ()))
        self.last_event_at = time.monotonic()
        for key in self._cache.replace(self._namespace, items, int(version)):
            self._on_change(key)
        self._version = version

    async def _pages(self) -> AsyncIterator[_Page]:
        token = ""
        while True:
            raw = await self._client.list(self._cache.resource, self._namespace, selector=self._selector, token=token)
            page = _page.decode(raw)
            yield page
            token = page.metadata.next
            if not token:
                return

    def _handle(self, event: WatchEvent) -> None:
        keys: tuple[Key, ...] = ()
        if event.type in ("ADDED", "MODIFIED"):
            keys = self._cache.put(event.object)
        elif event.type == "DELETED":
            keys = self._cache.drop(event.object)
        self._version = str(version_of(event.object))
        for key in keys:
            self._on_change(key)


class Caches:
    """All caches of an operator and the informers that fill them.

    Args:
        namespaces: to watch; all if empty.
        on_change: called with the key of the job when one of its objects other than a pod changes.
        on_pod: called with the key of the job when one of its pods changes.
    """

    def __init__(
        self,
        client: OperatorClient,
        namespaces: Sequence[str],
        *,
        on_change: Callable[[Key], None],
        on_pod: Callable[[Key], None],
        metrics: Metrics,
    ) -> None:
        self.jobs: Cache[CachedJob] = Cache(RLJOBS, read_job, is_relevant)
        self.pods: Cache[Pod] = Cache(PODS, read_pod)
        self.children: dict[str, Cache[Child]] = {
            resource.kind: Cache(resource, child_reader(resource.kind)) for resource in CHILDREN
        }
        """By kind."""
        labelled: list[Cache[Any]] = [self.pods, *self.children.values()]
        caches: list[tuple[Cache[Any], str]] = [(self.jobs, ""), *((cache, JOB) for cache in labelled)]
        self.informers = [
            Informer(client, cache, selector, namespaces, on_pod if cache is self.pods else on_change, metrics)
            for cache, selector in caches
        ]

    async def synced(self) -> None:
        """Return when the first list is complete."""
        for informer in self.informers:
            await informer.synced()
