"""NetworkPolicies of a job.

Pods of the job may connect to each other on all ports, because weight groups use dynamic ports. Pods with hostNetwork
have their node's address, and no policy selects them: connections from them are admitted by network.nodes, and
connections to them are not restricted.
"""

from __future__ import annotations

from typing import Any

from rljob.api.kubernetes import Destination, Peer
from rljob.api.pod_models import PORT
from rljob.manifests import names
from rljob.manifests.inputs import Object
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey

API_PORTS = (443, 6443)
"""Ports of the Kubernetes API: of its Service and of its servers. Rendering does not know their addresses."""
DNS_PORT = 53


def network(ctx: RenderContext) -> RenderedRole:
    """Return the role of the network policies. With `policy: Disabled` it has no objects."""
    spec = ctx.job.spec.network
    role = ctx.role_key("network", own=ctx.inputs.written.get("network"))
    objects: list[Object] = []
    if spec.policy == "Enabled":
        objects.append(_policy(ctx, role, "pods", "", _pods(ctx)))
        if coordinator := _coordinator(ctx):
            objects.append(_policy(ctx, role, "coordinator", "coordinator", coordinator))
    return RenderedRole(role.name, role.kind, role.hash, tuple(objects))


def _policy(ctx: RenderContext, role: RoleKey, name: str, to_role: str, spec: dict[str, Any]) -> Object:
    selector = {"matchLabels": names.selector(ctx.job.metadata.name, to_role)}
    body = {"spec": {"podSelector": selector, **spec}}
    return ctx.object(role, "NetworkPolicy", ctx.name("network", name), body, api="networking.k8s.io/v1")


def _pods(ctx: RenderContext) -> dict[str, Any]:
    nodes = [_range(each) for each in ctx.job.spec.network.nodes]
    own = [{"podSelector": {"matchLabels": names.selector(ctx.job.metadata.name)}}, *nodes]
    spec: dict[str, Any] = {"policyTypes": ["Ingress"], "ingress": [{"from": own}]}
    egress = ctx.job.spec.network.egress
    if egress.policy == "Listed":
        dns = [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]
        listed = [{"to": [_range(destination)]} for destination in egress.to]
        spec["policyTypes"].append("Egress")
        spec["egress"] = [{"to": own}, {"ports": dns}, *listed]
    return spec


def _coordinator(ctx: RenderContext) -> dict[str, Any]:
    """Return the spec of the coordinator's additional policy; empty if there is none."""
    wanted = ctx.job.spec.network
    spec: dict[str, Any] = {"policyTypes": []}
    if wanted.allow_from:
        spec["policyTypes"].append("Ingress")
        ports = [{"port": PORT, "protocol": "TCP"}]
        spec["ingress"] = [{"from": [_peer(peer) for peer in wanted.allow_from], "ports": ports}]
    if wanted.egress.policy == "Listed":
        spec["policyTypes"].append("Egress")
        spec["egress"] = [{"ports": [{"port": port, "protocol": "TCP"} for port in API_PORTS]}]
    return spec if spec["policyTypes"] else {}


def _range(destination: Destination) -> dict[str, Any]:
    return {"ipBlock": {"cidr": destination.cidr}}


def _peer(peer: Peer) -> dict[str, Any]:
    pods = {"podSelector": {"matchLabels": peer.pod_labels} if peer.pod_labels else {}}
    if not peer.namespace_labels:
        return pods
    return {"namespaceSelector": {"matchLabels": peer.namespace_labels}} | (pods if peer.pod_labels else {})
