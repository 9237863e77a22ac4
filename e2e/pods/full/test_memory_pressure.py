"""The node runs short of memory: the kubelet evicts a pod without requests, and nothing of a job that trains.

The cluster must be started with little memory for pods, so that the machine itself keeps enough:

    RLJOB_NODE_POD_MEMORY_GIB=6 python -m e2e.pods.full e2e/pods/full/test_memory_pressure.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.full.test_many_deaths import small
from e2e.pods.job import RESTRICTED, Job
from tools.cluster.client import Object
from tools.cluster.node import Cluster
from tools.cluster.node.life import POD_MEMORY

SECONDS = 400.0
HOG = """
import os, time
held = []
while True:
    held.append(os.urandom(8 * 2**20))
    time.sleep(0.5)
"""
"""Takes 16 MiB per second."""

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.alone,
    pytest.mark.skipif(not os.environ.get(POD_MEMORY), reason=f"the cluster needs {POD_MEMORY}=6"),
]


@pytest.fixture
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    name = node.namespace("pressure", RESTRICTED)
    yield Job(node, name, small())
    node.api.delete(f"/api/v1/namespaces/{name}")


def hog(image: str) -> Object:
    """Return a pod without requests that takes ever more memory."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", HOG],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "securityContext": security, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hog"}, "spec": spec}


def test_memory_pressure_evicts_nothing_of_a_job(node: Cluster, installed: Any, job: Job) -> None:
    job.apply()
    job.reaches(3, SECONDS)
    before = job.lives()
    job.kubectl("apply", "-f", "-", stdin=json.dumps(hog(installed.images["rewards"])))

    def evicted() -> bool:
        return (job.get("Pod", "hog") or {}).get("status", {}).get("reason") == "Evicted"

    job.until(evicted, SECONDS, "the eviction of the pod without requests")
    step = job.step()
    job.reaches(step + 2, SECONDS)
    assert job.lives() == before
    assert job.status()["trainer"].get("charged", 0) == 0
