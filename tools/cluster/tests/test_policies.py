"""The iptables rules allow exactly the traffic that the policies allow."""

from __future__ import annotations

from typing import Any

import pytest

from tools.cluster.node.policies import CHAIN, Pod, matches, read, restore, rules

SERVER = Pod("one", {"app": "server"}, "10.244.0.1", {"http": 8000})
CLIENT = Pod("one", {"app": "client"}, "10.244.0.2")
STRANGER = Pod("two", {"app": "client"}, "10.244.0.3", {"http": 9000})
PODS = [SERVER, CLIENT, STRANGER]
NAMESPACES = {"one": {"team": "a"}, "two": {"team": "b"}}
ANY, END = "-j RETURN", "-j DROP"


def policy(selector: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "one"}, "spec": {"podSelector": selector, **spec}}


def ingress(*rules_: dict[str, Any]) -> list[str]:
    """Return the rules of the server's chain without the first, which allows itself, and the last, which drops."""
    found = rules([policy({"matchLabels": {"app": "server"}}, ingress=list(rules_))], PODS, NAMESPACES)
    (chain,) = [name for name in found if name.startswith("Ingress")]
    first, *between, last = found[chain]
    assert (first, last) == ("-s 10.244.0.1/32 -j RETURN", END)
    return between


def test_without_a_policy_no_traffic_is_dropped():
    assert rules([], PODS, NAMESPACES) == {CHAIN: ["-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"]}


def test_a_policy_isolates_the_pods_of_its_namespace_that_it_selects_in_its_directions():
    found = rules([policy({"matchLabels": {"app": "client"}}, policyTypes=["Ingress", "Egress"])], PODS, NAMESPACES)
    assert [rule.split(" -j")[0] for rule in found[CHAIN][1:]] == ["-s 10.244.0.2/32", "-d 10.244.0.2/32"]
    assert len(found) == 3


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        ({}, [ANY]),
        ({"from": [{"podSelector": {}}]}, [f"-s 10.244.0.2/32 {ANY}"]),
        ({"from": [{"podSelector": {"matchLabels": {"app": "client"}}}]}, [f"-s 10.244.0.2/32 {ANY}"]),
        ({"from": [{"namespaceSelector": {"matchLabels": {"team": "b"}}}]}, [f"-s 10.244.0.3/32 {ANY}"]),
        (
            {"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "client"}}}]},
            [f"-s 10.244.0.2/32 {ANY}", f"-s 10.244.0.3/32 {ANY}"],
        ),
        ({"from": [{"podSelector": {"matchLabels": {"app": "nobody"}}}]}, []),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, [f"-s 10.0.0.0/8 {ANY}"]),
        (
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.128.0.0/9"]}}]},
            [f"-s 10.0.0.0/9 {ANY}"],
        ),
        ({"from": [{"ipBlock": {"cidr": "fd00::/8"}}]}, []),
        ({"ports": [{"port": 80}]}, [f"-p tcp --dport 80 {ANY}"]),
        ({"ports": [{"protocol": "UDP", "port": 53, "endPort": 60}]}, [f"-p udp --dport 53:60 {ANY}"]),
        ({"ports": [{"protocol": "UDP"}]}, [f"-p udp {ANY}"]),
        ({"ports": [{"port": "http"}]}, [f"-p tcp --dport 8000 {ANY}"]),
        ({"ports": [{"port": "other"}]}, []),
        (
            {"from": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 80}]},
            [f"-s 10.9.0.0/16 -p tcp --dport 80 {ANY}"],
        ),
    ],
)
def test_a_rule_lets_through_only_its_peers_and_ports(rule: dict[str, Any], lines: list[str]):
    assert ingress(rule) == lines


def test_egress_rules_resolve_port_names_in_the_peer():
    spec = {"policyTypes": ["Egress"], "egress": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": "http"}]}]}
    found = rules([policy({"matchLabels": {"app": "client"}}, **spec)], PODS, NAMESPACES)
    (chain,) = [name for name in found if name != CHAIN]
    targets = {"10.244.0.1": 8000, "10.244.0.3": 9000}
    assert found[chain][1:-1] == [f"-d {to}/32 -p tcp --dport {port} {ANY}" for to, port in targets.items()]


def test_traffic_that_one_of_several_policies_allows_passes():
    selector = {"matchLabels": {"app": "server"}}
    found = rules(
        [policy(selector), policy(selector, ingress=[{"ports": [{"port": 80}]}]), policy(selector, ingress=[{}])],
        PODS,
        NAMESPACES,
    )
    (chain,) = [name for name in found if name != CHAIN]
    assert found[chain][1:] == [f"-p tcp --dport 80 {ANY}", ANY, END]


@pytest.mark.parametrize(
    ("expression", "selects"),
    [
        ({"key": "app", "operator": "In", "values": ["server"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["server"]}, False),
        ({"key": "none", "operator": "NotIn", "values": ["server"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "app", "operator": "DoesNotExist"}, False),
    ],
)
def test_expressions_of_selectors(expression: dict[str, Any], selects: bool):
    assert matches({"matchExpressions": [expression]}, SERVER.labels) == selects
    assert not matches({"matchLabels": {"app": "other"}, "matchExpressions": [expression]}, SERVER.labels)


def test_removed_chains_are_deleted_after_the_rules_that_refer_to_them():
    text = restore({CHAIN: ["-j RETURN"]}, {"Ingress-1"})
    assert text.splitlines() == [
        "*filter",
        ":Ingress-1 - [0:0]",
        ":POLICIES - [0:0]",
        "-A POLICIES -j RETURN",
        "-X Ingress-1",
        "COMMIT",
    ]


def test_pods_without_their_own_address_are_left_out():
    def pod(phase: str, address: str, **spec: Any) -> dict[str, Any]:
        container = {"ports": [{"name": "http", "containerPort": 8000}, {"containerPort": 1}]}
        metadata = {"namespace": "one", "labels": {"app": "server"}}
        status = {"phase": phase, "podIP": address}
        return {"metadata": metadata, "spec": {"containers": [container], **spec}, "status": status}

    found = [pod("Running", "10.244.0.1"), pod("Running", "1.1.1.1", hostNetwork=True), pod("Succeeded", "10.244.0.2")]
    assert list(read([*found, pod("Pending", "")])) == [SERVER]
