"""Reads the newest warning events of stalled objects whose status does not report the cause.

Events are listed only while an object is stalled, at most every ASK_SECONDS; one list of a namespace serves all its
jobs. Events are best effort: without the right to list them, causes are missing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rljob.kube.errors import ApiError
from rljob.operator.object_kinds import EVENTS
from rljob.operator.operator_client import OperatorClient
from rljob.operator.planning.pod_diagnosis import key_of_claim
from rljob.operator.planning.stalled import ASK_SECONDS
from rljob.operator.planning.timestamps import seconds_of

log = logging.getLogger(__name__)

MAX_PAGES = 8
"""Maximum number of pages of events that are read."""
FRESH_SECONDS = 150.0
"""A kubelet retries within this time: an older warning about a pod is outdated."""
CLAIM_SECONDS = 600.0
"""A warning about a claim that is identified by name is valid for this time: an older one may be about a deleted claim
of the same name. Warnings about unbound claims are repeated at least every five minutes."""
EXPIRY_SECONDS = 60.0
"""After this time without a request the warnings of a namespace are dropped."""
REASONS = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox", "FailedCreate",
     "ProvisioningFailed", "FailedBinding"}
)  # fmt: skip
_MOUNT = re.compile(r'^MountVolume\.\w+ failed for volume "(?P<volume>[^"]*)"\s*: (?P<why>.*)$', re.DOTALL)
_RANDOM = re.compile(r' "[0-9a-f]{32,}"')


class _Involved(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Event(msgspec.Struct, rename="camel"):
    involved_object: _Involved = _Involved()
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def at(self) -> float:
        """Time of the last occurrence (Unix seconds)."""
        return seconds_of(self.last_timestamp or self.event_time or "") or 0.0


class _Metadata(msgspec.Struct, frozen=True):
    token: str = msgspec.field(name="continue", default="")


class _Events(msgspec.Struct):
    items: list[_Event] = []
    metadata: _Metadata = _Metadata()


@dataclass
class _NamespaceWarnings:
    """Warnings of a namespace, and when they were read."""

    at: float = float("-inf")
    messages: dict[str, str] = field(default_factory=dict)
    """uid of an object, or key of a claim → message."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WarningEvents:
    """Reads and caches warnings. ``clock``: monotonic seconds; ``wall``: Unix seconds."""

    def __init__(self, client: OperatorClient, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._client, self._clock, self._wall = client, clock, wall
        self._namespaces: dict[str, _NamespaceWarnings] = {}

    async def of(self, namespace: str, stalled: Mapping[str, float]) -> dict[str, str]:
        """Return uid → message for the stalled objects that have a warning.

        Args:
            namespace: of the objects.
            stalled: see :func:`rljob.operator.planning.stalled.stalled`.
        """
        due = [uid for uid, left in stalled.items() if left <= 0]
        if not due:
            return {}
        known_warnings = self._namespaces.setdefault(namespace, _NamespaceWarnings())
        async with known_warnings.lock:
            now = self._clock()
            if now - known_warnings.at >= ASK_SECONDS:
                known_warnings.messages, known_warnings.at = await self._read(namespace), now
        self._drop_expired(now)
        return {uid: known_warnings.messages[uid] for uid in due if uid in known_warnings.messages}

    def _drop_expired(self, now: float) -> None:
        for namespace, known_warnings in list(self._namespaces.items()):
            if now - known_warnings.at > EXPIRY_SECONDS and not known_warnings.lock.locked():
                del self._namespaces[namespace]

    async def _read(self, namespace: str) -> dict[str, str]:
        try:
            newest: dict[str, _Event] = {}
            for event in await self._list(namespace, "type=Warning"):
                known = newest.get(event.involved_object.uid)
                if event.reason in REASONS and (known is None or event.at >= known.at):
                    newest[event.involved_object.uid] = event
            pods = any(event.involved_object.kind == "Pod" for event in newest.values())
            pulls = await self._list(namespace, "reason=Pulling") if pods else []
        except ApiError as error:  # no rights, or the server is overloaded
            log.debug("events in %s cannot be read: %s", namespace, error)
            return {}
        pulled = {event.involved_object.uid: event.at for event in pulls}
        return self._of_claims(newest.values()) | {
            uid: normalize(event.message)
            for uid, event in newest.items()
            if event.involved_object.kind != "Pod" or self._is_current(event, pulled.get(uid, 0.0))
        }

    def _of_claims(self, events: Iterable[_Event]) -> dict[str, str]:
        return {
            key_of_claim(event.involved_object.name): normalize(event.message)
            for event in sorted(events, key=lambda event: event.at)
            if event.involved_object.kind == "PersistentVolumeClaim" and self._wall() - event.at <= CLAIM_SECONDS
        }

    def _is_current(self, event: _Event, pulled: float) -> bool:
        """Return whether a pod's warning still applies. After a Pulling event it does not: volumes are mounted."""
        return event.at > pulled and self._wall() - event.at <= FRESH_SECONDS

    async def _list(self, namespace: str, fields: str) -> list[_Event]:
        found: list[_Event] = []
        token = ""
        for _ in range(MAX_PAGES):
            page = msgspec.json.decode(
                await self._client.list(EVENTS, namespace, fields=fields, token=token), type=_Events
            )
            found += page.items
            token = page.metadata.token
            if not token:
                break
        return found


def normalize(message: str) -> str:
    """Return an event's message without parts that differ between repetitions, each of which would write a status."""
    found = _MOUNT.match(message)
    text = f"volume {found['volume']} cannot be mounted: {found['why']}" if found else message
    return _RANDOM.sub("", text).strip()
