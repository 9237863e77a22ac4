"""Checks of the bounds of replicas, of what changes replicas, and of the gang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rljob.api.kubernetes import WITH_QUEUES, GangProvider

if TYPE_CHECKING:
    from rljob.api.autoscaling import Autoscaling, Replicas
    from rljob.api.models import RLJobSpec


NO_QUEUES = "this provider has no queues; remove it, or set provider volcano or kueue"
NO_QUEUE = "required by provider kueue; give the name of a LocalQueue"
ELASTIC = "kueue admits a fixed number of pods; remove replicas.max of every role, or set it to min"


def replica_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each contradiction; the field's path is relative to spec."""
    yield from _bounds(spec)
    yield from _autoscaling(spec)
    if spec.scheduling.gang.provider is not None:
        yield from gang_problems(spec, spec.scheduling.gang.provider)


def gang_problems(spec: RLJobSpec, provider: GangProvider) -> Iterator[str]:
    """Yield one ``field: sentence`` for each part of the spec that contradicts the gang provider."""
    queue = spec.scheduling.gang.queue
    if queue is not None and provider not in WITH_QUEUES:
        yield f"scheduling.gang.queue: {NO_QUEUES}"
    if provider != "kueue":
        return
    if queue is None:
        yield f"scheduling.gang.queue: {NO_QUEUE}"
    if any(replicas.max is not None and replicas.max > replicas.min for replicas in _replicas(spec).values()):
        yield f"scheduling.gang.provider: {ELASTIC}"


def _replicas(spec: RLJobSpec) -> dict[str, Replicas]:
    """Return the field of each role with replicas → its replicas."""
    found: dict[str, Replicas] = {f"rewards[{i}]": reward.replicas for i, reward in enumerate(spec.rewards)}
    found |= {f"environments[{i}]": environment.replicas for i, environment in enumerate(spec.environments)}
    found |= {f"rollouts[{i}]": pool.replicas for i, pool in enumerate(spec.rollouts)}
    found["runner"] = spec.runner.replicas
    return found


def _bounds(spec: RLJobSpec) -> Iterator[str]:
    for path, replicas in _replicas(spec).items():
        if replicas.max is not None and replicas.max < replicas.min:
            yield f"{path}.replicas.max: {replicas.max} is less than min, {replicas.min}; raise it or lower the other"
        if replicas.min == 0 and replicas.max is None:
            yield f"{path}.replicas.max: required with min 0; set the most pods that the service may have"


def _autoscaling(spec: RLJobSpec) -> Iterator[str]:
    found: dict[str, Autoscaling] = {f"{field}.autoscaling": each.autoscaling for field, each in spec.services.items()}
    found |= {f"rollouts[{i}].autoscaling": pool.autoscaling for i, pool in enumerate(spec.rollouts)}
    found["runner.autoscaling"] = spec.runner.autoscaling
    for path, autoscaling in found.items():
        if autoscaling.provider == "keda" and autoscaling.keda is None:
            yield f"{path}.keda: required by provider keda; give the address of Prometheus in keda.serverAddress"
        if autoscaling.provider != "keda" and autoscaling.keda is not None:
            yield f"{path}.keda: only provider keda reads it; remove it, or set provider: keda"
    for i, pool in enumerate(spec.rollouts):
        if pool.frozen and pool.autoscaling.keda is not None and pool.autoscaling.keda.query is None:
            yield f"rollouts[{i}].autoscaling.keda.query: required, rljob knows no load of a frozen pool; give a query"
