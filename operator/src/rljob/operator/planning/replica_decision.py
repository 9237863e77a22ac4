"""The built-in autoscaler: from the load of a role to its replicas.

:func:`decide` is a function of the load over time, the present replicas and a policy. More replicas need a load that
asked for them during the whole of ``out_seconds``, fewer replicas one during the whole of ``in_seconds``. A change of
the replicas begins both windows again, so two changes are never closer than a window.

The operator writes the decision to the RLJobScale of the role, and stops when something else writes there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rljob.api.autoscaling import Autoscaling, Replicas
from rljob.api.models import RLJobSpec
from rljob.manifests.names import role_name
from rljob.operator.plan import COORDINATOR, Event
from rljob.operator.planning import reasons
from rljob.operator.planning.job_view import JobView, is_ready
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.scale_policy import LoadPoint, SampledRole, ScalePolicy

TOLERANCE = 0.1
"""A load that differs by less than this share from what the present replicas are for changes nothing."""
LARGEST_STEP = 4
"""One decision at most doubles the replicas, or adds so many."""
ACTIVE = ("Running", "Evaluating")
"""States of a run in which loads count."""


def decide(points: Sequence[LoadPoint], current: int, policy: ScalePolicy, now: float) -> int:
    """Return the replicas that a role should have.

    Args:
        points: loads since the last change of the replicas, oldest first. A load holds until the next one.
        current: the present replicas.
        policy: bounds, target and windows.
        now: Unix seconds.
    """
    if not points:
        return policy.clamp(current)
    newest = policy.clamp(replicas_for(points[-1].load, policy.target, current))
    largest = max(2 * current, current + LARGEST_STEP)
    if current == 0 and newest > 0:
        return min(newest, largest)  # work waits, and nothing serves it
    out = _needed(points, current, policy, now - policy.out_seconds)
    if out and min(out) > current:
        return min(*out, largest)
    fewer = _needed(points, current, policy, now - policy.in_seconds)
    if fewer and max(fewer) < current and not (policy.idle_only and points[-1].load):
        return max(fewer)
    return policy.clamp(current)


def replicas_for(load: float, target: float, current: int) -> int:
    """Return the replicas that a load needs; ``current`` if that is near enough."""
    needed = load / target
    if current and abs(needed / current - 1) <= TOLERANCE:
        return current
    return math.ceil(needed - 1e-9)


def _needed(points: Sequence[LoadPoint], current: int, policy: ScalePolicy, since: float) -> list[int]:
    """Return the replicas needed by each load in a window until now; empty: the points do not cover the window."""
    if points[0].at > since:
        return []
    first = max(i for i, point in enumerate(points) if point.at <= since)
    return [policy.clamp(replicas_for(point.load, policy.target, current)) for point in points[first:]]


def policies(spec: RLJobSpec) -> dict[str, ScalePolicy]:
    """Return role → policy of the roles that the built-in autoscaler scales."""
    return {
        role: ScalePolicy(
            target=target,
            minimum=replicas.min,
            maximum=replicas.max,
            out_seconds=autoscaling.scale_out_seconds,
            in_seconds=autoscaling.scale_in_seconds,
            idle_only=role.startswith("environment-"),
        )
        for role, replicas, autoscaling, target in _scalable(spec)
        if autoscaling.provider == "builtin" and replicas.max is not None and replicas.max > replicas.min
    }


def _scalable(spec: RLJobSpec) -> Iterator[tuple[str, Replicas, Autoscaling, int]]:
    """Yield role, bounds, settings and target of the roles with a load."""
    for reward in spec.rewards:
        if reward.url is None:
            yield role_name("reward", reward.name), reward.replicas, reward.autoscaling, reward.target_in_flight
    for entry in spec.environments:
        if entry.url is None:
            yield role_name("environment", entry.name), entry.replicas, entry.autoscaling, entry.target_in_flight
    for pool in spec.policy_pools:
        yield role_name("rollout", pool.name), pool.replicas, pool.autoscaling, 1
    yield "runner", spec.runner.replicas, spec.runner.autoscaling, spec.runner.target_in_flight


def autoscale(builder: PlanBuilder, view: JobView) -> None:
    """Decide for every role whose load is known, and record what is to be sampled."""
    run = view.observed.status.run
    if run is None or run.state not in ACTIVE or view.gives_back or not _coordinator_is_ready(view):
        return
    for role, policy in policies(view.job.spec).items():
        if view.observed.scale_owners.get(role):
            continue
        current = view.wanted[role]
        builder.sampled[role] = SampledRole(policy, current)
        if role not in view.observed.scales:
            continue  # this plan creates the RLJobScale, of which no event is heard
        replicas = decide(view.observed.loads.get(role, ()), current, policy, builder.now)
        if replicas != current:
            builder.scales[role] = replicas
            builder.events.append(_event(view, role, current, replicas, policy))


def _coordinator_is_ready(view: JobView) -> bool:
    """Return whether the loads in the status are current: the coordinator writes them."""
    return any(is_ready(pod) for pod in view.pods.get(COORDINATOR, ()))


def _event(view: JobView, role: str, current: int, replicas: int, policy: ScalePolicy) -> Event:
    load = view.observed.loads[role][-1].load
    reason = reasons.SCALED_OUT if replicas > current else reasons.SCALED_IN
    message = f"{role}: {current} → {replicas} replicas, for a load of {load:g}, {policy.target:g} for each"
    return Event("Normal", reason, message)
