"""Samples the load of roles that the built-in autoscaler scales, and requests a reconcile when it would decide.

Coordinators write loads every few seconds; a reconcile for each write would cost more than all other work of the
operator. So this loop reads the loads from the cache, keeps them for the length of the longest window, and asks
:func:`rljob.operator.planning.replica_decision.decide`. The reconcile then decides again, with the same points.

The points are in memory only: a new operator decides once it has seen a whole window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rljob.operator.cache import Cache, CachedJob
from rljob.operator.plan import Key
from rljob.operator.planning.replica_decision import decide
from rljob.operator.scale_policy import LoadPoint, SampledRole

TICK_SECONDS = 1.0
LONGEST_GAP_SECONDS = 60.0
"""Nothing is known about the load in a longer gap between two points."""


class _Load(msgspec.Struct):
    role: str
    load: float


class _Run(msgspec.Struct):
    loads: list[_Load] = []


class _Status(msgspec.Struct):
    run: _Run | None = None


_status = msgspec.json.Decoder(_Status)


@dataclass
class _Sampling:
    role: SampledRole
    points: list[LoadPoint] = field(default_factory=list)

    def add(self, load: float, now: float) -> None:
        """Add a point, and drop those that no window needs."""
        points = self.points
        if points and not 0 <= now - points[-1].at <= LONGEST_GAP_SECONDS:
            points.clear()  # the clock went back, or the operator did not run
        points.append(LoadPoint(now, load))
        since = now - max(self.role.policy.out_seconds, self.role.policy.in_seconds)
        while len(points) > 1 and points[1].at <= since:
            del points[0]


@dataclass
class _Job:
    key: Key
    due: float
    roles: dict[str, _Sampling]


class LoadSampler:
    """The loads of all jobs with roles that are scaled.

    Args:
        jobs: the cached RLJobs.
        on_decision: called with the key of a job whose replicas should change.
        wall: Unix seconds.
    """

    def __init__(self, jobs: Cache[CachedJob], on_decision: Callable[[Key], None], wall: Callable[[], float]) -> None:
        self._cache, self._on_decision, self._wall = jobs, on_decision, wall
        self._jobs: dict[str, _Job] = {}
        """By uid."""

    def register(self, key: Key, uid: str, sampled: Mapping[str, SampledRole]) -> None:
        """Sample exactly these roles of a job. The points of a role end when its policy or its replicas change."""
        if not sampled:
            self._jobs.pop(uid, None)
            return
        known = self._jobs.get(uid)
        before = known.roles if known is not None else {}
        roles = {}
        for name, role in sampled.items():
            old = before.get(name)
            roles[name] = old if old is not None and old.role == role else _Sampling(role)
        self._jobs[uid] = _Job(key, known.due if known is not None else self._wall(), roles)

    def loads(self, uid: str, replicas: Mapping[str, int]) -> dict[str, Sequence[LoadPoint]]:
        """Return role → points since its replicas are ``replicas``."""
        job = self._jobs.get(uid)
        if job is None:
            return {}
        return {
            name: tuple(sampling.points)
            for name, sampling in job.roles.items()
            if name in replicas and sampling.role.replicas == sampling.role.policy.clamp(replicas[name])
        }

    def forget(self, uid: str) -> None:
        """Drop a deleted job."""
        self._jobs.pop(uid, None)

    async def run(self) -> None:
        """Sample again and again. Never returns."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.sample()

    def sample(self) -> None:
        """Take a point of every job that is due."""
        now = self._wall()
        for uid, job in list(self._jobs.items()):
            if abs(now - job.due) < LONGEST_GAP_SECONDS and now < job.due:
                continue
            job.due = now + min(sampling.role.policy.period for sampling in job.roles.values())
            cached = self._cache.find(*job.key)
            if cached is None or cached.metadata.uid != uid:
                continue
            self._add(job, cached, now)

    def _add(self, job: _Job, cached: CachedJob, now: float) -> None:
        try:
            run = _status.decode(cached.status).run
        except msgspec.MsgspecError:
            return  # a user wrote something else there; the coordinator corrects it
        loads = {each.role: each.load for each in run.loads} if run is not None else {}
        for name, sampling in job.roles.items():
            if name not in loads:
                sampling.points.clear()
                continue
            sampling.add(loads[name], now)
            role = sampling.role
            if decide(sampling.points, role.replicas, role.policy, now) != role.replicas:
                self._on_decision(job.key)
