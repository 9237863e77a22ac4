"""Checks of the bounds of replicas, and of what changes replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob.api.autoscaling import Autoscaling, Replicas
    from rljob.api.models import RLJobSpec


def replica_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each contradiction; the field's path is relative to spec."""
    yield from _bounds(spec)
    yield from _autoscaling(spec)


def _bounds(spec: RLJobSpec) -> Iterator[str]:
    found: dict[str, Replicas] = {f"rewards[{i}]": reward.replicas for i, reward in enumerate(spec.rewards)}
    found |= {f"environments[{i}]": environment.replicas for i, environment in enumerate(spec.environments)}
    found |= {f"rollouts[{i}]": pool.replicas for i, pool in enumerate(spec.rollouts)}
    found["runner"] = spec.runner.replicas
    for path, replicas in found.items():
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
