"""Requests of the pods of trainer and engines: accelerators, shared memory, network adapters, affinity to the gang.

The gang consists of the trainer and the minimum of engines of each pool. None of them can work without the others.
Pods remain restricted. Guides to RDMA add CAP_IPC_LOCK, but it has no effect for processes that do not run as root: the
limit of the container runtime decides how much memory they may lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rljob.api.kubernetes import Accelerator
from rljob.api.roles import Rollout, Trainer
from rljob.manifests import names
from rljob.manifests.accelerator_profiles import AcceleratorProfile
from rljob.manifests.gang import GANG
from rljob.manifests.render_context import RenderContext, Volume

REQUESTS = {"cpu": "250m", "memory": "1Gi"}
"""Requests of a pod without GPUs. Pods without requests are evicted first when a node runs out of memory."""
LOST_NODE_SECONDS = 10
"""Pods are replaced this long after Kubernetes has declared their node lost, which takes up to 50 seconds. Kubernetes'
default is five minutes."""
ANY_GPU = AcceleratorProfile()
"""The accelerators of a role without a profile."""


@dataclass(frozen=True)
class Resources:
    """Requests of a pod: resources and variables of the main container, volumes, tolerations, other PodSpec fields, and
    the template of its accelerator profile."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[Volume] = ()
    tolerations: Sequence[Mapping[str, Any]] = ()
    spec_fields: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None


def resources(ctx: RenderContext, role: Trainer | Rollout, devices: int) -> Resources:
    """Return the requests of a pod with ``devices`` accelerators."""
    profile = _profile(ctx, role.accelerator)
    limits = profile.limits(devices) if profile else {}
    if role.rdma is not None:
        limits[role.rdma.resource] = str(role.rdma.count)
    # Without this policy the pod uses only its node's name server, which cannot resolve the coordinator.
    own_network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if role.host_network else {}
    return Resources(
        resources={"requests": _requests(ctx, profile, devices)} | ({"limits": limits} if limits else {}),
        variables={**_variables(profile), **role.nccl},
        volumes=[_shared_memory(role.shared_memory)],
        tolerations=_tolerations(profile),
        spec_fields=own_network
        | ({"nodeSelector": profile.node_selector} if profile and profile.node_selector else {}),
        template=profile.template if profile else None,
    )


def _profile(ctx: RenderContext, wanted: Accelerator) -> AcceleratorProfile | None:
    """Return the profile of a role: its own, or NVIDIA GPUs of any node. None: the role is on CPU."""
    if wanted.profile is not None:
        return ctx.cluster.accelerator_profiles[wanted.profile]
    kind = ctx.cluster.accelerator if wanted.kind == "auto" else wanted.kind
    return None if kind == "cpu" else ANY_GPU


def _requests(ctx: RenderContext, profile: AcceleratorProfile | None, devices: int) -> dict[str, str]:
    """Return the requests of a pod: in proportion to its GPUs, which share a node's CPU and memory."""
    if profile is None:
        return dict(REQUESTS)
    per_gpu = profile.requests_per_gpu
    quantities = per_gpu.model_dump() if per_gpu is not None else ctx.cluster.requests_per_gpu
    return {resource: _times(quantity, devices) for resource, quantity in quantities.items()}


def _variables(profile: AcceleratorProfile | None) -> dict[str, str]:
    if profile is None:
        # With NVIDIA's runtime as default, GPU images see all GPUs of the node unless this is set.
        return {"NVIDIA_VISIBLE_DEVICES": "void"}
    return profile.env


def _tolerations(profile: AcceleratorProfile | None) -> list[Mapping[str, Any]]:
    if profile is None:
        return []
    return [{"key": profile.resource, "operator": "Exists", "effect": "NoSchedule"}, *profile.tolerations]


def _times(quantity: str, count: int) -> str:
    """Return a quantity of Kubernetes (2, 0.5, 8Gi) times ``count``."""
    number = quantity.rstrip("kMGTPEi")
    return f"{(Decimal(number) * count).normalize():f}{quantity[len(number) :]}"


def lost_node_tolerations() -> list[dict[str, Any]]:
    """Return the tolerations of a pod that is replaced soon after its node is lost."""
    return [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]


def _shared_memory(bound: str | None) -> Volume:
    """Return the volume of /dev/shm."""
    source = {"medium": "Memory"} | ({"sizeLimit": bound} if bound else {})
    return {"name": "shm", "emptyDir": source}, "/dev/shm"


def tier_label(which: str) -> dict[str, str]:
    """Return the label that distinguishes gang pods from elastic pods."""
    return {names.TIER: which}


def gang_affinity(ctx: RenderContext, which: str) -> dict[str, Any]:
    """Return the PodSpec fields that implement scheduling.topology.

    Gang pods require the same topology domain. Elastic pods prefer it, so that they do not affect the gang's placement.
    """
    topology = ctx.job.spec.scheduling.topology
    if topology is None:
        return {}
    term = {
        "labelSelector": {"matchLabels": names.selector(ctx.job.metadata.name) | tier_label(GANG)},
        "topologyKey": topology.key,
    }
    if which == GANG:
        return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}}
