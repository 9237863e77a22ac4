"""A double of KubeRay's operator: the visible behaviour of its RayCluster controller that rljob depends on.

It makes the head pod, the worker pods and the head's Service of each RayCluster, replaces pods that are missing or have
failed, and writes the status. Source: KubeRay at feeaf72fa, ray-operator/controllers/ray (raycluster_controller.go,
common/pod.go, common/service.go, utils/validation.go). It never ran beside the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
from collections.abc import AsyncIterator
from typing import Any

from tools.cluster.client import Api, ApiError, Object

LONGEST_NAME = 53
PERIOD_SECONDS = 0.1
WAIT = "until ray health-check --address {address}; do sleep 5; done"
APPLICATION, CREATED_BY = "app.kubernetes.io/name", "app.kubernetes.io/created-by"


class KubeRay:
    """The controller of the RayClusters of one namespace. ``idle``: it does nothing."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.idle = False
        self.refused: list[str] = []
        """Errors of RayClusters that it does not accept, as its events."""
        self._api, self._namespace = api, namespace

    async def run(self) -> None:
        """Reconcile again and again. Never returns."""
        while True:
            with contextlib.suppress(ApiError):  # the type or the namespace is being deleted
                await asyncio.to_thread(self._reconcile_all)
            await asyncio.sleep(PERIOD_SECONDS)

    def _reconcile_all(self) -> None:
        if self.idle:
            return
        for cluster in self._api.list(self._path("RayCluster")):
            if "deletionTimestamp" not in cluster["metadata"]:
                with contextlib.suppress(ApiError):  # it was deleted meanwhile
                    self._reconcile(cluster)

    def _reconcile(self, cluster: Object) -> None:
        if error := problem(cluster):
            self.refused.append(error)
            return
        name = cluster["metadata"]["name"]
        self._make_service(cluster)
        pods = self._api.list(self._path("Pod"), labelSelector=f"ray.io/cluster={name}")  # by name, not by owner
        failure = ""
        groups = [("head", cluster["spec"]["headGroupSpec"], 1)]
        groups += [("worker", each, each["replicas"]) for each in cluster["spec"]["workerGroupSpecs"]]
        for kind, group, count in groups:
            there = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == kind]
            for pod in there:
                if pod["status"].get("phase") in ("Failed", "Succeeded"):
                    self._api.delete(f"{self._path('Pod')}/{pod['metadata']['name']}")
            for _ in range(count - len(there)):
                try:
                    self._api.post(self._path("Pod"), pod_of(cluster, kind, group))
                except ApiError as error:
                    failure = str(error)
        self._write_status(cluster, pods, failure)

    def _make_service(self, cluster: Object) -> None:
        """Make the Service by which workers find the head, unless it exists."""
        main = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        labels = {**labels_of(cluster, "head", "headgroup"), APPLICATION: "kuberay"}
        selector = {key: labels[key] for key in ("ray.io/cluster", "ray.io/node-type", APPLICATION, CREATED_BY)}
        ports = [{"name": each["name"], "port": each["containerPort"]} for each in main["ports"]]
        body = {
            "metadata": {"name": f"{cluster['metadata']['name']}-head-svc", "ownerReferences": [owner(cluster)]},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports},
        }
        try:
            self._api.post(self._path("Service"), {"apiVersion": "v1", "kind": "Service", **body})
        except ApiError as error:
            if error.code != 409:
                self.refused.append(str(error))

    def _write_status(self, cluster: Object, pods: list[Object], failure: str) -> None:
        before = {each["type"]: each for each in cluster.get("status", {}).get("conditions", ())}
        wanted = 1 + sum(each["replicas"] for each in cluster["spec"]["workerGroupSpecs"])
        ready = [pod for pod in pods if _is_ready(pod)]
        conditions = {"ReplicaFailure": bool(failure), "HeadPodReady": any(map(_is_head, ready))}
        conditions["RayClusterProvisioned"] = len(ready) == wanted or _holds(before.get("RayClusterProvisioned"))
        written = []
        for kind, holds in conditions.items():
            known = before.get(kind)
            if known is not None and _holds(known) == holds:
                written.append(known)
            elif holds or known is not None:
                now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                value = {"type": kind, "status": str(holds), "reason": "Double", "message": failure}
                written.append({**value, "lastTransitionTime": now})
        status: Object = {"conditions": written, "desiredWorkerReplicas": wanted - 1}
        status["readyWorkerReplicas"] = sum(not _is_head(pod) for pod in ready)
        if conditions["RayClusterProvisioned"]:
            status["state"] = "ready"
        if status != {key: cluster.get("status", {}).get(key) for key in status}:
            path = f"{self._path('RayCluster')}/{cluster['metadata']['name']}/status"
            self._api.patch(path, {"status": status})

    def _path(self, kind: str) -> str:
        group = "/apis/ray.io/v1" if kind == "RayCluster" else "/api/v1"
        return f"{group}/namespaces/{self._namespace}/{kind.lower()}s"


@contextlib.asynccontextmanager
async def kuberay(api: Api, namespace: str) -> AsyncIterator[KubeRay]:
    """Run the double."""
    double = KubeRay(api, namespace)
    task = asyncio.create_task(double.run())
    try:
        yield double
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def problem(cluster: Object) -> str:
    """Return why the controller does not accept a RayCluster; empty if it does."""
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    if len(name) > LONGEST_NAME:
        return f"RayCluster name should be no more than {LONGEST_NAME} characters"
    for group in spec["workerGroupSpecs"]:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            return "replicas are not between minReplicas and maxReplicas"
    return ""


def pod_of(cluster: Object, kind: str, group: Object) -> Object:
    """Return a pod of a group of a RayCluster; ``kind``: head or worker."""
    name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
    template = copy.deepcopy(group["template"])
    main = template["spec"]["containers"][0]
    port = cluster["spec"]["headGroupSpec"]["rayStartParams"].get("port", "6379")
    host = "127.0.0.1" if kind == "head" else f"{name}-head-svc.{namespace}.svc.cluster.local"
    parameters = {**group["rayStartParams"], "block": "true", "dashboard-agent-listen-port": "52365"}
    parameters |= {"dashboard-host": "0.0.0.0", **parameters} if kind == "head" else {"address": f"{host}:{port}"}
    if kind == "worker":
        wait = {key: main[key] for key in ("image", "imagePullPolicy", "securityContext") if key in main}
        wait |= {"env": copy.deepcopy(main["env"]), "volumeMounts": main["volumeMounts"], "name": "wait-gcs-ready"}
        wait |= {"command": ["/bin/bash", "-c", "--"], "args": [WAIT.format(address=f"{host}:{port}")]}
        template["spec"].setdefault("initContainers", []).append(wait)
    if cluster["metadata"]["annotations"].get("ray.io/overwrite-container-cmd") != "true":
        main["command"], main["args"] = ["/bin/bash", "-c", "--"], [start_command(kind, parameters)]
    main["env"] += [
        {"name": "KUBERAY_GEN_RAY_START_CMD", "value": start_command(kind, parameters)},
        {"name": "RAY_PORT", "value": port},
        {"name": "RAY_ADDRESS", "value": f"{host}:{port}"},
        *([{"name": "FQ_RAY_IP", "value": host}] if kind == "worker" else []),
    ]
    if not any(each["name"] == "metrics" for each in main.setdefault("ports", [])):
        main["ports"].append({"name": "metrics", "containerPort": 8080})
    labels = {**labels_of(cluster, kind, group.get("groupName", "headgroup")), **template["metadata"].get("labels", {})}
    metadata = {
        "generateName": f"{name}-{kind}-",
        "labels": labels | {key: value for key, value in labels_of(cluster, kind, "").items() if key in _FIXED},
        "annotations": template["metadata"].get("annotations", {}),
        "ownerReferences": [owner(cluster)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


_FIXED = ("ray.io/cluster", "ray.io/node-type")


def labels_of(cluster: Object, kind: str, group: str) -> dict[str, str]:
    """Return the labels of the pods of a group."""
    return {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": kind,
        "ray.io/group": group,
        APPLICATION: "kuberay",
        CREATED_BY: "kuberay-operator",
    }


def start_command(kind: str, parameters: dict[str, str]) -> str:
    """Return the command that starts Ray."""
    flags = []
    for name, value in sorted(parameters.items()):
        if value in ("true", "false") and name not in ("log-color", "include-dashboard"):
            flags += [f"--{name}"] if value == "true" else []
        else:
            flags.append(f"--{name}={value}")
    return " ".join(["ray start", *(["--head"] if kind == "head" else []), *flags])


def owner(cluster: Object) -> Object:
    """Return the owner reference to a RayCluster."""
    meta = cluster["metadata"]
    reference: dict[str, Any] = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": meta["name"]}
    return {**reference, "uid": meta["uid"], "controller": True, "blockOwnerDeletion": True}


def _is_ready(pod: Object) -> bool:
    if "deletionTimestamp" in pod["metadata"]:
        return False
    return any(_holds(each) for each in pod["status"].get("conditions", ()) if each["type"] == "Ready")


def _is_head(pod: Object) -> bool:
    return bool(pod["metadata"]["labels"]["ray.io/node-type"] == "head")


def _holds(condition: Object | None) -> bool:
    return condition is not None and condition["status"] == "True"
