"""What changes the replicas of a role: its RLJobScale, and on request a ScaledObject of KEDA that writes it.

Source of the ScaledObject: the CustomResourceDefinition of KEDA (keda.sh/v1alpha1) and its Prometheus scaler.
"""

from __future__ import annotations

import json

from rljob.api.autoscaling import Autoscaling, Keda, Replicas
from rljob.manifests.hashes import digest
from rljob.manifests.inputs import Object
from rljob.manifests.render_context import RenderContext, RoleKey

LOAD_METRIC = "rljob_role_load"
"""Metric of the coordinator: the load of a role."""
POLLING_SECONDS = 15
"""Interval between two queries of KEDA."""


def scale(ctx: RenderContext, role: RoleKey, replicas: Replicas, autoscaling: Autoscaling, target: int) -> list[Object]:
    """Return the RLJobScale of a role with max > min, and its ScaledObject. The replicas of the RLJobScale are an
    initial value that autoscalers change. ``target``: load per pod."""
    if replicas.max is None or replicas.max <= replicas.min:
        return []
    body = {"spec": {"job": ctx.job.metadata.name, "role": role.name, "replicas": replicas.min}}
    found = [ctx.object(role, "RLJobScale", ctx.name(role.name), body, api=ctx.job.api_version)]
    if autoscaling.keda is not None:
        found.append(_scaled_object(ctx, role, replicas, autoscaling, autoscaling.keda, target))
    return found


def _scaled_object(
    ctx: RenderContext, role: RoleKey, replicas: Replicas, autoscaling: Autoscaling, keda: Keda, target: int
) -> Object:
    name = ctx.name(role.name)
    trigger = {"serverAddress": keda.server_address, "query": keda.query or _query(ctx, role), "threshold": str(target)}
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": autoscaling.scale_out_seconds},
        "scaleDown": {"stabilizationWindowSeconds": autoscaling.scale_in_seconds},
    }
    spec = {
        "scaleTargetRef": {"apiVersion": ctx.job.api_version, "kind": "RLJobScale", "name": name},
        "minReplicaCount": replicas.min,
        "maxReplicaCount": replicas.max,
        "pollingInterval": POLLING_SECONDS,
        "cooldownPeriod": autoscaling.scale_in_seconds,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
    }
    # A hash of its own: its fields may change without a change of the role's pods.
    own = RoleKey(role.kind, digest("ScaledObject", spec), role.entry)
    return ctx.object(own, "ScaledObject", name, {"spec": spec}, api="keda.sh/v1alpha1")


def _query(ctx: RenderContext, role: RoleKey) -> str:
    """Return the PromQL query of the load of a role. Prometheus may scrape a pod by more than one path: hence max."""
    labels = {"namespace": ctx.target.namespace, "pod": f"{ctx.name('coordinator')}-0", "role": role.name}
    return f"max({LOAD_METRIC}{{{','.join(f'{name}={json.dumps(value)}' for name, value in labels.items())}}})"
