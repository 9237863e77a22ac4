"""Status of every role: desired and ready pods, why pods are missing, exits and restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob.api.job_status import ReadyCounts, RLJobStatus, RoleStatus
from rljob.manifests.gang import WITH_POD_GROUP
from rljob.manifests.names import RAY_CLUSTER, ROLE_HASH, role_name
from rljob.manifests.render_context import RenderedRole
from rljob.operator.api_types import Child, Pod
from rljob.operator.planning import pod_diagnosis, ray_engine_state, reasons
from rljob.operator.planning.container_exits import (
    CONFIGURATION_ERROR,
    describe,
    last_end,
    lived,
    main_container,
    newest_end,
    with_log_end,
)
from rljob.operator.planning.job_view import (
    JobView,
    alive,
    controller,
    has_node,
    is_ready,
    least_replicas,
    restarts_before,
)
from rljob.operator.planning.pod_diagnosis import PodProblem
from rljob.operator.planning.timestamps import age
from rljob.operator.planning.trainer import FORGIVENESS_SECONDS

LATE_SECONDS = 60.0
"""After this time without pods a Job counts as blocked."""
MAX_TEXT_CHARACTERS = 4096
MAX_CELL_CHARACTERS = 253
"""Characters of a printed column."""


@dataclass(frozen=True)
class RoleProblem:
    """Why a role is not ready. ``essential``: the job is not ready either (engines above a pool's minimum are not)."""

    role: str
    reason: str
    text: str
    essential: bool

    @property
    def severity(self) -> int:
        """Higher is worse."""
        return pod_diagnosis.SEVERITY.index(self.reason)


def survey(view: JobView, before: RLJobStatus, waits_for: str = "") -> tuple[list[RoleStatus], list[RoleProblem]]:
    """Return the status of every role except the initializer, and the problems of those that are not ready.

    Args:
        view: the job.
        before: the last status.
        waits_for: summary of roles without objects.
    """
    minimum = least_replicas(view.job)
    earlier = {role.name: role for role in before.roles}
    statuses, problems = [], []
    for role in view.roles:
        if role.kind == "initializer" or not role.desired:
            continue
        pods = view.pods.get(role.name, ())
        desired = view.wanted.get(role.name, role.desired)
        problem = problem_of(view, role, desired, minimum.get(role.name, desired))
        if problem is not None and waits_for:
            problem = RoleProblem(role.name, reasons.PODS_NOT_READY, waits_for, True)
        if problem is not None:
            problems.append(problem)
        ready = _ready(view, role)
        before_role = earlier.get(role.name)
        statuses.append(_status(role.name, pods, desired, problem.text if problem else "", before_role, ready))
    return statuses, problems


def without_pods(before: RLJobStatus, pods: Mapping[str, Sequence[Pod]]) -> list[RoleStatus]:
    """Return the status of the roles of a job whose pods are all deleted, counting the remaining pods."""
    return [
        _status(role.name, own, 0, "", role, sum(map(is_ready, own)))
        for role in before.roles
        for own in [pods.get(role.name, ())]
    ]


def ready_counts(roles: Sequence[RoleStatus]) -> ReadyCounts:
    """Return "ready/desired" pods by kind of role, empty for kinds without roles, and restarts."""

    def text(kind: str) -> str:
        of_kind = [role for role in roles if role.name == kind or role.name.startswith(f"{kind}-")]
        return f"{sum(r.ready for r in of_kind)}/{sum(r.desired for r in of_kind)}" if of_kind else ""

    restarts = ", ".join(f"{role.name} {role.restarts}" for role in roles if role.restarts)
    return ReadyCounts(
        trainer=text("trainer"),
        rollout=text("rollout"),
        reward=text("reward"),
        environment=text("environment"),
        restarts=restarts if len(restarts) <= MAX_CELL_CHARACTERS else restarts[: MAX_CELL_CHARACTERS - 1] + "…",
    )


def problem_of(view: JobView, role: RenderedRole, desired: int, minimum: int) -> RoleProblem | None:
    """Return why a role is not ready; None if all its pods are ready and up to date."""
    pods = view.pods.get(role.name, ())
    waiting = [pod for pod in pods if not is_ready(pod)]
    ready = _ready(view, role)
    outdated = _outdated(view, role)
    if ready >= desired and not outdated:
        return None
    warnings = view.observed.warnings
    essential, desired = ready < minimum or outdated, desired * role.hosts
    context = pod_diagnosis.DiagnosisContext(_claims(view), view.job.spec.storage.claim or "", warnings)
    pod_problems = [pod_diagnosis.of_pod(pod, context) for pod in waiting]
    if len(pods) < desired:
        found = (pod_diagnosis.of_workload(child, warnings) for child in view.workloads(role.name))
        pod_problems += filter(None, found)
    if pod_problems:
        worst = max(pod_problems, key=lambda pod_problem: pod_problem.severity)
        count = sum(pod_problem.reason == worst.reason for pod_problem in pod_problems)
        text = _sentence(
            role.name, worst, max(count, desired - len(pods)) if worst.state == "refused" else count, desired
        )
        restarts = role.kind == "trainer" and worst.state == pod_diagnosis.ENDED
        reason = reasons.TRAINER_RESTARTING if restarts else worst.reason
        return RoleProblem(role.name, reason, text, essential)
    reason = reasons.PODS_NOT_READY
    if len(pods) < desired:
        text = f"{desired - len(pods)} of {desired} {role.name} {_pods(desired)} not created yet"
        if late := _late_job(view, role.name):
            reason = reasons.PODS_FORBIDDEN
            text += f": refused, or a quota is used up; kubectl describe job {late.metadata.name} shows the reason"
        if idle := _late_ray_cluster(view, role):
            text += (
                f": KubeRay has made no pods for RayCluster {idle}; check that its operator runs and watches the "
                f"namespace (kubectl describe raycluster {idle})"
            )
    elif ended := next((each for each in ray_engine_state.engines(view, role) if each.end is not None), None):
        assert ended.end is not None
        text = f"an engine of {role.name} has ended and is replaced: {ended.end.why}"
    else:
        text = f"{role.name} {_pods(desired)} are being replaced: the manifest has changed"
    return RoleProblem(role.name, reason, text, essential)


def _ready(view: JobView, role: RenderedRole) -> int:
    """Return the ready pods of a role, of a pool the ready engines."""
    if role.hosts > 1:
        return sum(each.ready for each in ray_engine_state.engines(view, role))
    return sum(map(is_ready, view.pods.get(role.name, ())))


def _late_ray_cluster(view: JobView, role: RenderedRole) -> str:
    """Return the name of a RayCluster of the role that has had no pods for long; empty if there is none."""
    for each in ray_engine_state.engines(view, role):
        if not each.pods and age(each.cluster.metadata.creation_timestamp, view.now) >= LATE_SECONDS:
            return each.name
    return ""


def fatal(view: JobView) -> tuple[str, str] | None:
    """Return reason and message if a failure of a role other than the trainer ends the run.

    The lifetime of a pod, from times that the cluster recorded, offsets restarts of its container; no local clock is
    used. Exit code 2 of a user's own program is an ordinary failure: a Go program exits with 2 when it panics.
    """
    most = view.job.spec.failure_policy.max_restarts
    spec = view.job.spec
    others = {role_name("reward", each.name) for each in spec.rewards if not each.served_by_rljob}
    others |= {role_name("environment", each.name) for each in spec.environments if not each.served_by_rljob}
    for role in view.roles:
        if role.kind in ("initializer", "trainer"):
            continue
        for pod in view.pods.get(role.name, ()):
            container = main_container(pod)
            end = last_end(container) if container else None
            if container is None or end is None:
                continue
            name = f"{role.name} (pod {pod.metadata.name})"
            if end.exit_code == CONFIGURATION_ERROR and role.name not in others:
                return (
                    reasons.CONFIGURATION_ERROR,
                    f"{name} rejects its configuration: {with_log_end(end)}",
                )
            restarts = container.restart_count + _inherited_restarts(view, pod)
            if restarts - lived(pod, end) / FORGIVENESS_SECONDS > most:
                exceeded = f"exceeded spec.failurePolicy.maxRestarts ({most})"
                return reasons.MAX_RESTARTS_EXCEEDED, f"{name} {exceeded}: {with_log_end(end)}"
    return None


def _inherited_restarts(view: JobView, pod: Pod) -> float:
    """Return the restarts of the engines that the pod's engine replaces; 0 for pods without a RayCluster."""
    owner = controller(pod)
    cluster = view.observed.children.get((RAY_CLUSTER, owner.name)) if owner is not None else None
    return restarts_before(cluster) if cluster is not None and owner is not None and owner.kind == RAY_CLUSTER else 0.0


def gang_waits(view: JobView) -> bool:
    """Return whether pods of the trainer or of a pool's minimum of engines are pending or refused."""
    minimums = least_replicas(view.job)
    for role in view.roles:
        if role.kind not in ("trainer", "rollout"):
            continue
        pods = alive(view.pods.get(role.name, ()))
        waiting = sum(_is_pending(view, pod) for pod in pods if pod.status.phase == "Pending")
        minimum = minimums.get(role.name, role.desired) * role.hosts
        refused = len(pods) < minimum and _refused(view, role.name)
        if (waiting or refused) and len(pods) - waiting < minimum:
            return True
    return False


def _is_pending(view: JobView, pod: Pod) -> bool:
    """Return whether a pod waits for a node. A scheduler that has not looked at an incomplete gang reports no cause."""
    if view.gang in WITH_POD_GROUP and not has_node(pod):
        return True
    return pod_diagnosis.of_pod(pod).state == "pending"


def _status(
    name: str, pods: Sequence[Pod], desired: int, summary: str, before: RoleStatus | None, ready: int
) -> RoleStatus:
    before = before or RoleStatus(name=name, desired=0, ready=0)
    restarts = sum(container.restart_count for pod in pods for container in pod.status.container_statuses)
    end = newest_end(pods)
    return RoleStatus(
        name=name,
        desired=desired,
        ready=ready,
        summary=summary[:MAX_TEXT_CHARACTERS],
        restarts=before.restarts + max(0, restarts - before.counted),
        counted=restarts,
        last_exit=describe(end)[:MAX_TEXT_CHARACTERS] if end else before.last_exit,
    )


def _sentence(role: str, pod_problem: PodProblem, count: int, desired: int) -> str:
    if pod_problem.reason == reasons.IMAGE_PULL_FAILED:
        image = f"image {pod_problem.image} " if pod_problem.image else "the image "
        return f"{image}of {role} cannot be pulled: {pod_problem.text}; correct its name or pull secret"
    return f"{count} of {desired} {role} {_pods(desired)} {pod_problem.state}: {pod_problem.text}"


def _pods(count: int) -> str:
    return "pod" if count == 1 else "pods"


def _outdated(view: JobView, role: RenderedRole) -> bool:
    """Return whether a workload of the role has not rolled out its newest spec. A RayCluster never does: it is replaced
    when the inputs of its role change."""
    return any(
        child.metadata.annotations.get(ROLE_HASH) != role.hash if child.kind == RAY_CLUSTER else _behind(child)
        for child in view.workloads(role.name)
    )


def _behind(child: Child) -> bool:
    if child.kind == "Job":
        return False
    status = child.body.get("status", {})
    created = status.get("replicas", 0)
    if status.get("observedGeneration", 0) < child.metadata.generation:
        return bool(created == child.body.get("spec", {}).get("replicas", 1))  # otherwise it is being scaled
    if child.kind == "StatefulSet":
        return bool(status.get("updateRevision") != status.get("currentRevision"))
    return bool(status.get("updatedReplicas", 0) < created)


def _late_job(view: JobView, role: str) -> Child | None:
    """Return the role's Job if its pods are late: unlike a Deployment, a Job reports the cause in events only.

    A pod that was created and later deleted or evicted was not refused: the Job counts it.
    """
    jobs = [child for child in view.workloads(role) if child.kind == "Job"]
    return next((job for job in jobs if _is_late(job, view.now)), None)


def _is_late(job: Child, now: float) -> bool:
    status, desired = job.body.get("status", {}), job.body.get("spec", {}).get("parallelism", 1)
    created = sum(status.get(counted, 0) for counted in ("active", "failed", "succeeded", "terminating"))
    return created < desired and age(job.metadata.creation_timestamp, now) >= LATE_SECONDS


def _refused(view: JobView, role: str) -> bool:
    """Return whether the creation of a role's pods is refused."""
    problems = (pod_diagnosis.of_workload(child, view.observed.warnings) for child in view.workloads(role))
    return _late_job(view, role) is not None or any(problems)


def _claims(view: JobView) -> list[Child]:
    return [child for (kind, _), child in view.observed.children.items() if kind == "PersistentVolumeClaim"]
