"""The operator that the chart installed, as a test kills it and lets it come back."""

from __future__ import annotations

from tools.cluster.client import Object, Objects
from tools.cluster.node import Cluster

_SELECTOR = "app.kubernetes.io/name=rljob-operator,app.kubernetes.io/component=operator"


class Operators:
    """The operators of a cluster."""

    def __init__(self, node: Cluster) -> None:
        self._node = node
        found = [each for each in node.api.list("/apis/apps/v1/deployments", labelSelector=_SELECTOR)]
        assert len(found) == 1, "no operator is installed, or several are"
        self.namespace, self.name = found[0]["metadata"]["namespace"], found[0]["metadata"]["name"]
        self.usual: int = found[0]["spec"]["replicas"]
        """How many there are."""

    def pods(self) -> Objects:
        """Return their pods."""
        return self._node.api.list(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=_SELECTOR)

    def scale(self, replicas: int, wait: bool = True) -> None:
        """Have so many, and wait until it is so."""
        self._node.kubectl("-n", self.namespace, "scale", f"deployment/{self.name}", f"--replicas={replicas}")
        if wait:
            self._node.api.wait_for(lambda: self._are(replicas), 120.0, f"{replicas} operators")

    def gone(self) -> None:
        """Wait until there is none."""
        self._node.api.wait_for(lambda: self._are(0), 120.0, "no operator")

    def _are(self, replicas: int) -> bool:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{self.name}"
        status: Object = self._node.api.get(path)["status"]
        ready = status.get("readyReplicas", 0)
        return bool(status.get("replicas", 0) == ready == replicas == len(self.pods()))
