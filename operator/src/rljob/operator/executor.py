"""Executes plans: creates, changes and deletes a job's objects. The decisions are in :mod:`rljob.operator.planning`.

Objects are created by POST and changed by server-side apply (see :meth:`Executor._ensure`). The answer to every write
goes into the caches, so the next decision knows it. There are two kinds of failures. A refusal of the API server (a
name that is taken, a quota, an invalid object) is recorded, reported to the planner and retried with back-off. Every
other failure is raised, and the job is reconciled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from rljob.api.models import RLJob
from rljob.kube.errors import REFUSALS, AlreadyExistsError, ConflictError, NotFoundError
from rljob.manifests.inputs import Object
from rljob.manifests.names import JOB, ROLE
from rljob.operator import drift
from rljob.operator.api_types import Child, Meta
from rljob.operator.informers import Caches
from rljob.operator.job_memo import ChildError, JobMemo, fingerprint
from rljob.operator.object_kinds import (
    AUTOSCALER,
    BY_KEY,
    NATIVE_POD_GROUPS,
    PODS,
    SCALE,
    SECRETS,
    Resource,
    ref_of,
)
from rljob.operator.operator_client import OperatorClient
from rljob.operator.ownership import applied_fields, foreign_sentence, is_ours
from rljob.operator.plan import INITIALIZER, POD_DELETION_COST, Plan, Ref
from rljob.operator.secret import new_secret

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONCURRENT_REQUESTS = 8
"""Concurrent requests for one job."""
DELETION_REFUSED = "it cannot be deleted: "
"""Prefix of the message for a child whose deletion is refused."""
SCALED = ("Deployment", "StatefulSet")


class CreationStage(enum.Enum):
    """Order in which a job's objects are created, all of a stage at a time."""

    BASE = 0
    BINDINGS = 1
    """RoleBindings. Kubernetes checks the rights of the Role that a binding names, so the Role must exist."""
    PODS = 2
    """Workloads: everything that their pods mount and need exists."""


class _Answer(msgspec.Struct):
    kind: str = ""


class _Full(msgspec.Struct):
    metadata: dict[str, Any]
    spec: dict[str, Any] = {}


class Executor:
    """Executes plans. ``clock``: monotonic seconds."""

    def __init__(self, client: OperatorClient, caches: Caches, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._caches, self._clock = client, caches, clock
        self._memos: dict[str, JobMemo] = {}
        """By the job's uid."""

    def child_errors(self, meta: Meta) -> Mapping[Ref, ChildError]:
        """Return the job's children that could not be created, changed or deleted."""
        return self._memo(meta).child_errors

    def retry_after(self, meta: Meta) -> float | None:
        """Return the seconds until the first failed child is retried; None if no child has failed."""
        return self._memo(meta).retry_after(self._clock())

    def forget(self, uid: str) -> None:
        """Drop the cached state of a deleted job."""
        self._memos.pop(uid, None)

    async def execute(self, meta: Meta, job: RLJob | None, plan: Plan) -> bool:
        """Execute deletions and pod costs, check the names in ``plan.needed``, and create or change desired objects.

        Returns:
            Whether the plan is outdated: the execution found errors that the planner did not know.

        Raises:
            ApiError: a request failed and may succeed later; the other requests were sent.
        """
        memo = self._memo(meta)
        planned = {ref_of(rendered) for rendered in plan.desired} | {ref for ref, _ in plan.deletions} | {*plan.needed}
        unplanned = memo.child_errors.keys() - planned
        memo.drop_errors([ref for ref in unplanned if ref[0] != SECRETS.kind or not plan.desired])
        memo.free_names.intersection_update(plan.needed)
        before = memo.reported()

        await _all(lambda target: self._delete(meta, memo, *target), plan.deletions)
        await _all(lambda pod_cost: self._set_cost(meta, *pod_cost), plan.pod_costs.items())
        await _all(lambda ref: self._check_name(meta, memo, ref), plan.needed)
        if before != memo.reported():
            return True
        for stage in CreationStage:
            group = [each for each in plan.desired if _stage(each) is stage and not self._is_settled(meta, memo, each)]
            existing = [each for each in group if self._find(meta, ref_of(each)) is not None]
            if stage is CreationStage.PODS and len(existing) < len(group):
                assert job is not None, "an invalid job has no desired objects"
                if not await self._make_secret(meta, memo, job):
                    group = existing
            await _all(lambda each: self._ensure(meta, memo, each), group)
            if before != memo.reported():
                return True  # the planner may not want the next stage without the missing objects
        await _all(lambda patch: self._patch_status(meta, *patch), plan.status_patches)
        await _all(lambda wanted: self._autoscale(meta, *wanted), plan.scales.items())
        return False

    def _memo(self, meta: Meta) -> JobMemo:
        memo = self._memos.setdefault(meta.uid, JobMemo())
        memo.begin_generation(meta.generation, self._clock())
        return memo

    def _find(self, meta: Meta, ref: Ref) -> Child | None:
        return self._caches.children[ref[0]].find(meta.namespace, ref[1])

    def _resource(self, key: str) -> Resource:
        """Return the resource of a kind, in the version that the cluster serves."""
        return self._caches.children[key].resource

    def _is_settled(self, meta: Meta, memo: JobMemo, rendered: Object) -> bool:
        """Return whether a child matched its rendering, and neither of them has changed since then."""
        ref = ref_of(rendered)
        live = self._find(meta, ref)
        return (
            live is not None and ref not in memo.child_errors and memo.settled.get(ref) == fingerprint(rendered, live)
        )

    async def _check_name(self, meta: Meta, memo: JobMemo, ref: Ref) -> None:
        """Check that no foreign object has a name that the job needs later."""
        child_error = memo.child_errors.get(ref)
        if (
            ref in memo.free_names
            or memo.backing_off(ref, self._clock())
            or (child_error is not None and not child_error.foreign)
        ):
            return
        live = self._find(meta, ref)
        if live is None:
            with contextlib.suppress(NotFoundError):
                live = self._cache_child(ref[0], await self._client.get(self._resource(ref[0]), meta.namespace, ref[1]))
        if live is not None and not is_ours(meta, live.kind, live.metadata):
            self._note_foreign(meta, memo, live)
        else:
            memo.free_names.add(ref)
            memo.child_errors.pop(ref, None)

    async def _ensure(self, meta: Meta, memo: JobMemo, rendered: Object) -> None:
        """Create an object, or change it to match its rendering.

        It is applied if the inputs of its role have changed, or if it was rendered to the same result but another
        client has changed it. An object that another release of the operator rendered from the same inputs is left
        unchanged, except for replicas.
        """
        ref = ref_of(rendered)
        live = self._find(meta, ref)
        if live is not None and not is_ours(meta, live.kind, live.metadata):
            self._note_foreign(meta, memo, live)
            return
        if memo.backing_off(ref, self._clock()) and (live is None or not memo.child_errors[ref].foreign):
            return
        try:
            if live is None:
                live = await self._create(meta, memo, rendered)
            if live is None:
                return  # a foreign object has the name
            if live.metadata.deletion_timestamp is None:
                await self._repair(meta, memo, rendered, live)
            memo.child_errors.pop(ref, None)
        except REFUSALS as error:
            memo.note_error(ref, error.message, self._clock(), foreign=False)
        except NotFoundError:
            if not BY_KEY[ref[0]].optional:
                raise
            memo.note_error(ref, missing_type(ref[0]), self._clock(), foreign=False)

    async def _create(self, meta: Meta, memo: JobMemo, rendered: Object) -> Child | None:
        """Create an object, or read it if it exists; return it, or None if it is foreign."""
        ref = ref_of(rendered)
        resource, name = self._resource(ref[0]), ref[1]
        known = memo.child_errors.get(ref)
        if known is None or not known.foreign or not await self._exists(resource, meta.namespace, name):
            body = _body(rendered, resource)
            try:
                created = await self._client.create(resource, meta.namespace, body)
            except AlreadyExistsError:
                pass
            else:
                child = self._cache_child(ref[0], created)
                if "status" not in rendered:
                    memo.settled[ref] = fingerprint(rendered, child)
                return child
        try:
            existing = await self._client.get(resource, meta.namespace, name)
        except NotFoundError as error:  # it was deleted meanwhile
            raise ConflictError(409, "Conflict", f"{ref[0]} {name} is created and deleted repeatedly") from error
        child = self._cache_child(ref[0], existing)
        if is_ours(meta, ref[0], child.metadata):
            return child
        memo.note_error(ref, foreign_sentence(meta, ref[0], child.metadata), self._clock(), foreign=True)
        return None

    async def _exists(self, resource: Resource, namespace: str, name: str) -> bool:
        """Return whether an object exists. While a foreign object exists, retries cost reads but no writes."""
        try:
            await self._client.get(resource, namespace, name)
        except NotFoundError:
            return False
        return True

    async def _repair(self, meta: Meta, memo: JobMemo, rendered: Object, live: Child) -> None:
        ref = ref_of(rendered)
        replicas = drift.replicas_of(rendered) if live.kind in SCALED else None
        if memo.settled.get(ref) == fingerprint(rendered, live):
            return
        if not drift.same_role(rendered, live):
            live = await self._apply(meta, memo, rendered, live)
        elif drift.same_rendering(rendered, live):
            rendered_hash, unrepairable = memo.unrepairable.get(ref, ("", frozenset()))
            if rendered_hash != drift.rendered_hash_of(rendered):
                unrepairable = frozenset()
            if drift.differing_fields(rendered, live.body) - unrepairable:
                live = await self._apply(meta, memo, rendered, live)
        if replicas is not None and drift.replicas_of(live.body) != replicas:
            live = await self._scale(meta, live, replicas)
        live = await self._apply_status(meta, rendered, live)
        memo.settled[ref] = fingerprint(rendered, live)

    async def _apply(self, meta: Meta, memo: JobMemo, rendered: Object, live: Child) -> Child:
        resource, name = self._resource(live.kind), live.metadata.name
        current = msgspec.json.decode(await self._client.get(resource, meta.namespace, name), type=_Full)
        fields = applied_fields(current.metadata.get("managedFields", ()))
        if fields is not None and current.metadata["uid"] == live.metadata.uid:
            patch = {"metadata": {"resourceVersion": current.metadata["resourceVersion"], "managedFields": fields}}
            raw = await self._client.merge_patch(resource, meta.namespace, name, patch)
            current = msgspec.json.decode(raw, type=_Full)
        # If the object was deleted, the uid makes the apply fail; otherwise it would create a new object.
        body = _body(rendered, resource)
        body["metadata"] = {**rendered["metadata"], "uid": live.metadata.uid}
        if live.kind == SCALE:
            # Keeps the current replicas; with the resourceVersion the write fails if an autoscaler has changed them.
            body["metadata"]["resourceVersion"] = current.metadata["resourceVersion"]
            body["spec"] = {**rendered["spec"], "replicas": current.spec.get("replicas")}
        applied = self._cache_child(live.kind, await self._client.apply(resource, meta.namespace, name, body))
        remaining = drift.differing_fields(rendered, applied.body)
        memo.unrepairable[ref_of(rendered)] = (drift.rendered_hash_of(rendered), remaining)
        return applied

    async def _scale(self, meta: Meta, live: Child, replicas: int) -> Child:
        patch = {"metadata": {"uid": live.metadata.uid}, "spec": {"replicas": replicas}}
        raw = await self._client.merge_patch(self._resource(live.kind), meta.namespace, live.metadata.name, patch)
        return self._cache_child(live.kind, raw)

    async def _autoscale(self, meta: Meta, role: str, replicas: int) -> None:
        """Write a decision of the built-in autoscaler, as a field manager of its own.

        Raises:
            ConflictError: the RLJobScale has changed since the decision. Something else may own its replicas now.
        """
        scales = self._caches.children[SCALE].of_job((meta.namespace, meta.name)).values()
        live = next((each for each in scales if each.metadata.labels.get(ROLE) == role), None)
        if live is None or live.metadata.deletion_timestamp is not None:
            return
        resource, name = BY_KEY[SCALE], live.metadata.name
        metadata = {"name": name, "namespace": meta.namespace, "uid": live.metadata.uid}
        metadata["resourceVersion"] = live.metadata.resource_version
        body = {
            "apiVersion": resource.api_version,
            "kind": SCALE,
            "metadata": metadata,
            "spec": {"replicas": replicas},
        }
        self._cache_child(SCALE, await self._client.apply(resource, meta.namespace, name, body, manager=AUTOSCALER))

    async def _patch_status(self, meta: Meta, ref: Ref, status: Object) -> None:
        """Change the status of an object of another project.

        Raises:
            ConflictError: the object has changed, or was created again, since the decision.
        """
        live = self._find(meta, ref)
        if live is None:
            return
        # An API server ignores the uid in a change of a status; an object that was created again has another version.
        patch = {"metadata": {"resourceVersion": live.metadata.resource_version}, "status": status}
        resource = self._resource(ref[0])
        self._cache_child(ref[0], await self._client.merge_patch(resource, meta.namespace, ref[1], patch, "status"))

    async def _apply_status(self, meta: Meta, rendered: Object, live: Child) -> Child:
        """Write the status of an RLJobScale, if the plan has a status and the current one differs."""
        if "status" not in rendered or not drift.differs(rendered["status"], live.body.get("status", {})):
            return live
        body = {
            "apiVersion": rendered["apiVersion"],
            "kind": live.kind,
            "metadata": {"name": live.metadata.name, "namespace": meta.namespace, "uid": live.metadata.uid},
            "status": rendered["status"],
        }
        resource = BY_KEY[live.kind]
        raw = await self._client.apply(resource, meta.namespace, live.metadata.name, body, "status")
        return self._cache_child(live.kind, raw)

    async def _delete(self, meta: Meta, memo: JobMemo, ref: Ref, uid: str) -> None:
        kind, name = ref
        cache = self._caches.pods if kind == PODS.kind else self._caches.children[kind]
        known = cache.find(meta.namespace, name)
        lost = kind == PODS.kind
        terminates = known is not None and known.metadata.uid == uid and known.metadata.deletion_timestamp is not None
        if terminates and not lost:
            return
        if memo.backing_off(ref, self._clock()):
            return
        try:
            answer = await self._client.delete(
                cache.resource, meta.namespace, name, uid, grace_seconds=0 if lost else None
            )
        except NotFoundError:
            cache.deleted(meta.namespace, name, uid)
        except ConflictError:
            pass  # another object has the name now; its event follows
        except REFUSALS as error:
            log.warning("%s/%s: %s %s cannot be deleted: %s", meta.namespace, meta.name, *ref, error)
            memo.note_error(ref, f"{DELETION_REFUSED}{error.message}", self._clock(), foreign=False)
            return
        else:
            if msgspec.json.decode(answer, type=_Answer).kind == "Status":
                cache.deleted(meta.namespace, name, uid)
            else:
                cache.put(answer)
        memo.child_errors.pop(ref, None)

    async def _set_cost(self, meta: Meta, name: str, cost: int) -> None:
        """Set the deletion cost of a pod. If this is refused, other pods may be removed, and their work is repeated."""
        pod = self._caches.pods.find(meta.namespace, name)
        if pod is None or pod.metadata.annotations.get(POD_DELETION_COST) == str(cost):
            return
        patch = {"metadata": {"uid": pod.metadata.uid, "annotations": {POD_DELETION_COST: str(cost)}}}
        with contextlib.suppress(NotFoundError, ConflictError):  # the pod was deleted
            try:
                self._caches.pods.put(await self._client.merge_patch(PODS, meta.namespace, name, patch))
            except REFUSALS as error:
                log.warning("%s/%s: pod %s cannot get a deletion cost: %s", meta.namespace, meta.name, name, error)

    async def _make_secret(self, meta: Meta, memo: JobMemo, job: RLJob) -> bool:
        """Create the job's Secret unless it exists; return whether it exists.

        Raises:
            ConflictError: the Secret had been deleted. Its tokens are new, so workloads with old tokens were deleted.
        """
        body = new_secret(meta, job)
        ref = ref_of(body)
        if memo.backing_off(ref, self._clock()):
            return False
        try:
            await self._client.create(SECRETS, meta.namespace, body)
        except AlreadyExistsError:  # it belongs to this job: its name contains the uid
            memo.child_errors.pop(ref, None)
            return True
        except REFUSALS as error:
            memo.note_error(ref, error.message, self._clock(), foreign=False)
            return False
        memo.child_errors.pop(ref, None)
        outdated = [((child.kind, child.metadata.name), child.metadata.uid) for child in self._token_holders(meta)]
        if outdated:
            await _all(lambda target: self._delete(meta, memo, *target), outdated)
            raise ConflictError(409, "Conflict", f"Secret {ref[1]} is new: the job's pods are replaced")
        return True

    def _token_holders(self, meta: Meta) -> list[Child]:
        """Return the job's workloads whose pods mount tokens."""
        return [
            child
            for kind, resource in BY_KEY.items()
            if resource.pods
            for child in self._caches.children[kind].of_job((meta.namespace, meta.name)).values()
            if is_ours(meta, kind, child.metadata)
            and child.metadata.deletion_timestamp is None
            and child.metadata.labels.get(ROLE) != INITIALIZER
        ]

    def _cache_child(self, kind: str, raw: bytes) -> Child:
        """Put the answer to a write into the cache, and return it."""
        cache = self._caches.children[kind]
        child = cache.read(raw)
        cache.take(child)
        return child

    def _note_foreign(self, meta: Meta, memo: JobMemo, live: Child) -> None:
        ref = live.kind, live.metadata.name
        if live.metadata.labels.get(JOB) == meta.name:
            memo.child_errors.pop(
                ref, None
            )  # it has the job's label, so the caches contain it and receive its deletion
        elif not memo.backing_off(ref, self._clock()):  # the informers receive no events of it for this job
            memo.note_error(ref, foreign_sentence(meta, live.kind, live.metadata), self._clock(), foreign=True)


async def _all(do: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Call ``do`` for all items, MAX_CONCURRENT_REQUESTS at a time; after all have ended, raise the first error."""
    items = list(items)
    if not items:
        return
    slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def one(item: T) -> None:
        async with slots:
            await do(item)

    for result in await asyncio.gather(*map(one, items), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def missing_type(key: str) -> str:
    """Return the message about a type that a cluster lacks."""
    verb = "enable" if key == NATIVE_POD_GROUPS.key else "install"
    return f"the cluster has no type {key}; {verb} {BY_KEY[key].project}"


def _body(rendered: Object, resource: Resource) -> Object:
    """Return the object to write, in the version that the cluster serves."""
    body = {key: value for key, value in rendered.items() if key != "status"}
    return body | {"apiVersion": resource.api_version}


def _stage(rendered: Object) -> CreationStage:
    if BY_KEY[ref_of(rendered)[0]].pods:
        return CreationStage.PODS
    return CreationStage.BINDINGS if rendered["kind"] == "RoleBinding" else CreationStage.BASE
