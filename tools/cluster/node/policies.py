"""Enforces NetworkPolicies on the node, as a strict cluster does.

A pod that a policy selects is isolated in the policy's directions: traffic that any policy allows passes, other traffic
is dropped without a reject, as other network plugins do, so traffic that is allowed soon after passes after a retry.
Established connections continue. Traffic of the node itself, such as probes and kubectl exec, is never dropped. The
name server, a process on the node, counts as a pod of kube-system with the usual label.

Source: https://kubernetes.io/docs/reference/kubernetes-api/policy-resources/network-policy-v1/
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.cluster.client import Api, Object, Objects
from tools.cluster.node.system import run

CHAIN = "POLICIES"
HOOKS = ("FORWARD", "INPUT")
"""Traffic between pods, and from pods to the node (API server, name server)."""
_RETURN, _DROP = "-j RETURN", "-j DROP"
_CACHED = {"resourceVersion": "0"}  # from the API server's cache, which is as new as a watch


@dataclass(frozen=True)
class Pod:
    """The properties of a pod that policies use."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[str, int] = field(default_factory=dict)
    """Port name → number."""


class Enforcer:
    """Keeps the iptables rules of one node's network namespace equal to the policies in the API server."""

    def __init__(self, api: Api, node: str) -> None:
        self._api, self._names = api, Pod("kube-system", {"k8s-app": "kube-dns"}, node)
        self._chains: set[str] = set()
        self._text = ""

    def start(self) -> None:
        """Insert the chain into the hooks for traffic of pods."""
        run("iptables", "-N", CHAIN)
        for hook in HOOKS:
            run("iptables", "-I", hook, "-j", CHAIN)

    def update(self) -> None:
        """Update the rules to the current policies.

        Raises:
            ApiError: the API server does not answer.
            CommandError: iptables rejected the rules.
        """
        policies = self._api.list("/apis/networking.k8s.io/v1/networkpolicies", **_CACHED)
        pods: list[Pod] = []
        namespaces: dict[str, Mapping[str, str]] = {}
        if policies:
            pods = [self._names, *read(self._api.list("/api/v1/pods", **_CACHED))]
            found = self._api.list("/api/v1/namespaces", **_CACHED)
            namespaces = {one["metadata"]["name"]: one["metadata"].get("labels", {}) for one in found}
        chains = rules(policies, pods, namespaces)
        text = restore(chains, self._chains - set(chains))
        if text != self._text:
            run("iptables-restore", "--noflush", stdin=text.encode())
            self._text, self._chains = text, set(chains)


def read(pods: Objects) -> Iterator[Pod]:
    """Yield the running and pending pods with their own address."""
    for pod in pods:
        status = pod.get("status", {})
        if status.get("podIP") and not pod["spec"].get("hostNetwork") and status["phase"] in ("Pending", "Running"):
            containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
            named = [port for container in containers for port in container.get("ports", []) if port.get("name")]
            ports = {port["name"]: port["containerPort"] for port in named}
            metadata = pod["metadata"]
            yield Pod(metadata["namespace"], metadata.get("labels", {}), status["podIP"], ports)


def restore(chains: Mapping[str, list[str]], gone: set[str]) -> str:
    """Return the input of iptables-restore that sets ``chains`` and deletes the chains ``gone``."""
    heads = [f":{name} - [0:0]" for name in sorted({*chains, *gone})]
    lines = [f"-A {name} {rule}" for name, found in chains.items() for rule in found]
    return "\n".join(["*filter", *heads, *lines, *(f"-X {name}" for name in sorted(gone)), "COMMIT", ""])


def rules(policies: Objects, pods: list[Pod], namespaces: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return chain → rules: CHAIN, and one for each isolated pod and direction."""
    chains: dict[str, list[str]] = {CHAIN: ["-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"]}
    for direction, key, own, other in (("Egress", "to", "-s", "-d"), ("Ingress", "from", "-d", "-s")):
        for pod in pods:
            selecting = [policy for policy in policies if _selects(policy, pod, direction)]
            if not selecting:
                continue
            name = f"{direction}-{hashlib.sha256(f'{pod.namespace} {pod.address}'.encode()).hexdigest()[:12]}"
            chains[CHAIN].append(f"{own} {pod.address}/32 -j {name}")
            chains[name] = [f"{other} {pod.address}/32 {_RETURN}"]
            for policy in selecting:
                for rule in policy["spec"].get(direction.lower()) or []:
                    for peer, network in _peers(rule.get(key), policy, pods, namespaces):
                        target = pod if direction == "Ingress" else peer
                        chains[name] += [
                            " ".join(part for part in (network and f"{other} {network}", port, _RETURN) if part)
                            for port in _ports(rule.get("ports"), target)
                        ]
            chains[name] = [*dict.fromkeys(chains[name]), _DROP]
    return chains


def _selects(policy: Object, pod: Pod, direction: str) -> bool:
    spec = policy["spec"]
    # The API server sets policyTypes; this is its default.
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    same = policy["metadata"]["namespace"] == pod.namespace
    return same and direction in types and matches(spec.get("podSelector") or {}, pod.labels)


def _peers(
    peers: Objects | None, policy: Object, pods: list[Pod], namespaces: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[Pod | None, str]]:
    """Yield (pod, network) of each peer; pod is None for an address range; network is empty for all peers."""
    if not peers:
        yield None, ""
        return
    for peer in peers:
        if block := peer.get("ipBlock"):
            for network in _without(block["cidr"], block.get("except") or []):
                yield None, network
            continue
        inside = peer.get("namespaceSelector")
        for pod in pods:
            there = (
                pod.namespace == policy["metadata"]["namespace"]
                if inside is None
                else matches(inside, namespaces.get(pod.namespace, {}))
            )
            if there and matches(peer.get("podSelector") or {}, pod.labels):
                yield pod, f"{pod.address}/32"


def _without(cidr: str, excepted: list[str]) -> list[str]:
    """Return the IPv4 networks of a range without the excepted ones; the node has no IPv6."""
    left = [ipaddress.ip_network(cidr, strict=False)]
    for network in map(ipaddress.ip_network, excepted):
        left = [
            part
            for one in left
            for part in (one.address_exclude(network) if network.subnet_of(one) else [one])  # type: ignore[arg-type]
        ]
    return [str(network) for network in left if network.version == 4]


def _ports(ports: Objects | None, target: Pod | None) -> Iterator[str]:
    """Yield the iptables matches of a rule's ports; port names are resolved in the target pod."""
    if not ports:
        yield ""
        return
    for port in ports:
        number: Any = port.get("port")
        protocol = port.get("protocol", "TCP").lower()
        if isinstance(number, str):
            if target is None or number not in target.ports:
                continue
            number = target.ports[number]
        last = f":{port['endPort']}" if port.get("endPort") else ""
        yield f"-p {protocol}" + (f" --dport {number}{last}" if number else "")


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches ``labels``; an empty selector matches all."""
    tests = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, _: key in labels,
        "DoesNotExist": lambda key, _: key not in labels,
    }
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        tests[one["operator"]](one["key"], one.get("values") or []) for one in selector.get("matchExpressions") or []
    )
