"""Caches the objects of one resource by job, with read-your-writes: informers and answers to own writes fill it.

Watch events and answers to writes arrive in any order. The newer one wins: resource versions are compared as integers,
which Kubernetes guarantees for the objects of a resource since 1.35.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rljob.manifests.names import JOB
from rljob.operator.api_types import Child, Meta, Pod
from rljob.operator.object_kinds import RLJOBS, SCALE, Resource
from rljob.operator.ownership import foreign_scaler
from rljob.operator.plan import Key

REMEMBERED_REMOVALS = 10_000
"""Number of removed objects that stay removed when an event or an answer of an older version comes late."""


class CachedJob(msgspec.Struct, gc=False):
    """An RLJob. Spec and status are decoded on demand, because they change separately."""

    metadata: Meta
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")


class HasMeta(Protocol):
    """An object that a cache can hold."""

    @property
    def metadata(self) -> Meta: ...


T = TypeVar("T", bound=HasMeta)


class _HeadMeta(msgspec.Struct, rename="camel", gc=False):
    namespace: str = ""
    name: str = ""
    resource_version: str = "0"


class _Head(msgspec.Struct, gc=False):
    metadata: _HeadMeta


_head = msgspec.json.Decoder(_Head)
_pod = msgspec.json.Decoder(Pod)
_job = msgspec.json.Decoder(CachedJob)
_NOTHING: Mapping[str, Any] = {}


def version_of(raw: bytes | msgspec.Raw) -> int:
    """Return the resource version of an object's JSON."""
    return int(_head.decode(raw).metadata.resource_version)


def read_pod(raw: bytes | msgspec.Raw) -> Pod:
    """Return the pod in ``raw``."""
    return _pod.decode(raw)


def read_job(raw: bytes | msgspec.Raw) -> CachedJob:
    """Return the RLJob in ``raw``. Spec and status are copied: ``raw`` may be a slice of a large list."""
    job = _job.decode(raw)
    return CachedJob(job.metadata, job.spec.copy(), job.status.copy())


def child_reader(kind: str) -> Callable[[bytes | msgspec.Raw], Child]:
    """Return a function that decodes a child of ``kind``; items of a list have no kind."""

    def read(raw: bytes | msgspec.Raw) -> Child:
        body: dict[str, Any] = msgspec.json.decode(raw)
        managers = body["metadata"].pop("managedFields", None)
        scaled_by = foreign_scaler(managers or ()) if kind == SCALE else ""
        return Child(kind, msgspec.convert(body["metadata"], Meta), body, scaled_by)

    return read


def job_by_label(meta: Meta) -> str | None:
    """Return the name of the job that a child belongs to."""
    return meta.labels.get(JOB)


class Cache(Generic[T]):
    """The objects of one resource.

    Args:
        resource: of the objects.
        read: decodes an object.
        is_relevant: returns whether a change from the first to the second object is reported; default: always.
    """

    def __init__(
        self,
        resource: Resource,
        read: Callable[[bytes | msgspec.Raw], T],
        is_relevant: Callable[[T, T], bool] = lambda before, now: True,
    ) -> None:
        self.resource = resource
        self.read = read
        self._is_relevant = is_relevant
        self._job_of = (lambda meta: meta.name) if resource is RLJOBS else job_by_label
        self._jobs: dict[Key, dict[str, T]] = {}
        self._names: dict[Key, str] = {}
        """Namespace and name of an object → its job."""
        self._removed: dict[str, float] = {}
        """uid → last version of the objects that were removed last; the newest entry is last.

        An object that lost its labels has a newer version when it has them again; a deleted one never returns.
        """

    def __len__(self) -> int:
        return len(self._names)

    def keys(self) -> Iterable[Key]:
        """Return the jobs that have objects here."""
        return self._jobs.keys()

    def of_job(self, key: Key) -> Mapping[str, T]:
        """Return a job's objects by name."""
        return self._jobs.get(key, _NOTHING)

    def find(self, namespace: str, name: str) -> T | None:
        """Return an object."""
        job = self._names.get((namespace, name))
        return None if job is None else self._jobs[namespace, job][name]

    def put(self, raw: bytes | msgspec.Raw) -> tuple[Key, ...]:
        """Store an object from the answer to a write or from a watch; return the jobs for which it is a change."""
        head = _head.decode(raw).metadata
        known = self.find(head.namespace, head.name)
        if known is not None and int(head.resource_version) <= int(known.metadata.resource_version):
            return ()  # usually the event of an own write: decoding is not needed
        return self.take(self.read(raw))

    def take(self, item: T) -> tuple[Key, ...]:
        """Store an object unless a newer version is known; return the jobs for which it is a change.

        Two jobs if the object's label names another job than before: the new and the old one.
        """
        meta = item.metadata
        known = self.find(meta.namespace, meta.name)
        if known is not None and int(meta.resource_version) <= int(known.metadata.resource_version):
            return ()
        if int(meta.resource_version) <= self._removed.get(meta.uid, 0):
            return ()  # an answer that was sent before the removal
        job = self._job_of(meta)
        changed: tuple[Key, ...] = ()
        if known is not None and self._names[meta.namespace, meta.name] != job:
            changed = (self._forget(meta.namespace, meta.name),)
        if job is None:
            return changed
        self._jobs.setdefault((meta.namespace, job), {})[meta.name] = item
        self._names[meta.namespace, meta.name] = job
        if known is None or changed or self._is_relevant(known, item):
            changed = ((meta.namespace, job), *changed)
        return changed

    def deleted(self, namespace: str, name: str, uid: str) -> None:
        """Remove an object that this operator deleted; later events of its uid are ignored."""
        self._remember_removal(uid, math.inf)
        known = self.find(namespace, name)
        if known is not None and known.metadata.uid == uid:
            self._forget(namespace, name)

    def drop(self, raw: bytes | msgspec.Raw) -> tuple[Key, ...]:
        """Remove an object after a DELETED event; return its job if it was here."""
        meta = self.read(raw).metadata
        self._remember_removal(meta.uid, int(meta.resource_version))
        known = self.find(meta.namespace, meta.name)
        if known is None or int(known.metadata.resource_version) > int(meta.resource_version):
            return ()
        return (self._forget(meta.namespace, meta.name),)

    def replace(self, namespace: str, items: Iterable[T], version: int) -> set[Key]:
        """Store a complete list of one namespace or of all (empty), read at resourceVersion ``version``.

        Returns:
            The jobs with added, changed or removed objects. Objects that were written after ``version`` stay.
        """
        listed: set[tuple[str, str]] = set()
        changed: set[Key] = set()
        for item in items:
            listed.add((item.metadata.namespace, item.metadata.name))
            changed.update(self.take(item))
        gone = [place for place in self._names if place not in listed and namespace in ("", place[0])]
        for place in gone:
            known = self.find(*place)
            if known is not None and int(known.metadata.resource_version) <= version:
                self._remember_removal(known.metadata.uid, version)
                changed.add(self._forget(*place))
        return changed

    def _remember_removal(self, uid: str, version: float) -> None:
        """Let late events and answers of this version and older ones be ignored: no event would remove them again."""
        self._removed[uid] = max(version, self._removed.pop(uid, 0))
        if len(self._removed) > REMEMBERED_REMOVALS:
            self._removed.pop(next(iter(self._removed)))

    def _forget(self, namespace: str, name: str) -> Key:
        key = namespace, self._names.pop((namespace, name))
        objects = self._jobs[key]
        del objects[name]
        if not objects:
            del self._jobs[key]
        return key
