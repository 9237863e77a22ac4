"""Measures CPU and memory of a job's pods: from metrics-server if there is one, else from the nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rljob.kube.sync_client import Object
from rljob.local.errors import CliError
from rljob.local.process_usage import Usage
from rljob.local.snapshot import ComponentState, RunSnapshot
from rljob.remote.job import RemoteJob
from rljob.remote.lookup import Namespace

UNKNOWN = (
    "CPU and memory are unknown: there is no metrics-server in the cluster, and reading them from the nodes needs the "
    "right to get nodes/proxy"
)
NO_PODS = "there are no pods; the state above has the reason"
NOT_RUNNING = "–: the pod is not running, so it uses nothing"
NOT_MEASURED = "–: a running pod without a measurement yet; the first one takes up to a minute"
RUNNING = "running"
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class PodUsageMeter:
    """Measures the pods of a job."""

    def __init__(self, job: RemoteJob) -> None:
        self._job = job

    def snapshot(self) -> RunSnapshot:
        """Return a snapshot of the job. Its components are the pods, with their usage if it is measured."""
        snapshot = self._job.snapshot()
        pods = self._job.namespace.pods(self._job.name)
        usage = self._measured(pods)
        components = [_component(pod, self._job.name, usage.get(pod["metadata"]["name"])) for pod in pods]
        note = "; ".join(filter(None, (snapshot.note, missing(components))))
        return dataclasses.replace(snapshot, components=components, note=note)

    def _measured(self, pods: list[Object]) -> dict[str, Usage]:
        where = self._job.namespace
        try:
            path = f"/apis/metrics.k8s.io/v1beta1/namespaces/{where.name}/pods"
            items = where.api.get(path, labelSelector=f"rljob.dev/job={self._job.name}")["items"]
            return {item["metadata"]["name"]: _sum(item["containers"]) for item in items}
        except CliError:  # there is no metrics-server, or it does not answer
            pass
        found: dict[str, Usage] = {}
        for node in sorted({pod["spec"].get("nodeName") or "" for pod in pods} - {""}):
            try:
                found |= _of_node(where, node)
            except CliError:  # not allowed, or the node does not answer
                continue
        return found


def missing(pods: Sequence[ComponentState]) -> str:
    """Return why the usage of some of a job's pods is unknown; empty if it is known for all."""
    states = {pod.state for pod in pods if pod.usage is None}
    if not pods:
        return NO_PODS
    if RUNNING in states:
        return NOT_MEASURED if any(pod.usage is not None for pod in pods) else UNKNOWN
    return NOT_RUNNING if states else ""


def _of_node(where: Namespace, node: str) -> dict[str, Usage]:
    """Return pod → usage of the namespace's pods, from the kubelet of ``node``."""
    found = {}
    for pod in where.api.get(f"/api/v1/nodes/{node}/proxy/stats/summary")["pods"]:
        if pod["podRef"]["namespace"] == where.name:
            containers = pod.get("containers") or []
            cores = sum((each.get("cpu") or {}).get("usageNanoCores") or 0 for each in containers) * 1e-9
            memory = sum((each.get("memory") or {}).get("workingSetBytes") or 0 for each in containers)
            found[pod["podRef"]["name"]] = Usage(None, cores, memory)
    return found


def _sum(containers: list[Object]) -> Usage:
    cores = sum(quantity(each["usage"]["cpu"]) for each in containers)
    return Usage(None, cores, int(sum(quantity(each["usage"]["memory"]) for each in containers)))


def quantity(text: str) -> float:
    """Return the value of a Kubernetes quantity such as 12345678n or 64Mi."""
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)


def _component(pod: Object, job: str, usage: Usage | None) -> ComponentState:
    status = pod.get("status", {})
    restarts = sum(each.get("restartCount", 0) for each in status.get("containerStatuses") or [])
    state = "ending" if "deletionTimestamp" in pod["metadata"] else str(status.get("phase", "Pending")).lower()
    name = str(pod["metadata"]["name"]).removeprefix(f"{job}-")
    return ComponentState(name, state, restarts, usage=usage)
