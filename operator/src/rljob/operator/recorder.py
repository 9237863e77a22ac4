"""Events on RLJobs, which `kubectl describe` shows. Recording never blocks a reconcile.

A repeated event increases the count of the existing one. An event's name is a hash of its content, so a restarted
operator continues the count. Events are best effort: an event that cannot be written is dropped and counted.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
from collections import OrderedDict
from typing import Any

import msgspec

from rljob.api.text_escape import escape_block
from rljob.kube.errors import AlreadyExistsError, ApiError, NotFoundError
from rljob.operator.api_types import Meta
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import EVENTS, RLJOBS
from rljob.operator.operator_client import FencedError, OperatorClient
from rljob.operator.plan import Event
from rljob.operator.planning.reasons import SCALED_IN, SCALED_OUT

log = logging.getLogger(__name__)

COMPONENT = "rljob-operator"
WAITING = 1000
REMEMBERED = 4096
MESSAGE_CHARACTERS = 1024
"""Limit of the API."""
NAME_CHARACTERS = 200


class _Counted(msgspec.Struct):
    count: int = 1


class Recorder:
    """Writes events one at a time. ``instance``: identity of this operator."""

    def __init__(self, client: OperatorClient, metrics: Metrics, instance: str) -> None:
        self._client, self._metrics, self._instance = client, metrics, instance
        self._queue: asyncio.Queue[tuple[Meta, Event]] = asyncio.Queue(WAITING)
        self._counts: OrderedDict[str, int] = OrderedDict()
        """Name of an event → its count."""

    def record(self, job: Meta, event: Event) -> None:
        """Queue an event on ``job``; it is dropped if the queue is full. Count scalings."""
        if event.reason in (SCALED_OUT, SCALED_IN):
            self._metrics.scalings.labels(event.reason).inc()
        try:
            self._queue.put_nowait((job, event))
        except asyncio.QueueFull:
            self._metrics.events_dropped.inc()

    async def run(self) -> None:
        """Write queued events. Never returns."""
        while True:
            job, event = await self._queue.get()
            try:
                await self._write(job, event)
            except (ApiError, FencedError) as error:
                self._metrics.events_dropped.inc()
                log.info("event %s of %s/%s: %s", event.reason, job.namespace, job.name, error)

    async def _write(self, job: Meta, event: Event) -> None:
        body = event_body(job, event, self._instance, datetime.datetime.now(datetime.UTC))
        name = body["metadata"]["name"]
        count = self._counts.get(name, 0)
        if not count:
            try:
                await self._client.create(EVENTS, job.namespace, body)
                self._remember(name, 1)
                return
            except AlreadyExistsError:
                raw = await self._client.get(EVENTS, job.namespace, name)
                count = msgspec.json.decode(raw, type=_Counted).count
        update = {"count": count + 1, "lastTimestamp": body["lastTimestamp"], "message": body["message"]}
        try:
            await self._client.merge_patch(EVENTS, job.namespace, name, update)
            self._remember(name, count + 1)
        except NotFoundError:  # events are deleted after an hour
            await self._client.create(EVENTS, job.namespace, body)
            self._remember(name, 1)

    def _remember(self, name: str, count: int) -> None:
        self._counts[name] = count
        self._counts.move_to_end(name)
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)


def event_body(job: Meta, event: Event, instance: str, now: datetime.datetime) -> dict[str, Any]:
    """Return the Event object for the first occurrence of ``event`` on ``job``."""
    message = escape_block(event.message)
    content = "\0".join((job.uid, event.type, event.reason, message))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{job.name[:NAME_CHARACTERS]}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": RLJOBS.api_version,
            "kind": RLJOBS.kind,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": job.resource_version,
        },
        "type": event.type,
        "reason": event.reason,
        "message": message[:MESSAGE_CHARACTERS],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance[:128],
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
