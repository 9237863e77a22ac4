"""The cluster enforces NetworkPolicies, or no test that runs on it could say that a job's own let it work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tools.cluster.node import Cluster
from tools.cluster.node.install import Installation

PORT = 8000
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


@pytest.fixture
def namespace(node: Cluster) -> Iterator[str]:
    name = node.namespace("policies")
    yield name
    node.api.delete(f"/api/v1/namespaces/{name}")


def pod(name: str, image: str, command: list[str]) -> dict[str, Any]:
    container = {"name": "main", "image": image, "command": command}
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def test_a_policy_lets_through_what_it_names_and_nothing_else(node: Cluster, installed: Installation, namespace: str):
    image = installed.images["operator"]
    for name in ("friend", "stranger"):
        node.api.create(pod(name, image, ["sleep", "inf"]) | {"metadata": {"name": name, "namespace": namespace}})
    server = pod("server", image, ["python", "-m", "http.server", str(PORT)])
    node.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(server))
    node.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod", "--all", "--timeout=60s")
    address = node.api.get(f"/api/v1/namespaces/{namespace}/pods/server")["status"]["podIP"]

    def reaches(name: str, host: str, port: int) -> bool:
        try:
            node.exec(namespace, name, "python", "-c", CONNECT, host, str(port))
        except RuntimeError as error:
            assert "timed out" in str(error), error
            return False
        return True

    for name in ("friend", "stranger"):
        node.api.wait_for(lambda name=name: reaches(name, address, PORT))
    node.kubectl("label", "-n", namespace, "pod/friend", "friend=yes")
    friends = {"podSelector": {"matchLabels": {"friend": "yes"}}}
    spec = {
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [friends], "ports": [{"port": PORT}]}],
        "egress": [{"ports": [{"port": 53}]}],
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "server"},
        "spec": spec,
    }
    node.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(policy))
    node.api.wait_for(lambda: not reaches("stranger", address, PORT))
    assert reaches("friend", address, PORT)
    assert reaches("server", address, PORT), "a pod reaches itself"
    assert reaches("server", "10.96.0.10", 53)
    assert not reaches("server", "10.96.0.1", 443)
    assert reaches("stranger", "10.96.0.1", 443)
    node.kubectl("delete", "-n", namespace, "networkpolicy/server")
    node.api.wait_for(lambda: reaches("stranger", address, PORT))
