"""Keeps the caches of children up to date while the operator leads: paged lists, then watches with bookmarks.

RLJobs arrive by kopf (:mod:`rljob.operator.handlers`); here they are only listed, at the start and once a minute.

An informer has one reflector per namespace, or one for all. Failures are retried with back-off: a watch that ends or
stalls is restarted at its last version; a watch whose version is too old (410) is restarted with a list. Callbacks
receive only the key of the job whose object changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from rljob.kube.errors import ApiError, ForbiddenError, GoneError, NotFoundError
from rljob.kube.watch import WatchEvent, decode_event
from rljob.manifests.names import JOB
from rljob.operator.api_types import Child, Pod
from rljob.operator.cache import Cache, CachedJob, child_reader, read_job, read_pod, version_of
from rljob.operator.change_filter import is_relevant
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import BY_KEY, PODS, RLJOBS
from rljob.operator.operator_client import OperatorClient
from rljob.operator.plan import Key
from rljob.protocol.backoff import LAST_SECONDS, Backoff

log = logging.getLogger(__name__)

RESYNC_SECONDS = 60.0
"""Interval between two lists of RLJobs."""
WATCH_SECONDS = (240, 300)
"""Range of timeoutSeconds of watches; random, so that not all end together."""
TYPE_SECONDS = 30.0
"""Interval between two looks for a type that another project installs."""


class TypesInstalledError(Exception):
    """kopf looks for resource types at its start only: the process must start again."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = "0"
    next: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


_page = msgspec.json.Decoder(_Page)


async def list_into(client: OperatorClient, cache: Cache[Any], selector: str, namespace: str) -> tuple[set[Key], str]:
    """Replace the content of ``cache`` by a consistent, paged list of one namespace, or of all (empty).

    Returns:
        The jobs whose objects have changed, and the resourceVersion of the list.
    """
    # Objects are decoded page by page, so that only one page of bytes is in memory.
    items: list[Any] = []
    version, token = "0", ""
    while True:
        page = _page.decode(await client.list(cache.resource, namespace, selector=selector, token=token))
        version, token = page.metadata.resource_version, page.metadata.next
        items.extend(map(cache.read, page.items or ()))
        if not token:
            return cache.replace(namespace, items, int(version)), version


class JobLister:
    """Lists the RLJobs into their cache: at the start, and then once in :data:`RESYNC_SECONDS`.

    The list at the start makes the first decision of a leader know every write of the leader before. The later lists
    find RLJobs that were deleted while kopf's watch was interrupted: kopf reports no such deletion.
    """

    def __init__(
        self,
        client: OperatorClient,
        cache: Cache[CachedJob],
        namespaces: Sequence[str],
        on_change: Callable[[Key], None],
    ) -> None:
        self.cache = cache
        self._client, self._namespaces, self._on_change = client, namespaces or ("",), on_change
        self._synced = asyncio.Event()

    async def wait_for_type(self) -> None:
        """Return when the type RLJob exists.

        Raises:
            TypesInstalledError: it did not exist at first.
        """
        backoff = Backoff()
        missing = False
        while True:
            try:
                await self._client.list(self.cache.resource, self._namespaces[0], limit=1)
            except NotFoundError:
                missing = True
                log.warning("the type RLJob does not exist: install the chart rljob-crds")
            except ApiError as error:
                log.warning("list of rljobs: %s", error)
            else:
                if missing:
                    raise TypesInstalledError("the type RLJob was installed after the start of this operator")
                return
            await backoff.wait()

    async def run(self) -> None:
        """List again and again. Never returns."""
        backoff = Backoff()
        while True:
            try:
                for namespace in self._namespaces:
                    for key in (await list_into(self._client, self.cache, "", namespace))[0]:
                        self._on_change(key)
            except (ApiError, msgspec.MsgspecError) as error:
                log.warning("list of rljobs: %s", error)
                await backoff.wait()
            else:
                self._synced.set()
                backoff.reset()
                await asyncio.sleep(RESYNC_SECONDS)

    async def synced(self) -> None:
        """Return when the first list is complete."""
        await self._synced.wait()


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
            if self._cache.resource.optional:
                await self._wait_for_type()
            try:
                await self._list_and_watch()
                reason = "ended"
            except GoneError:
                self._version, reason = "", "gone"
            except ApiError as error:
                reason = "error"
                # Broken or stalled connections are normal; refusals (rights, a missing CRD) are not.
                level = logging.INFO if error.code in (0, 429) else logging.WARNING
                log.log(level, "watch of %s: %s", self._cache.resource.metric_label, error)
            except msgspec.MsgspecError as error:
                # List again: the object of an event that cannot be decoded is missing in the cache.
                self._version, reason = "", "error"
                log.warning("watch of %s: an answer cannot be decoded: %s", self._cache.resource.metric_label, error)
            self._metrics.watch_restarts.labels(self._cache.resource.metric_label, reason).inc()
            if time.monotonic() - began > LAST_SECONDS:
                backoff.reset()
            await backoff.wait()

    async def _wait_for_type(self) -> None:
        """Return when an optional type exists. Until then there are no objects of it, and the operator may work.
        Without the right to list them it waits too."""
        while not await self._find_version():
            self.synced.set()
            self.last_event_at = time.monotonic()
            await asyncio.sleep(TYPE_SECONDS)

    async def _find_version(self) -> bool:
        """Look for a version of the type that the cluster serves, and use it; return False if there is none."""
        for version in self._cache.resource.versions or (self._cache.resource.version,):
            resource = replace(self._cache.resource, version=version)
            try:
                await self._client.list(resource, self._namespace, limit=1)
            except (NotFoundError, ForbiddenError):
                continue
            except ApiError:
                return True  # the watch reports it
            if resource != self._cache.resource:
                self._cache.resource, self._version = resource, ""
            return True
        return False

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
        changed, self._version = await list_into(self._client, self._cache, self._selector, self._namespace)
        self.last_event_at = time.monotonic()
        for key in changed:
            self._on_change(key)

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
    """All caches of an operator and what fills them.

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
            key: Cache(resource, child_reader(key)) for key, resource in BY_KEY.items()
        }
        """By key of the kind."""
        self.job_lister = JobLister(client, self.jobs, namespaces, on_change)
        labelled: list[Cache[Any]] = [self.pods, *self.children.values()]
        self.informers = [
            Informer(client, cache, JOB, namespaces, on_pod if cache is self.pods else on_change, metrics)
            for cache in labelled
        ]
        self.sources: list[JobLister | Informer] = [self.job_lister, *self.informers]
        """What fills the caches while the operator leads."""
        self._on_change = on_change

    def take_job(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """Store the RLJob of a watch event. ``kind``: ADDED, MODIFIED, DELETED; None for an RLJob of kopf's list."""
        raw = msgspec.json.encode(body)
        for key in self.jobs.drop(raw) if kind == "DELETED" else self.jobs.put(raw):
            self._on_change(key)

    def counts(self) -> dict[str, int]:
        """Return resource → cached objects."""
        return {source.cache.resource.metric_label: len(source.cache) for source in self.sources}

    async def synced(self) -> None:
        """Return when the first list of every resource is complete."""
        for source in self.sources:
            await source.synced()
