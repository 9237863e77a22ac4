"""The lifecycle of the test cluster: it leaves nothing behind, also when one of its processes is killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.cluster.node import NoClusterError, Node, life
from tools.cluster.node.configs import PAUSE
from tools.cluster.node.place import outside
from tools.cluster.node.system import CommandError
from tools.cluster.node.traces import processes, traces

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
CLUSTER = "life"
PLACE = outside(CLUSTER)
"""A separate cluster, because the machine's cluster may be running."""
ROOT = Path(__file__).parents[3]
PROGRAM = f"""
from tools.cluster.node import Node
with Node({CLUSTER!r}) as node:
    print(node.nodes, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Hold a lock: a concurrent run of these tests on the machine would kill this cluster."""
    PLACE.root.mkdir(parents=True, exist_ok=True)
    with (PLACE.root / "tests.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(alone: None) -> Iterator[None]:
    """Assert that the traces on the machine are the same before and after each test."""
    life.stop(PLACE)
    before = traces(PLACE.name)
    yield
    life.stop(PLACE)
    after = traces(PLACE.name)
    for kind, found in before.items():
        assert after[kind] == found, f"{kind}: {sorted(after[kind] ^ found)}"
    assert not PLACE.state.exists()
    assert not PLACE.running.exists()


def pod(name: str) -> dict[str, Any]:
    claim = {"name": "storage", "persistentVolumeClaim": {"claimName": "storage"}}
    container = {"name": "main", "image": PAUSE, "volumeMounts": [{"name": "storage", "mountPath": "/storage"}]}
    spec = {"containers": [container], "volumes": [claim], "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def apply(node: Node, namespace: str, body: dict[str, Any]) -> None:
    node.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))


def init() -> int:
    """Return the process id of the running cluster's init."""
    found = life.running(PLACE)
    assert found is not None
    return found


def wait_for_exit(pid: int) -> None:
    """Wait until the cluster with the init ``pid`` has exited."""
    deadline = time.monotonic() + 20
    while life.alive(pid):
        assert time.monotonic() < deadline, "the cluster does not exit"
        time.sleep(0.05)


def test_a_cluster_recycles_volumes_and_leaves_nothing():
    with Node(CLUSTER) as node:
        namespace = node.namespace()
        size = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "storage"}, "spec": size}
        apply(node, namespace, claim)
        apply(node, namespace, pod("one"))
        found = node.api.wait_condition(f"/api/v1/namespaces/{namespace}/pods/one", "Ready", seconds=120)
        assert found["status"]["podIP"].startswith("10.244.")
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/storage"
        volume = node.api.get(path)["spec"]["volumeName"]
        directory = PLACE.volumes / volume
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text("of the first claim")
        all_processes = processes(init())
        for kind in ("links", "routes", "cgroups"):
            assert traces(PLACE.name)[kind], f"{kind}: a running cluster must have traces of this kind"
        node.kubectl("delete", "-n", namespace, "pod/one", "pvc/storage")
        path = f"/api/v1/persistentvolumes/{volume}"
        node.api.wait_for(lambda: node.api.get(path)["status"]["phase"] == "Available", 60.0)
        assert list(directory.iterdir()) == []
        apply(node, namespace, claim)
        apply(node, namespace, pod("two"))
        node.api.wait_condition(f"/api/v1/namespaces/{namespace}/pods/two", "Ready", seconds=120)
        all_processes |= processes(init())
        assert len(all_processes) > 12
    assert not [pid for pid in all_processes if life.alive(pid)]


def test_the_next_cluster_removes_a_killed_one_and_ends_when_its_tests_are_killed():
    Node(CLUSTER).start(wait=False)
    os.kill(first := init(), signal.SIGKILL)
    wait_for_exit(first)
    with pytest.raises(NoClusterError, match="no cluster runs"):
        Node(CLUSTER).attach()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as tests:
        assert tests.stdout is not None
        assert PLACE.name.encode() in tests.stdout.readline()
        second = init()
        tests.kill()
    wait_for_exit(second)


def test_a_cluster_outlives_its_users_and_ends_with_any_component_which_it_reports():
    Node(CLUSTER).start()
    with Node(CLUSTER) as node:
        assert node.nodes == [PLACE.name]
    found = init()
    (etcd,) = [pid for pid in processes(found) if Path(f"/proc/{pid}/comm").read_text() == "etcd\n"]
    os.kill(etcd, signal.SIGKILL)
    wait_for_exit(found)
    with pytest.raises(NoClusterError, match="etcd ended with code -9"):
        Node(CLUSTER).attach()
    assert not Node(CLUSTER).stop()


def test_a_cluster_that_cannot_be_connected_is_not_left_half_started(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def fail(_: object, pid: int) -> None:
        seen.append(pid)
        raise CommandError("no link")

    monkeypatch.setattr(life.network, "connect", fail)
    with pytest.raises(CommandError, match="no link"):
        Node(CLUSTER).start()
    wait_for_exit(seen[0])
