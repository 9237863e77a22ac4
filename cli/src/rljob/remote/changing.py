"""Changes an RLJob: applies a manifest, suspends, resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rljob import manifests
from rljob.api.errors import ManifestError
from rljob.api.models import RLJob
from rljob.local.errors import RunError
from rljob.remote.api import APPLY, CONFLICT, MANAGER, MERGE, ApiError, Object
from rljob.remote.finding import Namespace, goes_on, holds
from rljob.remote.job import RemoteJob

POLL_SECONDS = 0.5
UNHEARD_SECONDS = 30.0
"""An operator that has not looked at a change after so long is said to be away."""
GRACE = "rljob.dev/suspend-grace-seconds"
"""Annotation: spec.suspendGraceSeconds as it was before `stop --now`, as JSON."""
OWN = f'conflict with "{MANAGER}"'


def apply(where: Namespace, job: RLJob, source: str, *, dry_run: bool = False, force: bool = False) -> str:
    """Apply a manifest on the server's side; return what came of it: created, changed or unchanged.

    Args:
        where: namespace.
        job: what is applied: the fields that the manifest sets and no others.
        source: its file, for errors.
        dry_run: have the API server check it, and change nothing.
        force: take over fields that others have set.

    Raises:
        ManifestError: no cluster can honour it.
        RunError: the API server refuses it.
    """
    if found := manifests.problems(job):
        raise ManifestError(found, source)
    body: Object = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    body["metadata"]["namespace"] = where.name
    path = where.path(job.metadata.name)
    before = where.api.get(path)["metadata"] if where.has(job.metadata.name) else {}
    query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    try:
        after = _applied(where, path, body, query, force)["metadata"]
    except ApiError as error:
        raise _refused(error, where, source) from None
    if before.get("uid") != after["uid"] or not before:
        return "created"
    return "unchanged" if before["resourceVersion"] == after["resourceVersion"] else "changed"


def _applied(where: Namespace, path: str, body: Object, query: dict[str, str], force: bool) -> Object:
    try:
        return where.api.patch(path, body, APPLY, force=str(force).lower(), **query)
    except ApiError as error:
        if error.code != CONFLICT or not all(str(cause.get("message")).startswith(OWN) for cause in _causes(error)):
            raise
    return where.api.patch(path, body, APPLY, force="true", **query)  # what rljob stop has set is ours to set again


def _causes(error: ApiError) -> list[dict[str, Any]]:
    return list((error.status.get("details") or {}).get("causes") or [{}])


def _refused(error: ApiError, where: Namespace, source: str) -> Exception:
    causes = _causes(error)
    if error.missing_object and error.status["details"].get("kind") == "namespaces":
        return RunError(f"there is no {where.place}; make the namespace, or give another with -n", 2)
    if error.code == CONFLICT and "field" in causes[0]:
        fields = ", ".join(sorted({str(cause["field"]).removeprefix(".") for cause in causes}))
        owner = str(causes[0].get("message", "")).removeprefix("conflict with ").partition(" ")[0]
        return RunError(f"{source}: {fields}: set by {owner}; --force-conflicts takes it over", 2)
    if any(cause.get("field") for cause in causes):  # rules of the CustomResourceDefinition
        return ManifestError(
            [f"{cause['field']}: {cause['message']}" for cause in causes if cause.get("field")], source
        )
    return error


def suspend(job: RemoteJob, now: bool, say: Callable[[str], None]) -> None:
    """Suspend a job, and return when it has no pods any more or has ended.

    Args:
        job: one that goes on.
        now: do not wait for a checkpoint. ``spec.suspendGraceSeconds`` is 0 meanwhile; what it was is in an annotation,
            for whoever stops or resumes the job next should this be interrupted.
        say: told what to know while it lasts.

    Raises:
        RunError: the API server refuses or cannot be reached.
    """
    if now:
        grace = _kept(job).get("suspendGraceSeconds", job.body["spec"].get("suspendGraceSeconds"))
        _set(job, {"suspend": True, "suspendGraceSeconds": 0}, {GRACE: json.dumps(grace)})
    else:
        _set(job, {"suspend": True, **_kept(job)}, {GRACE: None})
    _wait(job, say)
    if now:
        _set(job, _kept(job), {GRACE: None})


def resume(job: RemoteJob) -> None:
    """Have a suspended job go on.

    Raises:
        RunError: the API server refuses or cannot be reached.
    """
    _set(job, {"suspend": False, **_kept(job)}, {GRACE: None})


def _set(job: RemoteJob, fields: dict[str, Any], annotations: dict[str, Any]) -> None:
    api, path = job.namespace.api, job.namespace.path(job.name)
    uid = job.body["metadata"]["uid"]  # another of its name is none of ours
    job.body = api.patch(path, {"metadata": {"uid": uid, "annotations": annotations}, "spec": fields}, MERGE)


def _kept(job: RemoteJob) -> dict[str, Any]:
    """Return the fields that a `stop --now` has changed for its time, as they were before."""
    text = (job.body["metadata"].get("annotations") or {}).get(GRACE)
    try:
        return {} if text is None else {"suspendGraceSeconds": json.loads(text)}
    except ValueError:  # somebody else's words
        return {"suspendGraceSeconds": None}


def _wait(job: RemoteJob, say: Callable[[str], None]) -> None:
    generation, begun, said = job.body["metadata"]["generation"], time.monotonic(), False
    while goes_on(job.read()) or (holds(job.body, "Suspended") and not _seen(job, generation)):
        if not said and not _seen(job, generation) and time.monotonic() - begun > UNHEARD_SECONDS:
            said = True
            say(f"no operator has looked at {job.name} for {UNHEARD_SECONDS:.0f} s; it stops when one does")
        time.sleep(POLL_SECONDS)


def _seen(job: RemoteJob, generation: int) -> bool:
    return int((job.body.get("status") or {}).get("observedGeneration") or 0) >= generation
