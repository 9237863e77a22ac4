"""A cluster in memory, as planning sees one: it holds what plans ask for, and tests do to it what clusters do."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from msgspec.structs import force_setattr
from pydantic import TypeAdapter

from rljob.api.job_status import RLJobStatus, RunState
from rljob.api.models import RLJob
from rljob.manifests.inputs import Cluster
from rljob.operator import drift
from rljob.operator.api_types import (
    Child,
    ContainerState,
    ContainerStatus,
    Meta,
    ObjectCondition,
    OwnerReference,
    Pod,
    PodStatus,
    Terminated,
    Waiting,
)
from rljob.operator.object_kinds import ref_of
from rljob.operator.plan import Observed, Plan, Ref
from rljob.operator.planning import Rendering, plan
from rljob.operator.planning.timestamps import instant

RUN_STATE = TypeAdapter(RunState)
BEGIN = 1_800_000_000.0
SPEC: dict[str, Any] = {
    "models": [{"name": "policy", "source": "job://model"}],
    "training": {"steps": 3},
    "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "exact"}],
    "rewards": [{"name": "exact", "builtin": "reasoning_gym"}],
    "trainer": {"nodes": 2},
    "rollouts": [{"name": "main", "replicas": {"min": 2, "max": 4}}],
}
CLUSTER = Cluster()


def put(struct: Any, **fields: Any) -> None:
    """Change fields that only a cluster's operator allows to change."""
    for name, value in fields.items():
        force_setattr(struct, name, value)


class World:
    """One RLJob and its objects. ``plan`` plans and executes once; ``settle`` repeats it until nothing changes."""

    def __init__(self, **spec: Any) -> None:
        self.spec = {**copy.deepcopy(SPEC), **spec}
        self.generation = 1
        self.now = BEGIN
        self.status = RLJobStatus()
        self.children: dict[Ref, Child] = {}
        self.pods: dict[str, Pod] = {}
        self.foreign: dict[Ref, str] = {}
        self.refused: dict[Ref, str] = {}
        self.warnings: dict[str, str] = {}
        self.claim_in_use = ""
        self.problems: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.deleted = False
        self.costs: dict[str, int] = {}
        self._serial = 0
        self._rendering = Rendering()
        self._job = self._validated()

    # what a user does

    def change(self, **spec: Any) -> None:
        """Change fields of the spec; None removes one."""
        self.spec.update(spec)
        self.spec = {key: value for key, value in self.spec.items() if value is not None}
        self.generation += 1
        self._job = self._validated()

    def scale(self, role: str, replicas: int) -> None:
        """Set the replicas of a role's scale."""
        self.children[next(r for r in self.children if r[0] == "RLJobScale" and r[1].endswith(role))].body["spec"][
            "replicas"
        ] = replicas

    # what an operator does

    def observe(self, status: RLJobStatus | None = None) -> Observed:
        """Return what is seen; ``status`` in place of the newest."""
        scales = {
            child.metadata.labels["rljob.dev/role"]: child.body["spec"]["replicas"]
            for (kind, _), child in self.children.items()
            if kind == "RLJobScale"
        }
        meta = Meta("sums", "default", "uid", generation=self.generation, creation_timestamp=instant(BEGIN))
        return Observed(
            metadata=meta,
            job=None if self.problems else self._job,
            problems=self.problems,
            status=status or self.status,
            children=dict(self.children),
            pods=list(self.pods.values()),
            scales=scales,
            foreign=self.foreign,
            refused=self.refused,
            now=self.now,
            warnings=self.warnings,
            claim_in_use=self.claim_in_use,
        )

    def decide(self, status: RLJobStatus | None = None, **observed: Any) -> Plan:
        """Return a plan without doing it; ``observed`` replaces what is seen."""
        return plan(replace(self.observe(status), **observed), CLUSTER, self._rendering)

    def plan(self) -> Plan:
        """Decide once and do what was decided."""
        made = self.decide()
        self.do(made)
        return made

    def do(self, made: Plan) -> None:
        """Do a plan."""
        if made.status is None:
            return
        for ref, uid in made.deletions:
            child = self.children.get(ref)
            if child is not None and child.metadata.uid == uid:
                self.remove(ref)
            self.pods = {name: pod for name, pod in self.pods.items() if pod.metadata.labels.get("owner") != uid}
        self.costs.update(made.pod_costs)
        for name, cost in made.pod_costs.items():
            if name not in self.pods:
                continue  # deleted by the same plan
            self.pods[name].metadata.annotations["controller.kubernetes.io/pod-deletion-cost"] = str(cost)
        for each in made.desired:
            self._keep(each)
        run = self.status.run
        self.status = RLJobStatus.model_validate_json(made.status.model_dump_json())
        self.status.run = run
        self.events += [(event.type, event.reason) for event in made.events]
        self.deleted = made.delete_job

    def settle(self) -> Plan:
        """Decide and do until nothing changes."""
        for _ in range(12):
            before = self.status, {ref: child.metadata.generation for ref, child in self.children.items()}
            made = self.plan()
            after = self.status, {ref: child.metadata.generation for ref, child in self.children.items()}
            if before == after and not made.events:
                return made
        raise AssertionError(f"does not settle: {made}")

    @classmethod
    def with_elastic_engines(cls, role: str) -> World:
        """Return a running job whose pool has two elastic engines beside its minimum of two; all are ready."""
        world = cls()
        world.run_up()
        world.scale(role, 4)
        world.settle()
        world.make_pods()
        world.ready()
        world.settle()
        return world

    def run_up(self) -> None:
        """Have everything made, ready and running."""
        self.settle()
        self.finish_initializer()
        self.settle()
        for _ in range(2):  # engines follow when the trainer has its nodes
            self.make_pods()
            self.ready()
            self.settle()
        self.tell(state="Running")
        self.settle()

    # what a cluster does

    def make_pods(self) -> None:
        """Have every workload's pods made, and those it has no more removed."""
        for (kind, name), child in sorted(self.children.items()):
            if kind == "RayCluster":
                self._make_ray_pods(child)
            if kind not in ("Deployment", "StatefulSet", "Job"):
                continue
            spec = child.body["spec"]
            wanted = spec.get("replicas", spec.get("completions", 1))
            mine = [pod for pod in self.pods.values() if pod.metadata.labels.get("owner") == child.metadata.uid]
            mine.sort(key=lambda pod: (self.costs.get(pod.metadata.name, 0), pod.metadata.name))
            for pod in mine[: max(0, len(mine) - wanted)]:
                del self.pods[pod.metadata.name]
            for _ in range(wanted - len(mine)):
                self._make_pod(name, child)
            self._settle_workload(child)

    def ready(self, *names: str) -> None:
        """Have pods become ready: all, or those whose name holds one of ``names``."""
        for pod in self.find(*names):
            found = [each for each in pod.status.conditions if (each.type, each.status) == ("PodScheduled", "True")]
            scheduled = found or [ObjectCondition("PodScheduled", "True", last_transition_time=instant(self.now))]
            put(pod.status, phase="Running", conditions=[*scheduled, ObjectCondition("Ready", "True")])
            put(pod.status.container_statuses[0], ready=True, state=ContainerState())

    def find(self, *names: str) -> list[Pod]:
        """Return the pods whose name holds one of ``names``, or all."""
        return [pod for name, pod in sorted(self.pods.items()) if not names or any(each in name for each in names)]

    def unschedulable(self, message: str, *names: str) -> None:
        """Have the scheduler find no node."""
        for pod in self.find(*names):
            conditions = [ObjectCondition("PodScheduled", "False", "Unschedulable", message)]
            put(pod.status, phase="Pending", conditions=conditions)

    def waiting(self, reason: str, message: str, *names: str) -> None:
        """Have containers wait."""
        for pod in self.find(*names):
            put(pod.status, conditions=[ObjectCondition("PodScheduled", "True"), ObjectCondition("Ready", "False")])
            put(pod.status.container_statuses[0], state=ContainerState(waiting=Waiting(reason, message)))

    def exit(self, name: str, code: int, reason: str = "Error", message: str = "", fatal: bool = True) -> None:
        """Have the container of a pod end: for good (a Job's), or to be restarted in its pod."""
        end = Terminated(code, 0, reason, message, finished_at=instant(self.now))
        for pod in self.find(name):
            main = pod.status.container_statuses[0]
            put(main, ready=False)
            if fatal:
                put(main, state=ContainerState(terminated=end))
                conditions = [each for each in pod.status.conditions if each.type != "Ready"]
                put(pod.status, phase="Failed", conditions=[*conditions, ObjectCondition("Ready", "False")])
            else:
                put(main, restart_count=main.restart_count + 1, last_state=ContainerState(terminated=end))

    def disrupt(self, name: str) -> None:
        """Have something outside end pods."""
        for pod in self.find(name):
            pod.status.conditions.append(ObjectCondition("DisruptionTarget", "True", "PreemptionByScheduler"))

    def fail_job(self, reason: str = "BackoffLimitExceeded", message: str = "", job: str = "trainer") -> None:
        """Have a Job fail."""
        self._end_job(job, "Failed", reason, message)

    def complete_job(self, job: str = "trainer") -> None:
        """Have a Job complete."""
        self._end_job(job, "Complete", "", "")

    def finish_initializer(self) -> None:
        """Have the initializer complete, if there is one."""
        if any("initializer" in name for _, name in self.children):
            self.complete_job("initializer")

    def remove(self, ref: Ref) -> None:
        """Have an object deleted, and its pods with it."""
        uid = self.children.pop(ref).metadata.uid
        self.pods = {name: pod for name, pod in self.pods.items() if pod.metadata.labels.get("owner") != uid}

    def tell(self, **run: Any) -> None:
        """Have the coordinator apply status.run."""
        run.setdefault("observed_generation", self.generation)
        self.status = self.status.model_copy(update={"run": RUN_STATE.validate_python(run)})

    # what tests ask

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition; empty texts when there is none."""
        found = next((each for each in self.status.conditions if each.type == kind), None)
        return (found.status, found.reason, found.message) if found else ("", "", "")

    @property
    def why(self) -> str:
        """The reason of Ready."""
        return self.condition("Ready")[1]

    def role(self, name: str) -> Any:
        """Return the status of a role."""
        return next(role for role in self.status.roles if role.name == name)

    def names(self, kind: str) -> list[str]:
        """Return the names of the children of a kind."""
        return sorted(name for each, name in self.children if each == kind)

    def _validated(self) -> RLJob:
        data = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": self.spec}
        return RLJob.model_validate(data)

    def _uid(self) -> str:
        self._serial += 1
        return f"uid-{self._serial}"

    def _keep(self, each: dict[str, Any]) -> None:
        ref = ref_of(each)
        before = self.children.get(ref)
        meta = each["metadata"]
        if before is None:
            made = Meta(
                meta["name"],
                "default",
                self._uid(),
                generation=1,
                creation_timestamp=instant(self.now),
                labels=dict(meta["labels"]),
                annotations=dict(meta["annotations"]),
            )
            self.children[ref] = Child(ref[0], made, copy.deepcopy(each))
            return
        if before.metadata.deletion_timestamp is not None or ref[0] == "RLJobScale":
            return
        if drift.same_role(each, before) and not drift.same_rendering(each, before):  # of another release or setting
            replicas = drift.replicas_of(each)
            each = copy.deepcopy(before.body)
            if replicas is not None:
                each["spec"]["replicas"] = replicas
            meta = each["metadata"]
        if before.body["spec" if "spec" in each else "metadata"] != each["spec" if "spec" in each else "metadata"]:
            status = before.body.get("status", {})
            before.body.update(copy.deepcopy(each) | {"status": status})
            before.metadata.annotations.update(meta["annotations"])
            put(before.metadata, generation=before.metadata.generation + 1)

    def _make_ray_pods(self, child: Child) -> None:
        """Make the pods that KubeRay makes; it replaces those that are missing."""
        spec = child.body["spec"]
        mine = [pod for pod in self.pods.values() if pod.metadata.labels.get("owner") == child.metadata.uid]
        (workers,) = spec["workerGroupSpecs"]
        for kind, group, count in (("head", spec["headGroupSpec"], 1), ("worker", workers, workers["replicas"])):
            there = sum(pod.metadata.labels["ray.io/node-type"] == kind for pod in mine)
            for _ in range(count - there):
                labels = {"ray.io/cluster": child.metadata.name, "ray.io/node-type": kind}
                self._make_pod(f"{child.metadata.name}-{kind}", child, group["template"], labels)

    def provisioned(self) -> None:
        """Have KubeRay say that all pods of the RayClusters have been ready."""
        said = {"type": "RayClusterProvisioned", "status": "True", "lastTransitionTime": instant(self.now)}
        for (kind, _), child in self.children.items():
            if kind == "RayCluster":
                child.body.setdefault("status", {}).setdefault("conditions", [said])

    def _make_pod(
        self, workload: str, child: Child, template: Any = None, more_labels: dict[str, str] | None = None
    ) -> None:
        template = template or child.body["spec"]["template"]
        uid = self._uid()
        labels = {**template["metadata"]["labels"], "owner": child.metadata.uid, **(more_labels or {})}
        kind = "ReplicaSet" if child.kind == "Deployment" else child.kind
        owner = OwnerReference(kind, child.metadata.name, child.metadata.uid, controller=True)
        meta = Meta(
            f"{workload}-{uid}",
            "default",
            uid,
            creation_timestamp=instant(self.now),
            labels=labels,
            annotations={},
            owner_references=[owner],
        )
        image = template["spec"]["containers"][0]["image"]
        self.pods[meta.name] = Pod(meta, status=PodStatus("Pending", [], [], [ContainerStatus("main", image)]))

    def _settle_workload(self, child: Child) -> None:
        status = child.body.setdefault("status", {})
        status["observedGeneration"] = child.metadata.generation
        status["updatedReplicas"] = status["replicas"] = child.body["spec"].get("replicas", 0)

    def _end_job(self, job: str, kind: str, reason: str, message: str) -> None:
        child = next(child for (each, name), child in sorted(self.children.items()) if each == "Job" and job in name)
        said = {"type": kind, "status": "True", "reason": reason, "message": message}
        child.body.setdefault("status", {})["conditions"] = [said | {"lastTransitionTime": instant(self.now)}]
