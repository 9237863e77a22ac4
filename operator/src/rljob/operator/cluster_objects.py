"""Reads objects without a namespace that jobs in Kueue refer to: ResourceFlavors and PriorityClasses.

They are read one by one, only for jobs that need them, and kept for KEEP_SECONDS: they hardly ever change, and watching
them would need more rights. Without the right to read them the planner reports what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from rljob.kube.errors import ForbiddenError, NotFoundError
from rljob.kube.resource_kinds import Resource
from rljob.manifests.gang import KUEUE_GROUP, KUEUE_VERSION
from rljob.manifests.inputs import Flavor
from rljob.operator.operator_client import OperatorClient

log = logging.getLogger(__name__)

KEEP_SECONDS = 60.0
FLAVORS = Resource(KUEUE_GROUP, KUEUE_VERSION, "resourceflavors", "ResourceFlavor")
PRIORITIES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass")
T = TypeVar("T")


class _FlavorSpec(msgspec.Struct, rename="camel"):
    node_labels: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []


class _ResourceFlavor(msgspec.Struct):
    spec: _FlavorSpec = msgspec.field(default_factory=_FlavorSpec)


class _PriorityClass(msgspec.Struct):
    value: int = 0


class ClusterObjects:
    """Reads and caches objects. ``clock``: monotonic seconds."""

    def __init__(self, client: OperatorClient, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._found: dict[tuple[str, str], tuple[float, bytes | None]] = {}
        """Plural and name → when it was read, and its JSON; None: it cannot be read."""

    async def flavors(self, names: Iterable[str]) -> dict[str, Flavor]:
        """Return the ResourceFlavors that can be read, by name."""
        found = {}
        for name in sorted(names):
            raw = await self._read(FLAVORS, name)
            if raw is not None:
                spec = msgspec.json.decode(raw, type=_ResourceFlavor).spec
                found[name] = Flavor(spec.node_labels, tuple(spec.tolerations))
        return found

    async def priority(self, name: str | None) -> int | None:
        """Return the value of a PriorityClass; None if it cannot be read."""
        raw = await self._read(PRIORITIES, name) if name else None
        return None if raw is None else msgspec.json.decode(raw, type=_PriorityClass).value

    async def _read(self, resource: Resource, name: str) -> bytes | None:
        key, now = (resource.plural, name), self._clock()
        at, raw = self._found.get(key, (float("-inf"), None))
        if now - at < KEEP_SECONDS:
            return raw
        try:
            raw = await self._client.get(resource, "", name)
        except (ForbiddenError, NotFoundError) as error:
            log.warning("%s %s cannot be read: %s", resource.kind, name, error)
            raw = None
        self._found[key] = now, raw
        return raw
