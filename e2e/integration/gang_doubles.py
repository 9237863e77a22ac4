"""Doubles of gang schedulers and of Kueue: what is visible of them, on a real API server. They are not these projects.

Each double is a task that looks at the cluster again and again::

    async with SchedulerDouble(api, VOLCANO).running(): ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tools.cluster.client import Api, ApiError, Object

GPUS = "nvidia.com/gpu"
ENDED = ("Failed", "Succeeded")
LOOK_SECONDS = 0.2


class Double:
    """A task that calls :meth:`step` again and again."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def step(self) -> None:
        """Look at the cluster once and act."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run while entered. An error of the double is an error of the test."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(ApiError):  # an object has changed or gone meanwhile
                await asyncio.to_thread(self.step)
            await asyncio.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class PodGroups:
    """How a scheduler recognizes the pods of a group. ``scheduler``: schedulerName of its pods."""

    api_version: str
    scheduler: str
    group_of: Callable[[Object], str | None]


VOLCANO = PodGroups(
    "scheduling.volcano.sh/v1beta1",
    "volcano",
    lambda metadata: metadata.get("annotations", {}).get("scheduling.k8s.io/group-name"),
)
COSCHEDULING = PodGroups(
    "scheduling.x-k8s.io/v1alpha1",
    "scheduler-plugins-scheduler",
    lambda metadata: metadata.get("labels", {}).get("scheduling.x-k8s.io/pod-group"),
)


class SchedulerDouble(Double):
    """A scheduler that binds the pods of a group when at least minMember of them exist and all fit, and other pods of
    its schedulerName one by one. It counts GPUs only, and tries the largest pods first."""

    def __init__(self, api: Api, kind: PodGroups) -> None:
        super().__init__(api)
        self._kind = kind

    def step(self) -> None:
        """Bind what fits, and say of the others that they do not."""
        pods = [pod for pod in self.api.list("/api/v1/pods") if pod["status"].get("phase") not in ENDED]
        free = _free_gpus(self.api, pods)
        mine = [pod for pod in pods if pod["spec"].get("schedulerName") == self._kind.scheduler]
        for group in self.api.list(f"/apis/{self._kind.api_version}/podgroups"):
            members = [pod for pod in mine if self._is_member(pod, group)]
            if len(members) >= group["spec"]["minMember"]:
                self._place([pod for pod in members if not pod["spec"].get("nodeName")], free)
        for pod in mine:
            if self._kind.group_of(pod["metadata"]) is None and not pod["spec"].get("nodeName"):
                self._place([pod], free)

    def _is_member(self, pod: Object, group: Object) -> bool:
        metadata, own = pod["metadata"], group["metadata"]
        return (metadata["namespace"], self._kind.group_of(metadata)) == (own["namespace"], own["name"])

    def _place(self, pods: Sequence[Object], free: Counter[str]) -> None:
        """Bind all of ``pods``, or none."""
        left, chosen = Counter(free), []
        for pod in sorted(pods, key=_gpus, reverse=True):
            node = next((name for name in sorted(left) if left[name] >= _gpus(pod)), None)
            if node is None:
                for each in pods:
                    _unschedulable(self.api, each, len(free))
                return
            left[node] -= _gpus(pod)
            chosen.append((pod, node))
        free.clear()
        free.update(left)
        for pod, node in chosen:
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
            self.api.post(f"{_path(pod)}/binding", binding | {"target": {"kind": "Node", "name": node}})


class KueueDouble(Double):
    """Kueue for one namespace, with one ClusterQueue and one ResourceFlavor.

    It admits Workloads in the order of their creation, or of their eviction, while their GPUs fit into the quota, and
    counts a Workload until its reservation is taken out of its status.
    """

    QUEUE, FLAVOR, API = "gpus", "h100", "kueue.x-k8s.io/v1beta2"

    def __init__(self, api: Api, namespace: str, quota: int) -> None:
        super().__init__(api)
        self._collection = f"/apis/{self.API}/namespaces/{namespace}/workloads"
        self._quota = quota

    def step(self) -> None:
        """Admit what fits, and say of the others why not."""
        workloads = self.api.list(self._collection)
        used = sum(_gpus_of(each) for each in workloads if _is(each, "QuotaReserved") and not _is(each, "Finished"))
        for each in sorted(workloads, key=_queued_since):
            if _is(each, "QuotaReserved") or each["spec"].get("active") is False:
                continue
            if _is(each, "Evicted") and not _is(each, "Requeued"):
                continue
            if used + _gpus_of(each) <= self._quota:
                used += _gpus_of(each)
                self._admit(each)
            else:
                message = f"couldn't assign flavors to pod set trainer: insufficient unused quota for {GPUS} in flavor"
                self._say(each, QuotaReserved=("False", "Pending", f"{message} {self.FLAVOR}"))

    def evict(self, path: str, reason: str, message: str) -> None:
        """Evict a Workload; its reservation stays until its framework takes it out."""

        def said() -> bool:
            self._say(self.api.get(path), Evicted=("True", reason, message))
            return True

        self.api.wait_for(said)  # again if the Workload has changed meanwhile

    def _admit(self, workload: Object) -> None:
        assignments = [
            {
                "name": pod_set["name"],
                "count": pod_set["count"],
                "flavors": {GPUS: self.FLAVOR, "cpu": self.FLAVOR} if _of_template(pod_set["template"]) else {},
            }
            for pod_set in workload["spec"]["podSets"]
        ]
        admission = {"clusterQueue": self.QUEUE, "podSetAssignments": assignments}
        changes = {
            "QuotaReserved": ("True", "QuotaReserved", f"Quota reserved in ClusterQueue {self.QUEUE}"),
            "Admitted": ("True", "Admitted", f"The workload is admitted by ClusterQueue {self.QUEUE}"),
        }
        if _is(workload, "Evicted"):
            changes["Evicted"] = ("False", "QuotaReserved", "Previously: Preempted")
        self._say(workload, admission, **changes)

    def _say(self, workload: Object, admission: Object | None = None, **changes: tuple[str, str, str]) -> None:
        conditions = {each["type"]: each for each in workload.get("status", {}).get("conditions", ())}
        before = {kind: (each["status"], each["reason"], each["message"]) for kind, each in conditions.items()}
        if admission is None and changes.items() <= before.items():
            return
        for kind, (status, reason, message) in changes.items():
            since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            conditions[kind] = {"type": kind, "status": status, "reason": reason, "message": message}
            conditions[kind]["lastTransitionTime"] = since
        status = {"conditions": list(conditions.values())} | ({"admission": admission} if admission else {})
        metadata = workload["metadata"]
        path = f"{self._collection}/{metadata['name']}/status"
        self.api.patch(path, {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": status})


def _is(workload: Object, kind: str) -> bool:
    found = workload.get("status", {}).get("conditions", ())
    return any(each["type"] == kind and each["status"] == "True" for each in found)


def _queued_since(workload: Object) -> str:
    evicted = (each for each in workload.get("status", {}).get("conditions", ()) if each["type"] == "Evicted")
    return max(
        str(workload["metadata"]["creationTimestamp"]), *(str(each["lastTransitionTime"]) for each in evicted), ""
    )


def _gpus_of(workload: Object) -> int:
    return sum(_of_template(each["template"]) * each["count"] for each in workload["spec"]["podSets"])


def _of_template(template: Object) -> int:
    containers = template["spec"]["containers"]
    return sum(int(each.get("resources", {}).get("limits", {}).get(GPUS, 0)) for each in containers)


def _gpus(pod: Object) -> int:
    return _of_template(pod)


def _free_gpus(api: Api, pods: Sequence[Object]) -> Counter[str]:
    free: Counter[str] = Counter()
    for node in api.list("/api/v1/nodes"):
        free[node["metadata"]["name"]] = int(node["status"]["allocatable"].get(GPUS, 0))
    for pod in pods:
        if node := pod["spec"].get("nodeName"):
            free[node] -= _gpus(pod)
    return free


def _unschedulable(api: Api, pod: Object, nodes: int) -> None:
    if any(each["type"] == "PodScheduled" for each in pod["status"].get("conditions", ())):
        return
    message = f"0/{nodes} nodes are unavailable: {nodes} Insufficient {GPUS}."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    api.patch(f"{_path(pod)}/status", {"status": {"conditions": [condition]}}, "strategic")


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
