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
from rljob.manifests.inputs import Object
from rljob.operator import drift
from rljob.operator.errors import REFUSALS, AlreadyExistsError, ConflictError, NotFoundError
from rljob.operator.informers import Caches
from rljob.operator.kube import Client
from rljob.operator.ownership import applied_fields, foreign_sentence, is_ours
from rljob.operator.plan import Plan, Ref
from rljob.operator.resources import BY_KIND, PODS, SECRETS, Resource
from rljob.operator.secret import new_secret
from rljob.operator.seen import JOB_LABEL, ROLE_LABEL, Child, Meta

log = logging.getLogger(__name__)

T = TypeVar("T")

AT_A_TIME = 8
"""Requests for one job."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
SOONEST_RETRY_SECONDS = 0.5
"""Whatever goes wrong, a job is not looked at more often than this because of what cannot be had."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
DELETION_REFUSED = "it cannot be deleted: "
"""What is said of a child that shall go and cannot begins with this."""
SCALE = "RLJobScale"
"""Its replicas belong to whoever scales: ours at creation only."""
SCALED = ("Deployment", "StatefulSet")
INITIALIZER = "initializer"
"""The role that has no tokens."""


class Stage(enum.Enum):
    """Order in which a job's objects are made, all of a stage at a time."""

    BASE = 0
    BINDINGS = 1
    """Only who has the rights of a Role, or may bind it, may name it: it must be there to be looked at."""
    PODS = 2
    """What pods follow from: all that they mount and need is there."""


@dataclass
class Trouble:
    """A child that cannot be had for now."""

    message: str
    foreign: bool
    """An object that is not the job's has the name; else the API server refuses ours."""
    retry_at: float
    """By the executor's clock."""
    tries: int


@dataclass
class Memory:
    """What is remembered of a job between reconciles; nothing that could not be found out again."""

    generation: int = 0
    troubles: dict[Ref, Trouble] = field(default_factory=dict)
    settled: dict[Ref, tuple[Any, ...]] = field(default_factory=dict)
    """Child → what was compared when it was found to be as it shall be."""
    free: set[Ref] = field(default_factory=set)
    """Of what is needed: names that nothing foreign had when they were looked at."""
    unmendable: dict[Ref, tuple[str, frozenset[drift.Path]]] = field(default_factory=dict)
    """Child → intent, and the fields that departed from it even right after it was applied."""


class _Answer(msgspec.Struct):
    kind: str = ""


class _Full(msgspec.Struct):
    metadata: dict[str, Any]
    spec: dict[str, Any] = {}


class Executor:
    """Does plans. ``clock``: seconds that never go back."""

    def __init__(self, client: Client, caches: Caches, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._caches, self._clock = client, caches, clock
        self._memories: dict[str, Memory] = {}
        """By the job's uid."""

    def troubles(self, meta: Meta) -> Mapping[Ref, Trouble]:
        """Return the job's children that cannot be had."""
        return self._memory(meta).troubles

    def retry_after(self, meta: Meta) -> float | None:
        """Return seconds until one of them is tried again."""
        moments = [trouble.retry_at for trouble in self._memory(meta).troubles.values()]
        return max(SOONEST_RETRY_SECONDS, min(moments) - self._clock()) if moments else None

    def forget(self, uid: str) -> None:
        """Forget a job that is gone."""
        self._memories.pop(uid, None)

    async def execute(self, meta: Meta, job: RLJob | None, plan: Plan) -> bool:
        """Do the deletions, pod costs and desired objects of a plan, once what is needed was looked at.

        Returns:
            Whether anything was found that the planner did not know: then it must be asked again.

        Raises:
            ApiError: something failed that may work later. As much as could be done was done.
        """
        memory = self._memory(meta)
        asked = {_ref(rendered) for rendered in plan.desired} | {ref for ref, _ in plan.deletions} | {*plan.needed}
        for ref in memory.troubles.keys() - asked:
            if ref[0] != SECRETS.kind or not plan.desired:
                del memory.troubles[ref]
        memory.free.intersection_update(plan.needed)
        before = _told(memory)

        await _all(lambda doomed: self._delete(meta, memory, *doomed), plan.deletions)
        await _all(lambda dear: self._set_cost(meta, *dear), plan.pod_costs.items())
        await _all(lambda ref: self._look(meta, memory, ref), plan.needed)
        if before != _told(memory):
            return True
        for stage in Stage:
            group = [
                each for each in plan.desired if _stage(each) is stage and not self._is_settled(meta, memory, each)
            ]
            there = [each for each in group if self._find(meta, _ref(each)) is not None]
            if stage is Stage.PODS and len(there) < len(group):
                assert job is not None, "nothing is desired of a job that is not valid"
                if not await self._make_secret(meta, memory, job):
                    group = there
            await _all(lambda each: self._keep(meta, memory, each), group)
            if before != _told(memory):
                return True  # what follows may not be wanted without what is missing
        return False

    def _memory(self, meta: Meta) -> Memory:
        memory = self._memories.setdefault(meta.uid, Memory())
        if memory.generation != meta.generation:
            # The user may have mended what was refused: try at once. What is said of it stays until then.
            memory.generation = meta.generation
            for trouble in memory.troubles.values():
                trouble.retry_at, trouble.tries = self._clock(), 0
        return memory

    def _waits(self, memory: Memory, ref: Ref) -> bool:
        """Return whether it is too soon to try again what failed."""
        trouble = memory.troubles.get(ref)
        return trouble is not None and self._clock() < trouble.retry_at

    def _find(self, meta: Meta, ref: Ref) -> Child | None:
        return self._caches.children[ref[0]].find(meta.namespace, ref[1])

    def _is_settled(self, meta: Meta, memory: Memory, rendered: Object) -> bool:
        """Return whether a child was found to be as it shall be, and neither of the two has changed since."""
        ref = _ref(rendered)
        live = self._find(meta, ref)
        return live is not None and ref not in memory.troubles and memory.settled.get(ref) == _marks(rendered, live)

    async def _look(self, meta: Meta, memory: Memory, ref: Ref) -> None:
        """Find out whether an object that is needed later is foreign."""
        trouble = memory.troubles.get(ref)
        if ref in memory.free or self._waits(memory, ref) or (trouble is not None and not trouble.foreign):
            return
        live = self._find(meta, ref)
        if live is None:
            with contextlib.suppress(NotFoundError):
                live = self._take(ref[0], await self._client.get(BY_KIND[ref[0]], meta.namespace, ref[1]))
        if live is not None and not is_ours(meta, live.kind, live.metadata):
            self._note_foreign(meta, memory, live)
        else:
            memory.free.add(ref)
            memory.troubles.pop(ref, None)

    async def _keep(self, meta: Meta, memory: Memory, rendered: Object) -> None:
        """Have an object as it is rendered.

        It is applied if its role's inputs are others, or if it was rendered to the same but somebody changed it. An
        object that another version of the operator rendered of the same inputs is left alone, replicas apart.
        """
        ref = _ref(rendered)
        live = self._find(meta, ref)
        if live is not None and not is_ours(meta, live.kind, live.metadata):
            self._note_foreign(meta, memory, live)
            return
        if self._waits(memory, ref) and (live is None or not memory.troubles[ref].foreign):
            return
        try:
            if live is None:
                live = await self._make(meta, memory, rendered)
            if live is None:
                return  # foreign
            if live.metadata.deletion_timestamp is None:
                await self._mend(meta, memory, rendered, live)
            memory.troubles.pop(ref, None)
        except REFUSALS as error:
            self._note(memory, ref, error.message, foreign=False)

    async def _make(self, meta: Meta, memory: Memory, rendered: Object) -> Child | None:
        """Make an object, or find that it is there; return it unless it is foreign."""
        ref, resource = _ref(rendered), BY_KIND[rendered["kind"]]
        name = ref[1]
        known = memory.troubles.get(ref)
        if known is None or not known.foreign or not await self._exists(resource, meta.namespace, name):
            body = {key: value for key, value in rendered.items() if key != "status"}
            try:
                made = await self._client.create(resource, meta.namespace, body)
            except AlreadyExistsError:
                pass
            else:
                child = self._take(ref[0], made)
                if "status" not in rendered:
                    memory.settled[ref] = _marks(rendered, child)
                return child
        try:
            there = await self._client.get(resource, meta.namespace, name)
        except NotFoundError as error:  # it went just now
            raise ConflictError(409, "Conflict", f"{ref[0]} {name} comes and goes") from error
        child = self._take(ref[0], there)
        if is_ours(meta, ref[0], child.metadata):
            return child
        self._note(memory, ref, foreign_sentence(meta, ref[0], child.metadata), foreign=True)
        return None

    async def _exists(self, resource: Resource, namespace: str, name: str) -> bool:
        """Look for a foreign object, so that one that stays costs reads and no writes."""
        try:
            await self._client.get(resource, namespace, name)
        except NotFoundError:
            return False
        return True

    async def _mend(self, meta: Meta, memory: Memory, rendered: Object, live: Child) -> None:
        ref = _ref(rendered)
        replicas = drift.replicas_of(rendered) if live.kind in SCALED else None
        if memory.settled.get(ref) == _marks(rendered, live):
            return
        if not drift.same_role(rendered, live):
            live = await self._apply(meta, memory, rendered, live)
        elif drift.same_rendering(rendered, live):
            intent, departed = memory.unmendable.get(ref, ("", frozenset()))
            if intent != drift.rendered_hash_of(rendered):
                departed = frozenset()
            if drift.departures(rendered, live.body) - departed:
                live = await self._apply(meta, memory, rendered, live)
        if replicas is not None and drift.replicas_of(live.body) != replicas:
            live = await self._scale(meta, live, replicas)
        live = await self._apply_status(meta, rendered, live)
        memory.settled[ref] = _marks(rendered, live)

    async def _apply(self, meta: Meta, memory: Memory, rendered: Object, live: Child) -> Child:
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
        applied = self._take(live.kind, await self._client.apply(resource, meta.namespace, name, body))
        still = drift.departures(rendered, applied.body)
        memory.unmendable[_ref(rendered)] = (drift.rendered_hash_of(rendered), still)
        return applied

    async def _scale(self, meta: Meta, live: Child, replicas: int) -> Child:
        patch = {"metadata": {"uid": live.metadata.uid}, "spec": {"replicas": replicas}}
        raw = await self._client.merge_patch(BY_KIND[live.kind], meta.namespace, live.metadata.name, patch)
        return self._take(live.kind, raw)

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
        return self._take(live.kind, raw)

    async def _delete(self, meta: Meta, memory: Memory, ref: Ref, uid: str) -> None:
        kind, name = ref
        cache = self._caches.pods if kind == PODS.kind else self._caches.children[kind]
        known = cache.find(meta.namespace, name)
        if known is not None and known.metadata.uid == uid and known.metadata.deletion_timestamp is not None:
            return
        if self._waits(memory, ref):
            return
        try:
            answer = await self._client.delete(cache.resource, meta.namespace, name, uid)
        except NotFoundError:
            cache.deleted(meta.namespace, name, uid)
        except ConflictError:
            pass  # another object has the name by now: its event comes
        except REFUSALS as error:
            log.warning("%s/%s: %s %s cannot be deleted: %s", meta.namespace, meta.name, *ref, error)
            self._note(memory, ref, f"{DELETION_REFUSED}{error.message}", foreign=False)
            return
        else:
            if msgspec.json.decode(answer, type=_Answer).kind == "Status":
                cache.deleted(meta.namespace, name, uid)
            else:
                cache.put(answer)
        memory.troubles.pop(ref, None)

    async def _set_cost(self, meta: Meta, name: str, cost: int) -> None:
        """Say which pod is to go first. Where that may not be said, others may go instead, and work is repeated."""
        pod = self._caches.pods.find(meta.namespace, name)
        if pod is None or pod.metadata.annotations.get(DELETION_COST) == str(cost):
            return
        patch = {"metadata": {"uid": pod.metadata.uid, "annotations": {DELETION_COST: str(cost)}}}
        with contextlib.suppress(NotFoundError, ConflictError):  # the pod is gone: so is its cost
            try:
                self._caches.pods.put(await self._client.merge_patch(PODS, meta.namespace, name, patch))
            except REFUSALS as error:
                log.warning("%s/%s: pod %s may not be marked as one to go: %s", meta.namespace, meta.name, name, error)

    async def _make_secret(self, meta: Meta, memory: Memory, job: RLJob) -> bool:
        """Have the job's Secret; return whether it is there.

        Raises:
            ConflictError: somebody had deleted it. Its tokens are others now, so what runs by the old ones was deleted.
        """
        body = new_secret(meta, job)
        ref = _ref(body)
        if self._waits(memory, ref):
            return False
        try:
            await self._client.create(SECRETS, meta.namespace, body)
        except AlreadyExistsError:  # by its name it is this very job's
            memory.troubles.pop(ref, None)
            return True
        except REFUSALS as error:
            self._note(memory, ref, error.message, foreign=False)
            return False
        memory.troubles.pop(ref, None)
        outdated = [((child.kind, child.metadata.name), child.metadata.uid) for child in self._token_holders(meta)]
        if outdated:
            await _all(lambda doomed: self._delete(meta, memory, *doomed), outdated)
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
            and child.metadata.labels.get(ROLE_LABEL) != INITIALIZER
        ]

    def _take(self, kind: str, raw: bytes) -> Child:
        """Take the answer to a write into the cache, and return it."""
        cache = self._caches.children[kind]
        child = cache.read(raw)
        cache.take(child)
        return child

    def _note_foreign(self, meta: Meta, memory: Memory, live: Child) -> None:
        ref = live.kind, live.metadata.name
        if live.metadata.labels.get(JOB_LABEL) == meta.name:
            memory.troubles.pop(ref, None)  # labelled as ours, so the planner sees it, and we see it go
        elif not self._waits(memory, ref):  # another job's: its events are that one's
            self._note(memory, ref, foreign_sentence(meta, live.kind, live.metadata), foreign=True)

    def _note(self, memory: Memory, ref: Ref, message: str, *, foreign: bool) -> None:
        known = memory.troubles.get(ref)
        tries = known.tries + 1 if known is not None else 1
        wait = min(FIRST_RETRY_SECONDS * 2.0 ** min(tries - 1, 10), LAST_RETRY_SECONDS)
        memory.troubles[ref] = Trouble(message, foreign, self._clock() + wait, tries)


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


def _told(memory: Memory) -> set[tuple[Ref, str]]:
    """Return what the planner is told of what cannot be had."""
    return {(ref, trouble.message) for ref, trouble in memory.troubles.items()}


def _stage(rendered: Object) -> Stage:
    if BY_KIND[rendered["kind"]].pods:
        return Stage.PODS
    return Stage.BINDINGS if rendered["kind"] == "RoleBinding" else Stage.BASE


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
    wanted = (drift.role_of(rendered), drift.rendered_hash_of(rendered), *numbers, rendered.get("status"))
    return (meta.deletion_timestamp, *seen, *wanted)
