"""What a job's pods take of their nodes: from metrics-server where there is one, else from the nodes themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob.kube.sync_client import Object
from rljob.local.errors import RunError
from rljob.local.usage import Usage
from rljob.local.view import PartView
from rljob.remote.finding import Namespace
from rljob.remote.job import RemoteJob

UNKNOWN = (
    "processor and memory are not known: there is no metrics-server in the cluster, and reading them from the nodes "
    "needs the right to get nodes/proxy"
)
NO_PODS = "there are no pods now; the state above says why"
NOT_RUNNING = "–: the pod does not run, so it takes nothing"
NOT_MEASURED = "–: a pod that runs and has not been measured yet; its first figures come within a minute"
RUNNING = "running"
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Meter:
    """Measures the pods of a job."""

    def __init__(self, job: RemoteJob) -> None:
        self._job = job
        self.note = ""
        """Why figures are missing, in a sentence."""

    def read(self) -> tuple[list[PartView], dict[str, Usage]]:
        """Return the pods, and what each that runs takes (by its name here)."""
        pods = self._job.namespace.pods(self._job.name)
        figures = self._measured(pods)
        names = {str(pod["metadata"]["name"]): self._name(pod) for pod in pods}
        usage = {names[pod]: taken for pod, taken in figures.items() if pod in names}
        parts = [_part(pod, self._name(pod)) for pod in pods]
        self.note = missing(parts, usage)
        return parts, usage

    def _name(self, pod: Object) -> str:
        return str(pod["metadata"]["name"]).removeprefix(f"{self._job.name}-")

    def _measured(self, pods: list[Object]) -> dict[str, Usage]:
        where = self._job.namespace
        try:
            path = f"/apis/metrics.k8s.io/v1beta1/namespaces/{where.name}/pods"
            items = where.api.get(path, labelSelector=f"rljob.dev/job={self._job.name}")["items"]
            return {item["metadata"]["name"]: _sum(item["containers"]) for item in items}
        except RunError:  # there is none, or it does not answer
            pass
        found: dict[str, Usage] = {}
        for node in sorted({pod["spec"].get("nodeName") or "" for pod in pods} - {""}):
            try:
                found |= _of_node(where, node)
            except RunError:  # not allowed, or the node does not answer
                continue
        return found


def missing(parts: Sequence[PartView], usage: Mapping[str, Usage]) -> str:
    """Return why some of a job's pods have no figures; empty when all have."""
    states = {part.state for part in parts if part.name not in usage}
    if not parts:
        return NO_PODS
    if RUNNING in states:
        return NOT_MEASURED if usage else UNKNOWN
    return NOT_RUNNING if states else ""


def _of_node(where: Namespace, node: str) -> dict[str, Usage]:
    """Return pod → what it takes, of the pods of the namespace, as the kubelet of ``node`` says."""
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
    """Return the number that a Kubernetes quantity such as 12345678n or 64Mi stands for."""
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)


def _part(pod: Object, name: str) -> PartView:
    status = pod.get("status", {})
    restarts = sum(each.get("restartCount", 0) for each in status.get("containerStatuses") or [])
    state = "ending" if "deletionTimestamp" in pod["metadata"] else str(status.get("phase", "Pending")).lower()
    return PartView(name, state, restarts)
