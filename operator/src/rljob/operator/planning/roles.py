"""Every role of a job: how many of its pods there shall be and are ready, what keeps the rest, what died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob.api.status import ReadyCounts, RLJobStatus, RoleStatus
from rljob.manifests.names import role_name
from rljob.manifests.render_context import RenderedRole
from rljob.operator.planning import exits, pending, reasons
from rljob.operator.planning.pending import Obstacle
from rljob.operator.planning.scene import Scene, alive, is_ready, least_replicas
from rljob.operator.planning.times import age
from rljob.operator.planning.trainer import FORGIVING_LIFE
from rljob.operator.seen import Child, Pod

LATE_SECONDS = 60.0
"""A pod that is not made so long after its Job was is kept by something."""
LONGEST_TEXT = 4096
LONGEST_CELL = 253
"""Characters of what a column shows."""


@dataclass(frozen=True)
class Lack:
    """What a role lacks. ``essential``: the job is not ready without it (an engine beyond its pool's least is not)."""

    role: str
    reason: str
    text: str
    essential: bool

    @property
    def severity(self) -> int:
        """Higher is worse."""
        return pending.SEVERITY.index(self.reason)


def survey(scene: Scene, before: RLJobStatus, waits_for: str = "") -> tuple[list[RoleStatus], list[Lack]]:
    """Return the status of every role that has pods for good, and what they lack.

    Args:
        waits_for: the summary of roles of which nothing is made yet.
    """
    least = least_replicas(scene.job)
    earlier = {role.name: role for role in before.roles}
    statuses, lacks = [], []
    for role in scene.roles:
        if role.kind == "initializer" or not role.desired:
            continue
        pods = scene.pods.get(role.name, ())
        desired = scene.wanted.get(role.name, role.desired)
        lack = lack_of(scene, role, desired, least.get(role.name, desired))
        if lack is not None and waits_for:
            lack = Lack(role.name, reasons.ROLES_NOT_READY, waits_for, True)
        if lack is not None:
            lacks.append(lack)
        statuses.append(_status(role.name, pods, desired, lack.text if lack else "", earlier.get(role.name)))
    return statuses, lacks


def at_rest(before: RLJobStatus, pods: Mapping[str, Sequence[Pod]]) -> list[RoleStatus]:
    """Return the roles of a job that shall have no pods, with those that still are."""
    return [_status(role.name, pods.get(role.name, ()), 0, "", role) for role in before.roles]


def ready_counts(roles: Sequence[RoleStatus]) -> ReadyCounts:
    """Return ready of desired pods by kind of role, empty for kinds that the job has none of, and what died."""

    def text(kind: str) -> str:
        of_kind = [role for role in roles if role.name == kind or role.name.startswith(f"{kind}-")]
        return f"{sum(r.ready for r in of_kind)}/{sum(r.desired for r in of_kind)}" if of_kind else ""

    restarts = ", ".join(f"{role.name} {role.restarts}" for role in roles if role.restarts)
    return ReadyCounts(
        trainer=text("trainer"),
        rollout=text("rollout"),
        reward=text("reward"),
        restarts=restarts if len(restarts) <= LONGEST_CELL else restarts[: LONGEST_CELL - 1] + "…",
    )


def lack_of(scene: Scene, role: RenderedRole, desired: int, least: int) -> Lack | None:
    """Return what a role lacks; None when all its pods are ready and as the manifest says."""
    pods = scene.pods.get(role.name, ())
    waiting = [pod for pod in pods if not is_ready(pod)]
    ready = len(pods) - len(waiting)
    outdated = _outdated(scene, role)
    if ready >= desired and not outdated:
        return None
    mishaps = scene.observed.mishaps
    around = pending.Around(_claims(scene), scene.job.spec.storage.claim or "", mishaps)
    obstacles = [pending.of_pod(pod, around) for pod in waiting]
    if len(pods) < desired:
        found = (pending.of_workload(child, mishaps) for child in scene.workloads(role.name))
        obstacles += filter(None, found)
    if obstacles:
        worst = max(obstacles, key=lambda obstacle: obstacle.severity)
        count = sum(obstacle.reason == worst.reason for obstacle in obstacles)
        text = _sentence(
            role.name, worst, max(count, desired - len(pods)) if worst.state == "refused" else count, desired
        )
        restarts = role.kind == "trainer" and worst.state == pending.ENDED
        reason = reasons.TRAINER_RESTARTING if restarts else worst.reason
        return Lack(role.name, reason, text, ready < least or outdated)
    reason = reasons.ROLES_NOT_READY
    if ready < desired:
        text = f"{desired - ready} of {desired} {role.name} {_pods(desired)} not made yet"
        if late := _late_job(scene, role.name):
            reason = reasons.PODS_REFUSED
            text += f": refused, or a quota is used up; kubectl describe job {late.metadata.name} tells why"
    else:
        text = f"{role.name} {_pods(desired)} are being replaced: the manifest has changed"
    return Lack(role.name, reason, text, ready < least or outdated)


def fatal(scene: Scene) -> tuple[str, str] | None:
    """Return reason and message if something died, besides the trainer, in a way that ends the run.

    A container's deaths are forgiven by the life of its pod as the cluster recorded it, so that no clock decides. Exit
    code 2 of a reward that the user wrote says nothing: a Go program ends so when it panics.
    """
    most = scene.job.spec.failure_policy.max_restarts
    others = {role_name("reward", each.name) for each in scene.job.spec.rewards if each.builtin is None}
    for role in scene.roles:
        if role.kind in ("initializer", "trainer"):
            continue
        for pod in scene.pods.get(role.name, ()):
            container = exits.main_container(pod)
            end = exits.last_end(container) if container else None
            if container is None or end is None:
                continue
            name = f"{role.name} (pod {pod.metadata.name})"
            if end.exit_code == exits.CONFIGURATION_ERROR and role.name not in others:
                return reasons.CONFIGURATION_ERROR, f"{name} refuses its configuration: {exits.with_log_end(end)}"
            if container.restart_count - exits.lived(pod, end) / FORGIVING_LIFE > most:
                had = f"had its {most} restarts (spec.failurePolicy.maxRestarts)"
                return reasons.MAX_RESTARTS_EXCEEDED, f"{name} {had}: {exits.with_log_end(end)}"
    return None


def gang_waits(scene: Scene) -> bool:
    """Return whether pods of the trainer or of the least engines of a pool find no node, or are refused."""
    least = least_replicas(scene.job)
    for role in scene.roles:
        if role.kind not in ("trainer", "rollout"):
            continue
        pods = alive(scene.pods.get(role.name, ()))
        waiting = sum(pending.of_pod(pod).state == "pending" for pod in pods if pod.status.phase == "Pending")
        fewest = least.get(role.name, role.desired)
        refused = len(pods) < fewest and _refused(scene, role.name)
        if (waiting or refused) and len(pods) - waiting < fewest:
            return True
    return False


def _status(name: str, pods: Sequence[Pod], desired: int, summary: str, before: RoleStatus | None) -> RoleStatus:
    before = before or RoleStatus(name=name, desired=0, ready=0)
    restarts = sum(container.restart_count for pod in pods for container in pod.status.container_statuses)
    end = exits.newest_end(pods)
    return RoleStatus(
        name=name,
        desired=desired,
        ready=sum(map(is_ready, pods)),
        summary=summary[:LONGEST_TEXT],
        restarts=before.restarts + max(0, restarts - before.counted),
        counted=restarts,
        last_exit=exits.describe(end)[:LONGEST_TEXT] if end else before.last_exit,
    )


def _sentence(role: str, obstacle: Obstacle, count: int, desired: int) -> str:
    if obstacle.reason == reasons.IMAGE:
        image = f"image {obstacle.image} " if obstacle.image else "the image "
        return f"{image}of {role} cannot be pulled: {obstacle.text}; correct its name or pull secret"
    return f"{count} of {desired} {role} {_pods(desired)} {obstacle.state}: {obstacle.text}"


def _pods(count: int) -> str:
    return "pod" if count == 1 else "pods"


def _outdated(scene: Scene, role: RenderedRole) -> bool:
    """Return whether a Deployment or StatefulSet of the role is not yet what its newest spec says."""
    return any(_behind(child) for child in scene.workloads(role.name))


def _behind(child: Child) -> bool:
    if child.kind == "Job":
        return False
    status = child.body.get("status", {})
    made = status.get("replicas", 0)
    if status.get("observedGeneration", 0) < child.metadata.generation:
        return bool(made == child.body.get("spec", {}).get("replicas", 1))  # else it is being scaled
    if child.kind == "StatefulSet":
        return bool(status.get("updateRevision") != status.get("currentRevision"))
    return bool(status.get("updatedReplicas", 0) < made)


def _late_job(scene: Scene, role: str) -> Child | None:
    """Return the role's Job if it should have made all its pods by now: unlike a Deployment it says why in events only.

    A pod that was made and is gone, deleted or evicted, was not refused: the Job counts it.
    """
    jobs = [child for child in scene.workloads(role) if child.kind == "Job"]
    return next((job for job in jobs if _is_late(job, scene.now)), None)


def _is_late(job: Child, now: float) -> bool:
    status, wanted = job.body.get("status", {}), job.body.get("spec", {}).get("parallelism", 1)
    made = sum(status.get(counted, 0) for counted in ("active", "failed", "succeeded", "terminating"))
    return made < wanted and age(job.metadata.creation_timestamp, now) >= LATE_SECONDS


def _refused(scene: Scene, role: str) -> bool:
    """Return whether pods of a role cannot be made."""
    said = (pending.of_workload(child, scene.observed.mishaps) for child in scene.workloads(role))
    return _late_job(scene, role) is not None or any(said)


def _claims(scene: Scene) -> list[Child]:
    return [child for (kind, _), child in scene.observed.children.items() if kind == "PersistentVolumeClaim"]
