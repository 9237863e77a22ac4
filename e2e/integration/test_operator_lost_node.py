"""The pod of a coordinator whose node is lost: its kubelet never reports its end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from e2e.integration.namespace import NamespaceClient
from e2e.integration.operators import job
from tools.cluster.controlplane import ControlPlane
from tools.cluster.pods import Pods


@pytest.fixture
def ns(cluster: ControlPlane, namespace: str) -> NamespaceClient:
    return NamespaceClient(cluster, namespace)


async def test_a_coordinator_on_a_lost_node_is_replaced(ns: NamespaceClient):
    offset = 0.0
    async with ns.operator(wall=lambda: time.time() + offset) as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        pod = "sums-coordinator-0"
        uid = (await ns.uids("Pod"))[pod]
        Pods(ns.cluster.api).behave(ns.name, pod, "lingering")
        await ns.delete("Pod", pod)

        async def terminates() -> Any:
            return (await ns.get("Pod", pod) or {})["metadata"].get("deletionTimestamp")

        await ns.until(terminates)
        await operator.settled()
        assert (await ns.uids("Pod"))[pod] == uid
        offset = 60.0

        async def replaced() -> bool:
            await operator.reconciled()
            return (await ns.uids("Pod")).get(pod, uid) != uid

        await ns.until(replaced)
        assert operator.writes["delete pods"] == 1
        await ns.wait_until_ready()
