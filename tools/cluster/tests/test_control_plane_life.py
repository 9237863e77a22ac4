"""The control plane leaves nothing behind, keeps its objects over restarts, and is as strict as a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.cluster import directory
from tools.cluster.client import ApiError, Object
from tools.cluster.controlplane import ADDRESS, ControlPlane

pytestmark = pytest.mark.apiserver
SMALL = ("etcd", "apiserver")
ROOT = Path(__file__).parents[3]


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ADDRESS, port)) == 0


def test_a_stopped_control_plane_leaves_no_process_no_file_and_no_port():
    with ControlPlane(SMALL) as plane:
        pids = [process.pid for process in plane.processes.values()]
        ports = list(plane.ports.values())
        assert all(map(runs, pids))
        assert all(map(listens, ports))
        assert not {path.name for path in plane.directory.iterdir()}.isdisjoint({"etcd", "apiserver.log"})
    assert not any(map(runs, pids))
    assert not any(map(listens, ports))
    assert not plane.directory.exists()


def test_a_control_plane_that_cannot_start_reports_the_cause_and_leaves_nothing():
    plane = ControlPlane(SMALL, flags={"apiserver": ["--no-such-flag"]})
    with pytest.raises(RuntimeError, match="unknown flag: --no-such-flag"):
        plane.__enter__()
    assert plane.processes == {}
    assert not plane.directory.exists()


OWNER = """
import json, sys, time
from tools.cluster.controlplane import ControlPlane
with ControlPlane(("etcd", "apiserver")) as plane:
    print(json.dumps([str(plane.directory), *(p.pid for p in plane.processes.values())]), flush=True)
    time.sleep(600)
"""


def test_a_control_plane_dies_with_its_program_and_the_next_one_removes_its_files(
    cluster: ControlPlane, tmp_path: Path
):
    elsewhere = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, env=elsewhere, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        path, *pids = json.loads(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    cluster.api.wait_for(lambda: not any(map(runs, pids)), seconds=5, what="the components to die")
    assert Path(path).exists()
    directory.remove_unused(tmp_path, young_seconds=0)
    assert not Path(path).exists()


def test_the_directory_of_a_running_control_plane_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with directory.directory() as living:
        directory.remove_unused(tmp_path, young_seconds=0)
        assert living.exists()


def test_a_directory_that_was_just_created_is_not_removed(tmp_path: Path):
    (young := tmp_path / f"{directory.PREFIX}young").mkdir()
    directory.remove_unused(tmp_path)
    assert young.exists()


def test_objects_survive_a_kill_of_etcd_and_of_the_api_server():
    with ControlPlane(SMALL) as plane:
        name = plane.namespace()
        for component in SMALL:
            plane.stop(component)
            assert not listens(plane.ports[component])
            plane.start(component)
            assert plane.api.exists(f"/api/v1/namespaces/{name}")


def test_stopped_and_paused_components_run_again_after_a_restore():
    with ControlPlane(SMALL) as plane:
        plane.processes["apiserver"].pause()
        plane.stop("etcd")
        plane.restore()
        assert plane.api.get("/api/v1/namespaces/default")


def test_a_component_that_died_by_itself_is_reported_with_its_log():
    with ControlPlane(SMALL) as plane:
        os.kill(plane.processes["etcd"].pid, signal.SIGKILL)
        plane.api.wait_for(lambda: not listens(plane.ports["etcd"]))
        with pytest.raises(RuntimeError, match=r"etcd ended with code -9; the end of .*etcd\.log"):
            plane.restore()


def config(name: str, **metadata: object) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **metadata}, "data": {"a": "1"}}


def owned_by(owner: Object) -> list[Object]:
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "controller": True, "blockOwnerDeletion": True}
    return [{**reference, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}]


def test_owned_objects_are_deleted_with_their_owner_when_the_controllers_run(cluster: ControlPlane, namespace: str):
    cluster.stop("controller-manager")
    owner = cluster.api.create(config("owner", namespace=namespace))
    cluster.api.create(config("owned", namespace=namespace, ownerReferences=owned_by(owner)))
    path = cluster.api.path("v1", "ConfigMap", namespace, "owned")
    cluster.api.delete(cluster.api.path("v1", "ConfigMap", namespace, "owner"))
    assert cluster.api.exists(path)
    cluster.start("controller-manager")
    cluster.api.wait_gone(path)


def test_a_service_account_has_the_rights_of_its_role_and_no_others(cluster: ControlPlane, namespace: str):
    mine = cluster.client(cluster.service_account_token(namespace, "worker"))
    configs = cluster.api.path("v1", "ConfigMap", namespace)
    with pytest.raises(ApiError, match="cannot list resource"):
        mine.list(configs)
    rules = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "create"]}
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    cluster.api.post(f"{roles}/roles", {"metadata": {"name": "worker"}, "rules": [rules]})
    subject = {"kind": "ServiceAccount", "name": "worker", "namespace": namespace}
    binding = {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "worker"}}
    cluster.api.post(f"{roles}/rolebindings", {"metadata": {"name": "worker"}, "subjects": [subject], **binding})
    cluster.api.wait_for(lambda: mine.list(configs) is not None, what="the role to be in effect")
    owner = mine.create(config("owner", namespace=namespace))
    with pytest.raises(ApiError, match="cannot set blockOwnerDeletion"):  # OwnerReferencesPermissionEnforcement
        mine.create(config("owned", namespace=namespace, ownerReferences=owned_by(owner)))


def test_kubectl_works_as_administrator_and_as_a_service_account(cluster: ControlPlane, namespace: str):
    assert json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == "v1.36.3"
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(config("applied")))
    assert cluster.api.exists(cluster.api.path("v1", "ConfigMap", namespace, "applied"))
    mine = cluster.service_account_kubeconfig(namespace, "worker")
    user = cluster.kubectl("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}", kubeconfig=mine)
    assert user == f"system:serviceaccount:{namespace}:worker"
    with pytest.raises(RuntimeError, match="not found"):
        cluster.kubectl("get", "configmap", "no-such", "-n", namespace)


def test_a_watch_yields_events_until_its_timeout(cluster: ControlPlane, namespace: str):
    path = cluster.api.path("v1", "ConfigMap", namespace)
    cluster.api.create(config("seen", namespace=namespace))
    seen = [event["object"]["metadata"]["name"] for event in cluster.api.watch(path, seconds=1)]
    assert "seen" in seen


def test_a_timeout_reports_the_condition_and_the_last_state(cluster: ControlPlane, namespace: str):
    with pytest.raises(TimeoutError, match=r"pods/none.*404 NotFound"):
        cluster.api.wait_condition(f"/api/v1/namespaces/{namespace}/pods/none", "Ready", seconds=0.1)
