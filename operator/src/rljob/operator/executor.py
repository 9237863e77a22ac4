"""Does what a plan says to a job's objects; knows nothing of why.

Objects are made by POST and changed by server-side apply (what is applied when: :meth:`Executor._keep`). The answer to
every write goes into the caches, so that the next decision knows of it. What cannot be done is of two kinds: what the
API server refuses (a name that is taken, a quota, an invalid object) is remembered, told to the planner, and tried
again with back-off; everything else is an error, after which the job is reconciled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rljob.api.models import RLJob
from rljob.kube.errors import REFUSALS, AlreadyExistsError, ConflictError, NotFoundError
from rljob.manifests.context import Object
from rljob.manifests.labels import JOB, ROLE
from rljob.operator import drift
from rljob.operator.api_types import Child, Meta
from rljob.operator.client import OperatorClient
from rljob.operator.informers import Caches
from rljob.operator.ownership import applied_fields, foreign_sentence, is_ours
from rljob.operator.plan import INITIALIZER, POD_DELETION_COST, Plan, Ref
from rljob.operator.resources import BY_KIND, PODS, SECRETS, Resource
from rljob.operator.secret import new_secret

log = logging.getLogger(__name__)

T = TypeVar("T")

AT_A_TIME = 8
"""Requests for one job."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
SOONEST_RETRY_SECONDS = 0.5
"""Whatever goes wrong, a job is not looked at more often than this because of what cannot be had."""
DELETION_REFUSED = "it cannot be deleted: "
"""What is said of a child that shall go and cannot begins with this."""
SCALE = "RLJobScale"
"""Its replicas belong to whoever scales: ours at creation only."""
SCALED = ("Deployment", "StatefulSet")


class CreationStage(enum.Enum):
    """Order in which a job's objects are made, all of a stage at a time."""

    BASE = 0
    BINDINGS = 1
    """Only who has the rights of a Role, or may bind it, may name it: it must be there to be looked at."""
    PODS = 2
    """What pods follow from: all that they mount and need is there."""


@dataclass
class ChildError:
    """A child that cannot be had for now."""

    message: str
    foreign: bool
    """An object that is not the job's has the name; else the API server refuses ours."""
    retry_at: float
    """By the executor's clock."""
    tries: int


@dataclass
class JobMemo:
    """What is remembered of a job between reconciles; nothing that could not be found out again."""

    generation: int = 0
    child_errors: dict[Ref, ChildError] = field(default_factory=dict)
    settled: dict[Ref, tuple[Any, ...]] = field(default_factory=dict)
    """Child → what was compared when it was found to be as it shall be."""
    free_names: set[Ref] = field(default_factory=set)
    """Of what is needed: names that nothing foreign had when they were looked at."""
    unrepairable: dict[Ref, tuple[str, frozenset[drift.Path]]] = field(default_factory=dict)
    """Child → intent, and the fields that departed from it even right after it was applied."""


class _Answer(msgspec.Struct):
    kind: str = ""


class _Full(msgspec.Struct):
    metadata: dict[str, Any]
    spec: dict[str, Any] = {}


class Executor:
    """Does plans. ``clock``: seconds that never go back."""

    def __init__(self, client: OperatorClient, caches: Caches, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._caches, self._clock = client, caches, clock
        self._memos: dict[str, JobMemo] = {}
        """By the job's uid."""

    def child_errors(self, meta: Meta) -> Mapping[Ref, ChildError]:
        """Return the job's children that cannot be had."""
        return self._memo(meta).child_errors

    def retry_after(self, meta: Meta) -> float | None:
        """Return seconds until one of them is tried again."""
        moments = [child_error.retry_at for child_error in self._memo(meta).child_errors.values()]
        return max(SOONEST_RETRY_SECONDS, min(moments) - self._clock()) if moments else None

    def forget(self, uid: str) -> None:
        """Forget a job that is gone."""
        self._memos.pop(uid, None)

    async def execute(self, meta: Meta, job: RLJob | None, plan: Plan) -> bool:
        """Do the deletions, pod costs and desired objects of a plan, once what is needed was looked at.

        Returns:
            Whether anything was found that the planner did not know: then it must be asked again.

        Raises:
            ApiError: something failed that may work later. As much as could be done was done.
        """
        memo = self._memo(meta)
        asked = {_ref(rendered) for rendered in plan.desired} | {ref for ref, _ in plan.deletions} | {*plan.needed}
        for ref in memo.child_errors.keys() - asked:
            if ref[0] != SECRETS.kind or not plan.desired:
                del memo.child_errors[ref]
        memo.free_names.intersection_update(plan.needed)
        before = _reported(memo)

        await _all(lambda target: self._delete(meta, memo, *target), plan.deletions)
        await _all(lambda pod_cost: self._set_cost(meta, *pod_cost), plan.pod_costs.items())
        await _all(lambda ref: self._check_name(meta, memo, ref), plan.needed)
        if before != _reported(memo):
            return True
        for stage in CreationStage:
            group = [each for each in plan.desired if _stage(each) is stage and not self._is_settled(meta, memo, each)]
            there = [each for each in group if self._find(meta, _ref(each)) is not None]
            if stage is CreationStage.PODS and len(there) < len(group):
                assert job is not None, "nothing is desired of a job that is not valid"
                if not await self._make_secret(meta, memo, job):
                    group = there
            await _all(lambda each: self._ensure(meta, memo, each), group)
            if before != _reported(memo):
                return True  # what follows may not be wanted without what is missing
        return False

    def _memo(self, meta: Meta) -> JobMemo:
        memo = self._memos.setdefault(meta.uid, JobMemo())
        if memo.generation != meta.generation:
            # The user may have mended what was refused: try at once. What is said of it stays until then.
            memo.generation = meta.generation
            for child_error in memo.child_errors.values():
                child_error.retry_at, child_error.tries = self._clock(), 0
        return memo

    def _backing_off(self, memo: JobMemo, ref: Ref) -> bool:
        """Return whether it is too soon to try again what failed."""
        child_error = memo.child_errors.get(ref)
        return child_error is not None and self._clock() < child_error.retry_at

    def _find(self, meta: Meta, ref: Ref) -> Child | None:
        return self._caches.children[ref[0]].find(meta.namespace, ref[1])

    def _is_settled(self, meta: Meta, memo: JobMemo, rendered: Object) -> bool:
        """Return whether a child was found to be as it shall be, and neither of the two has changed since."""
        ref = _ref(rendered)
        live = self._find(meta, ref)
        return live is not None and ref not in memo.child_errors and memo.settled.get(ref) == _marks(rendered, live)

    async def _check_name(self, meta: Meta, memo: JobMemo, ref: Ref) -> None:
        """Find out whether an object that is needed later is foreign."""
        child_error = memo.child_errors.get(ref)
        if (
            ref in memo.free_names
            or self._backing_off(memo, ref)
            or (child_error is not None and not child_error.foreign)
        ):
            return
        live = self._find(meta, ref)
        if live is None:
            with contextlib.suppress(NotFoundError):
                live = self._cache_child(ref[0], await self._client.get(BY_KIND[ref[0]], meta.namespace, ref[1]))
        if live is not None and not is_ours(meta, live.kind, live.metadata):
            self._note_foreign(meta, memo, live)
        else:
            memo.free_names.add(ref)
            memo.child_errors.pop(ref, None)

    async def _ensure(self, meta: Meta, memo: JobMemo, rendered: Object) -> None:
        """Have an object as it is rendered.

        It is applied if its role's inputs are others, or if it was rendered to the same but somebody changed it. An
        object that another version of the operator rendered of the same inputs is left alone, replicas apart.
        """
        ref = _ref(rendered)
        live = self._find(meta, ref)
        if live is not None and not is_ours(meta, live.kind, live.metadata):
            self._note_foreign(meta, memo, live)
            return
        if self._backing_off(memo, ref) and (live is None or not memo.child_errors[ref].foreign):
            return
        try:
            if live is None:
                live = await self._create(meta, memo, rendered)
            if live is None:
                return  # foreign
            if live.metadata.deletion_timestamp is None:
                await self._repair(meta, memo, rendered, live)
            memo.child_errors.pop(ref, None)
        except REFUSALS as error:
            self._note_error(memo, ref, error.message, foreign=False)

    async def _create(self, meta: Meta, memo: JobMemo, rendered: Object) -> Child | None:
        """Make an object, or find that it is there; return it unless it is foreign."""
        ref, resource = _ref(rendered), BY_KIND[rendered["kind"]]
        name = ref[1]
        known = memo.child_errors.get(ref)
        if known is None or not known.foreign or not await self._exists(resource, meta.namespace, name):
            body = {key: value for key, value in rendered.items() if key != "status"}
            try:
                made = await self._client.create(resource, meta.namespace, body)
            except AlreadyExistsError:
                pass
            else:
                child = self._cache_child(ref[0], made)
                if "status" not in rendered:
                    memo.settled[ref] = _marks(rendered, child)
                return child
        try:
            there = await self._client.get(resource, meta.namespace, name)
        except NotFoundError as error:  # it went just now
            raise ConflictError(409, "Conflict", f"{ref[0]} {name} comes and goes") from error
        child = self._cache_child(ref[0], there)
        if is_ours(meta, ref[0], child.metadata):
            return child
        self._note_error(memo, ref, foreign_sentence(meta, ref[0], child.metadata), foreign=True)
        return None

    async def _exists(self, resource: Resource, namespace: str, name: str) -> bool:
        """Look for a foreign object, so that one that stays costs reads and no writes."""
        try:
            await self._client.get(resource, namespace, name)
        except NotFoundError:
            return False
        return True

    async def _repair(self, meta: Meta, memo: JobMemo, rendered: Object, live: Child) -> None:
        ref = _ref(rendered)
        replicas = drift.replicas_of(rendered) if live.kind in SCALED else None
        if memo.settled.get(ref) == _marks(rendered, live):
            return
        if not drift.same_role(rendered, live):
            live = await self._apply(meta, memo, rendered, live)
        elif drift.same_intent(rendered, live):
            intent, departed = memo.unrepairable.get(ref, ("", frozenset()))
            if intent != drift.intent_of(rendered):
                departed = frozenset()
            if drift.departures(rendered, live.body) - departed:
                live = await self._apply(meta, memo, rendered, live)
        if replicas is not None and drift.replicas_of(live.body) != replicas:
            live = await self._scale(meta, live, replicas)
        live = await self._apply_status(meta, rendered, live)
        memo.settled[ref] = _marks(rendered, live)

    async def _apply(self, meta: Meta, memo: JobMemo, rendered: Object, live: Child) -> Child:
        resource, name = BY_KIND[live.kind], live.metadata.name
        there = msgspec.json.decode(await self._client.get(resource, meta.namespace, name), type=_Full)
        fields = applied_fields(there.metadata.get("managedFields", ()))
        if fields is not None and there.metadata["uid"] == live.metadata.uid:
            patch = {"metadata": {"resourceVersion": there.metadata["resourceVersion"], "managedFields": fields}}
            raw = await self._client.merge_patch(resource, meta.namespace, name, patch)
            there = msgspec.json.decode(raw, type=_Full)
        # The uid makes it fail, rather than make the object anew, if that is gone.
        body = {key: value for key, value in rendered.items() if key != "status"}
        body["metadata"] = {**rendered["metadata"], "uid": live.metadata.uid}
        if live.kind == SCALE:
            # Those of now, and of nobody's who scales it while we write.
            body["metadata"]["resourceVersion"] = there.metadata["resourceVersion"]
            body["spec"] = {**rendered["spec"], "replicas": there.spec.get("replicas")}
        applied = self._cache_child(live.kind, await self._client.apply(resource, meta.namespace, name, body))
        still = drift.departures(rendered, applied.body)
        memo.unrepairable[_ref(rendered)] = (drift.intent_of(rendered), still)
        return applied

    async def _scale(self, meta: Meta, live: Child, replicas: int) -> Child:
        patch = {"metadata": {"uid": live.metadata.uid}, "spec": {"replicas": replicas}}
        raw = await self._client.merge_patch(BY_KIND[live.kind], meta.namespace, live.metadata.name, patch)
        return self._cache_child(live.kind, raw)

    async def _apply_status(self, meta: Meta, rendered: Object, live: Child) -> Child:
        """Write the status of a child of a kind of ours, if the plan has one and it departs."""
        if "status" not in rendered or not drift.departs(rendered["status"], live.body.get("status", {})):
            return live
        body = {
            "apiVersion": rendered["apiVersion"],
            "kind": live.kind,
            "metadata": {"name": live.metadata.name, "namespace": meta.namespace, "uid": live.metadata.uid},
            "status": rendered["status"],
        }
        resource = BY_KIND[live.kind]
        raw = await self._client.apply(resource, meta.namespace, live.metadata.name, body, "status")
        return self._cache_child(live.kind, raw)

    async def _delete(self, meta: Meta, memo: JobMemo, ref: Ref, uid: str) -> None:
        kind, name = ref
        cache = self._caches.pods if kind == PODS.kind else self._caches.children[kind]
        known = cache.find(meta.namespace, name)
        if known is not None and known.metadata.uid == uid and known.metadata.deletion_timestamp is not None:
            return
        if self._backing_off(memo, ref):
            return
        try:
            answer = await self._client.delete(cache.resource, meta.namespace, name, uid)
        except NotFoundError:
            cache.deleted(meta.namespace, name, uid)
        except ConflictError:
            pass  # another object has the name by now: its event comes
        except REFUSALS as error:
            log.warning("%s/%s: %s %s cannot be deleted: %s", meta.namespace, meta.name, *ref, error)
            self._note_error(memo, ref, f"{DELETION_REFUSED}{error.message}", foreign=False)
            return
        else:
            if msgspec.json.decode(answer, type=_Answer).kind == "Status":
                cache.deleted(meta.namespace, name, uid)
            else:
                cache.put(answer)
        memo.child_errors.pop(ref, None)

    async def _set_cost(self, meta: Meta, name: str, cost: int) -> None:
        """Say which pod is to go first. Where that may not be said, others may go instead, and work is repeated."""
        pod = self._caches.pods.find(meta.namespace, name)
        if pod is None or pod.metadata.annotations.get(POD_DELETION_COST) == str(cost):
            return
        patch = {"metadata": {"uid": pod.metadata.uid, "annotations": {POD_DELETION_COST: str(cost)}}}
        with contextlib.suppress(NotFoundError, ConflictError):  # the pod is gone: so is its cost
            try:
                self._caches.pods.put(await self._client.merge_patch(PODS, meta.namespace, name, patch))
            except REFUSALS as error:
                log.warning("%s/%s: pod %s may not be marked as one to go: %s", meta.namespace, meta.name, name, error)

    async def _make_secret(self, meta: Meta, memo: JobMemo, job: RLJob) -> bool:
        """Have the job's Secret; return whether it is there.

        Raises:
            ConflictError: somebody had deleted it. Its tokens are others now, so what runs by the old ones was deleted.
        """
        body = new_secret(meta, job)
        ref = _ref(body)
        if self._backing_off(memo, ref):
            return False
        try:
            await self._client.create(SECRETS, meta.namespace, body)
        except AlreadyExistsError:  # by its name it is this very job's
            memo.child_errors.pop(ref, None)
            return True
        except REFUSALS as error:
            self._note_error(memo, ref, error.message, foreign=False)
            return False
        memo.child_errors.pop(ref, None)
        outdated = [((child.kind, child.metadata.name), child.metadata.uid) for child in self._token_holders(meta)]
        if outdated:
            await _all(lambda target: self._delete(meta, memo, *target), outdated)
            raise ConflictError(409, "Conflict", f"Secret {ref[1]} is new: the job's pods are made anew")
        return True

    def _token_holders(self, meta: Meta) -> list[Child]:
        """Return what runs pods of the job that have tokens."""
        return [
            child
            for kind, resource in BY_KIND.items()
            if resource.pods
            for child in self._caches.children[kind].of_job((meta.namespace, meta.name)).values()
            if is_ours(meta, kind, child.metadata)
            and child.metadata.deletion_timestamp is None
            and child.metadata.labels.get(ROLE) != INITIALIZER
        ]

    def _cache_child(self, kind: str, raw: bytes) -> Child:
        """Take the answer to a write into the cache, and return it."""
        cache = self._caches.children[kind]
        child = cache.read(raw)
        cache.take(child)
        return child

    def _note_foreign(self, meta: Meta, memo: JobMemo, live: Child) -> None:
        ref = live.kind, live.metadata.name
        if live.metadata.labels.get(JOB) == meta.name:
            memo.child_errors.pop(ref, None)  # labelled as ours, so the planner sees it, and we see it go
        elif not self._backing_off(memo, ref):  # another job's: its events are that one's
            self._note_error(memo, ref, foreign_sentence(meta, live.kind, live.metadata), foreign=True)

    def _note_error(self, memo: JobMemo, ref: Ref, message: str, *, foreign: bool) -> None:
        known = memo.child_errors.get(ref)
        tries = known.tries + 1 if known is not None else 1
        wait = min(FIRST_RETRY_SECONDS * 2.0 ** min(tries - 1, 10), LAST_RETRY_SECONDS)
        memo.child_errors[ref] = ChildError(message, foreign, self._clock() + wait, tries)


async def _all(do: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Do something to all items, some at a time; raise the first error when all have ended."""
    items = list(items)
    if not items:
        return
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(item: T) -> None:
        async with slots:
            await do(item)

    for result in await asyncio.gather(*map(one, items), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _reported(memo: JobMemo) -> set[tuple[Ref, str]]:
    """Return what the planner is told of what cannot be had."""
    return {(ref, child_error.message) for ref, child_error in memo.child_errors.items()}


def _stage(rendered: Object) -> CreationStage:
    if BY_KIND[rendered["kind"]].pods:
        return CreationStage.PODS
    return CreationStage.BINDINGS if rendered["kind"] == "RoleBinding" else CreationStage.BASE


def _ref(rendered: Object) -> Ref:
    return rendered["kind"], rendered["metadata"]["name"]


def _marks(rendered: Object, live: Child) -> tuple[Any, ...]:
    """Return all that decides whether a child is as it shall be.

    Of objects with a generation it is that and the metadata: their resource version changes with every word that a
    controller says in their status.
    """
    meta = live.metadata
    seen: tuple[Any, ...] = (meta.uid, meta.resource_version)
    if meta.generation:
        seen = (meta.uid, meta.generation, meta.labels, meta.annotations, meta.owner_references)
    # A plan sets replicas and budgets besides what was rendered.
    numbers = (drift.replicas_of(rendered), rendered.get("spec", {}).get("maxUnavailable"))
    wanted = (drift.role_of(rendered), drift.intent_of(rendered), *numbers, rendered.get("status"))
    return (meta.deletion_timestamp, *seen, *wanted)
