"""Decodes RLJobs: the manifest once per generation, the status once per change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import ValidationError

from rljob.api.errors import ManifestError
from rljob.api.job_status import RLJobStatus
from rljob.api.load import validate
from rljob.api.models import API_VERSION, OPERATOR, RLJob
from rljob.operator.cache import CachedJob

log = logging.getLogger(__name__)

TRIES = 4
"""Rounds of removing invalid parts of a status; a status is not nested deeper."""
_REMOVED = object()


@dataclass(frozen=True)
class Manifest:
    """The user's manifest at one generation."""

    generation: int
    job: RLJob | None
    """None if it is not valid."""
    problems: Sequence[str]
    managed: bool
    """Another controller manages it (managedBy)."""


@dataclass
class _Read:
    manifest: Manifest
    version: str
    status: RLJobStatus


class DecodedJobs:
    """Caches decoded RLJobs; a manifest is the same Python object while its generation is the same."""

    def __init__(self) -> None:
        self._read: dict[str, _Read] = {}
        """By uid."""

    def read(self, cached: CachedJob) -> tuple[Manifest, RLJobStatus]:
        """Return manifest and status of an RLJob."""
        meta = cached.metadata
        known = self._read.get(meta.uid)
        if known is not None and known.version == meta.resource_version:
            return known.manifest, known.status
        if known is not None and known.manifest.generation == meta.generation:
            manifest = known.manifest
        else:
            manifest = read_manifest(cached)
        status = read_status(bytes(cached.status))
        self._read[meta.uid] = _Read(manifest, meta.resource_version, status)
        return manifest, status

    def conditions(self) -> Iterator[tuple[str, str]]:
        """Yield type and status of every condition of every job."""
        for read in self._read.values():
            for condition in read.status.conditions:
                yield condition.type, condition.status

    def desired_pods(self) -> Counter[str]:
        """Return kind of role → desired pods of all jobs."""
        found: Counter[str] = Counter()
        for read in self._read.values():
            for role in read.status.roles:
                found[role.name.partition("-")[0]] += role.desired
        return found

    def forget(self, uid: str) -> None:
        """Drop a deleted RLJob."""
        self._read.pop(uid, None)


def read_manifest(cached: CachedJob) -> Manifest:
    """Return an RLJob's manifest; its errors are in ``problems``."""
    meta = cached.metadata
    return manifest_of(meta.name, msgspec.json.decode(cached.spec), meta.generation)


def manifest_of(name: str, spec: Any, generation: int = 0) -> Manifest:
    """Return the manifest of an RLJob with this name and this spec as JSON."""
    managed = isinstance(spec, dict) and spec.get("managedBy") not in (None, OPERATOR)
    data = {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": {"name": name}, "spec": spec}
    try:
        return Manifest(generation, validate(data), (), managed)
    except ManifestError as error:
        return Manifest(generation, None, tuple(error.problems), managed)


def read_status(raw: bytes) -> RLJobStatus:
    """Return a status. Invalid parts (written by another version of the operator) are left out."""
    try:
        return RLJobStatus.model_validate_json(raw)
    except ValidationError as error:
        data = msgspec.json.decode(raw)
        problems = error
    for _ in range(TRIES):
        for detail in problems.errors(include_url=False):
            # For a missing field, its parent is removed.
            _mark_removed(data, detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"])
        data = _without_removed(data)
        try:
            return RLJobStatus.model_validate(data)
        except ValidationError as error:
            problems = error
    log.error("a status cannot be decoded and is treated as empty: %s", problems)
    return RLJobStatus()


def _mark_removed(data: Any, location: Sequence[str | int]) -> None:
    """Replace a value by _REMOVED, if it exists."""
    for step in location[:-1]:
        data = _at(data, step)
    if location and _at(data, location[-1]) is not None:
        data[location[-1]] = _REMOVED


def _at(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(step)
    return data[step] if isinstance(data, list) and isinstance(step, int) and step < len(data) else None


def _without_removed(data: Any) -> Any:
    """Return data without the values that are marked as removed."""
    if isinstance(data, dict):
        return {key: _without_removed(value) for key, value in data.items() if value is not _REMOVED}
    if isinstance(data, list):
        return [_without_removed(value) for value in data if value is not _REMOVED]
    return data
