"""NetworkPolicies of a job.

Pods of the job may connect to each other on all ports, because weight groups use dynamic ports. The processes of an
engine that spans hosts listen for each other without a token of rljob, so only the trainer and pods of the same pool
may connect to its pods. Pods with hostNetwork have their node's address, and no policy selects them: connections from
them are admitted by network.nodes, and connections to them are not restricted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rljob.api.kubernetes import Destination, Egress, Peer
from rljob.api.pod_models import PORT
from rljob.api.roles import Environment, Reward, Rollout
from rljob.manifests import names
from rljob.manifests.inputs import Object
from rljob.manifests.names import role_name
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey

API_PORTS = (443, 6443)
"""Ports of the Kubernetes API: of its Service and of its servers. Rendering does not know their addresses."""
DNS_PORT = 53


def network(ctx: RenderContext) -> RenderedRole:
    """Return the role of the network policies. With `policy: Disabled` it has no objects."""
    spec, rewards = ctx.job.spec.network, _own_egress(ctx)
    inputs = [ctx.inputs.written.get("network")]
    inputs += [{name: egress.model_dump(mode="json")} for name, egress in rewards.items()]
    role = ctx.role_key("network", own=inputs if rewards else inputs[0])
    objects: list[Object] = []
    if spec.policy == "Enabled":
        listed = spec.egress.policy == "Listed"
        of_pods = _pods(ctx, restricted=listed and not rewards)
        across = {role_name("rollout", pool.name): pool for pool in ctx.job.spec.rollouts if pool.hosts > 1}
        objects.append(_policy(ctx, role, "pods", "", of_pods, across))
        for name, pool in across.items():
            objects.append(_policy(ctx, role, name, name, {**of_pods, "ingress": _to_hosts(ctx, name, pool)}))
        if (
            listed and rewards
        ):  # a pod may do what any of its policies allows, so none else selects those with their own
            objects.append(_policy(ctx, role, "egress", "", _egress(ctx, spec.egress), rewards))
        for name, egress in rewards.items():
            if egress.policy == "Listed":
                objects.append(_policy(ctx, role, f"egress-{name}", name, _egress(ctx, egress)))
        if coordinator := _coordinator(ctx):
            objects.append(_policy(ctx, role, "coordinator", "coordinator", coordinator))
        objects += _metrics(ctx, role)
    return RenderedRole(role.name, role.kind, role.hash, tuple(objects))


def _own_egress(ctx: RenderContext) -> dict[str, Egress]:
    """Return role → its egress, for roles with one of their own."""
    spec = ctx.job.spec
    kinds: dict[str, Sequence[Reward | Environment]] = {"reward": spec.rewards, "environment": spec.environments}
    own = {role_name(kind, each.name): each.egress for kind, entries in kinds.items() for each in entries}
    return {role: egress for role, egress in own.items() if egress is not None}


def _policy(
    ctx: RenderContext, role: RoleKey, name: str, to_role: str, spec: dict[str, Any], excluded: Collection[str] = ()
) -> Object:
    """Return a policy of the pods of a role, or of all roles without those ``excluded``."""
    selector: dict[str, Any] = {"matchLabels": names.selector(ctx.job.metadata.name, to_role)}
    if excluded:
        selector["matchExpressions"] = [{"key": names.ROLE, "operator": "NotIn", "values": sorted(excluded)}]
    body = {"spec": {"podSelector": selector, **spec}}
    return ctx.object(role, "NetworkPolicy", ctx.name("network", name), body, api="networking.k8s.io/v1")


def _own(ctx: RenderContext) -> list[dict[str, Any]]:
    """Return the peers that are pods of the job."""
    nodes = [_range(each) for each in ctx.job.spec.network.nodes]
    return [{"podSelector": {"matchLabels": names.selector(ctx.job.metadata.name)}}, *nodes]


def _pods(ctx: RenderContext, restricted: bool) -> dict[str, Any]:
    """Return the spec of the policy of all pods. ``restricted``: it restricts outgoing connections too."""
    ingress: dict[str, Any] = {"policyTypes": ["Ingress"], "ingress": [{"from": _own(ctx)}]}
    if not restricted:
        return ingress
    egress = _egress(ctx, ctx.job.spec.network.egress)
    return {**ingress, **egress, "policyTypes": ["Ingress", "Egress"]}


def _to_hosts(ctx: RenderContext, role: str, pool: Rollout) -> list[dict[str, Any]]:
    """Return the admitted connections to the pods of engines that span hosts."""
    roles = [role] if pool.frozen else [role, "trainer"]
    peers = [{"podSelector": {"matchLabels": names.selector(ctx.job.metadata.name, each)}} for each in roles]
    nodes = [_range(each) for each in ctx.job.spec.network.nodes]
    rules: list[dict[str, Any]] = [{"from": [*peers, *nodes]}]
    if pool.frozen:
        rules.append({"from": _own(ctx), "ports": [{"port": PORT, "protocol": "TCP"}]})
    return rules


def _egress(ctx: RenderContext, egress: Egress) -> dict[str, Any]:
    """Return the spec of a policy that allows the job's pods, DNS and the listed destinations."""
    dns = [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]
    listed = [{"to": [_range(destination)]} for destination in egress.to]
    return {"policyTypes": ["Egress"], "egress": [{"to": _own(ctx)}, {"ports": dns}, *listed]}


def _coordinator(ctx: RenderContext) -> dict[str, Any]:
    """Return the spec of the coordinator's additional policy; empty if there is none."""
    wanted = ctx.job.spec.network
    spec: dict[str, Any] = {"policyTypes": []}
    if peers := [*ctx.cluster.allow_from, *wanted.allow_from]:
        spec["policyTypes"].append("Ingress")
        ports = [{"port": PORT, "protocol": "TCP"}]
        spec["ingress"] = [{"from": [_peer(peer) for peer in peers], "ports": ports}]
    if wanted.egress.policy == "Listed":
        spec["policyTypes"].append("Egress")
        spec["egress"] = [{"ports": [{"port": port, "protocol": "TCP"} for port in API_PORTS]}]
    return spec if spec["policyTypes"] else {}


def _metrics(ctx: RenderContext, role: RoleKey) -> list[Object]:
    """Return the policy that lets the peers of the cluster, such as Prometheus, read the metrics of rewards and
    environments. Scores need a token."""
    kinds: dict[str, Sequence[Reward | Environment]] = {
        "reward": ctx.job.spec.rewards,
        "environment": ctx.job.spec.environments,
    }
    served = [role_name(kind, each.name) for kind, entries in kinds.items() for each in entries if each.url is None]
    if not served or not ctx.cluster.allow_from:
        return []
    selector = {
        "matchLabels": names.selector(ctx.job.metadata.name),
        "matchExpressions": [{"key": names.ROLE, "operator": "In", "values": sorted(served)}],
    }
    ports = [{"port": PORT, "protocol": "TCP"}]
    ingress = [{"from": [_peer(peer) for peer in ctx.cluster.allow_from], "ports": ports}]
    body = {"spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}}
    return [ctx.object(role, "NetworkPolicy", ctx.name("network", "metrics"), body, api="networking.k8s.io/v1")]


def _range(destination: Destination) -> dict[str, Any]:
    return {"ipBlock": {"cidr": destination.cidr}}


def _peer(peer: Peer) -> dict[str, Any]:
    pods = {"podSelector": {"matchLabels": peer.pod_labels} if peer.pod_labels else {}}
    if not peer.namespace_labels:
        return pods
    return {"namespaceSelector": {"matchLabels": peer.namespace_labels}} | (pods if peer.pod_labels else {})
