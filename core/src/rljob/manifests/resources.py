"""What pods of the trainer and of engines request besides what every pod has: accelerators, shared memory, network
adapters, and a place near the gang.

The gang is the trainer and the minimum of engines of each pool: none of them is of use without the others.
Pods stay restricted. CAP_IPC_LOCK, which guides to RDMA add, has no effect for processes that do not run as root: the
limit of the container runtime decides how much memory they may lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.kubernetes import GPUS, Accelerator
from rljob.api.roles import Rollout, Trainer
from rljob.manifests import names
from rljob.manifests.pods import Volume
from rljob.manifests.render_context import RenderContext

REQUESTS = {"cpu": "250m", "memory": "1Gi"}
"""The least that any model needs. Pods that ask for nothing are the first to go when a node runs short of memory."""
LOST_NODE_SECONDS = 30
"""A pod of what is cheap to replace goes so soon after its node is lost (Kubernetes' default is five minutes)."""
GANG = "gang"
ELASTIC = "elastic"


@dataclass(frozen=True)
class Resources:
    """Of a pod: resources and variables of its main container, volumes, taints it bears, fields of its spec."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[Volume] = ()
    tolerations: Sequence[Mapping[str, Any]] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


def resources(ctx: RenderContext, role: Trainer | Rollout, devices: int) -> Resources:
    """Return what a pod of a role with ``devices`` accelerators asks for."""
    limits, hidden, taints = _accelerators(ctx, role.accelerator, devices)
    if role.rdma is not None:
        limits[role.rdma.resource] = str(role.rdma.count)
    return Resources(
        resources={"requests": dict(REQUESTS)} | ({"limits": limits} if limits else {}),
        variables={**hidden, **role.nccl},
        volumes=[_shared_memory(role.shared_memory)],
        tolerations=taints,
        # Without the policy such a pod knows its node's name server alone, which finds no coordinator.
        more={"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if role.host_network else {},
    )


def lost_node() -> list[dict[str, Any]]:
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


def _accelerators(
    ctx: RenderContext, wanted: Accelerator, devices: int
) -> tuple[dict[str, str], dict[str, str], list[dict[str, Any]]]:
    """Return limits, variables and tolerations; no limits where the role computes on the processor."""
    kind = ctx.cluster.accelerator if wanted.kind == "auto" else wanted.kind
    if kind == "cpu":
        # Where NVIDIA's runtime is the default, images made for GPUs see all of a node's unless told not to.
        return {}, {"NVIDIA_VISIBLE_DEVICES": "void"}, []
    return {GPUS: str(devices)}, {}, [{"key": GPUS, "operator": "Exists", "effect": "NoSchedule"}]


def _shared_memory(bound: str | None) -> Volume:
    """Return the memory that the processes of a pod share."""
    source = {"medium": "Memory"} | ({"sizeLimit": bound} if bound else {})
    return {"name": "shm", "emptyDir": source}, "/dev/shm"


def tier(which: str) -> dict[str, str]:
    """Return the label that tells the gang's pods from elastic ones."""
    return {names.TIER: which}


def near_the_gang(ctx: RenderContext, which: str) -> dict[str, Any]:
    """Return the fields of a PodSpec that place the gang's pods as scheduling.topology says.

    The gang's pods must be near one another, elastic ones should be: they are no reason to place the gang elsewhere.
    """
    topology = ctx.job.spec.scheduling.topology
    if topology is None:
        return {}
    term = {
        "labelSelector": {"matchLabels": names.selector(ctx.job.metadata.name) | tier(GANG)},
        "topologyKey": topology.key,
    }
    if which == GANG:
        return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}}
