"""Decides which changes of an RLJob trigger a reconcile. Coordinators write status.run every few seconds, mostly for
users: such a change must cost almost nothing.

A field of `status.run` that planning reads must be listed here, or its changes trigger no reconcile.
"""

from __future__ import annotations

import msgspec

from rljob.operator.cache import CachedJob

_EMPTY = msgspec.Raw(b"")


class _Decisive(msgspec.Struct, rename="camel", frozen=True):
    """The fields of `status.run` that planning reads, besides the engines."""

    state: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0


class _Run(msgspec.Struct):
    engines: msgspec.Raw = _EMPTY


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decisive = msgspec.json.Decoder(_Decisive)
_run = msgspec.json.Decoder(_Run)


def is_relevant(before: CachedJob, now: CachedJob) -> bool:
    """Return whether a change of an RLJob triggers a reconcile."""
    old_status, status = _fields.decode(before.status), _fields.decode(now.status)
    for each in (old_status, status):
        each.pop("run", None)
    if {name: bytes(raw) for name, raw in old_status.items()} != {name: bytes(raw) for name, raw in status.items()}:
        return True
    return others_changed(before, now)


def others_changed(before: CachedJob, now: CachedJob) -> bool:
    """Return whether users or the coordinator have changed what triggers a reconcile."""
    old, new = before.metadata, now.metadata
    if (old.uid, old.generation, old.deletion_timestamp) != (new.uid, new.generation, new.deletion_timestamp):
        return True
    if (old.labels, old.annotations) != (new.labels, new.annotations):
        return True
    status = _fields.decode(now.status)
    old_run, run = _fields.decode(before.status).get("run"), status.get("run")
    if old_run is None or run is None:
        return old_run is not run
    if _decisive.decode(old_run) != _decisive.decode(run):
        return True
    # Engines matter only while some are drained: the operator waits for them to finish.
    draining = len(bytes(status.get("draining", b"[]"))) > len(b"[]")
    return draining and bytes(_run.decode(old_run).engines) != bytes(_run.decode(run).engines)
