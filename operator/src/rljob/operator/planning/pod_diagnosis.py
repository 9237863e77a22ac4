"""Diagnosis of pods that are not ready: the most severe reason, with a message.

Messages of Kubernetes are used without the parts that change constantly (counts of nodes, times, random names), so that
the status is written only when the cause changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob.api.pod_models import MAIN
from rljob.operator.api_types import Child, ContainerStatus, Pod
from rljob.operator.planning import reasons
from rljob.operator.planning.container_exits import last_end, newest_end, with_last_line
from rljob.operator.planning.job_view import condition, pod_condition

SEVERITY = (
    reasons.PODS_NOT_READY,
    reasons.TRAINER_RESTARTING,
    reasons.PODS_PENDING,
    reasons.CRASH_LOOP,
    reasons.VOLUME_CLAIM_PENDING,
    reasons.PODS_FORBIDDEN,
    reasons.QUOTA_EXCEEDED,
    reasons.CONTAINER_CREATE_FAILED,
    reasons.IMAGE_PULL_FAILED,
)
"""Least severe first: from reasons that resolve themselves to reasons that a user must fix."""
_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_CONTAINER = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError", "StartError"}
)
_NODES = re.compile(
    r"^(?:\d+/\d+|all) nodes are (?:un)?available: (?P<why>.*?)\.?(?: (?:preemption|no new claims).*)?$", re.DOTALL
)
_REWORDED = {"were unschedulable": "nodes are cordoned"}
"""Message of the scheduler without its count → clearer text."""
_COUNT = re.compile(r"^\d+ (?:node\(s\) )?")
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(?:: )?')
_PULL = re.compile(
    r'^(?:ErrImagePull: )?(?:rpc error: code = \w+ desc = )?(?:failed to pull and unpack image "[^"]*": )?'
)
_FORBIDDEN = re.compile(r'^(?:Error creating: )?(?:.*?pods? "[^"]*" is forbidden: )?')
_NO_CLAIM = re.compile(r'persistentvolumeclaim "(?P<name>[^"]*)" not found')
_BAD_CLAIM = re.compile(
    r'persistentvolumeclaim "(?P<name>[^"]*)" (?P<why>is being deleted|bound to non-existent \w+ "[^"]*")'
)
_NO_CLASS = re.compile(r'storageclass\.storage\.k8s\.io "(?P<name>[^"]*)" not found')
ENDED = "ended"
"""State of pods that have ended."""
_UNBOUND = ("unbound immediate PersistentVolumeClaims", "didn't find available persistent volumes to bind")


@dataclass(frozen=True)
class PodProblem:
    """Why a pod, or all pods of a workload, are not ready. ``text`` follows "2 of 4 main pods pending: "."""

    reason: str
    state: str
    text: str
    image: str = ""

    @property
    def severity(self) -> int:
        """Higher is worse."""
        return SEVERITY.index(self.reason)


@dataclass(frozen=True)
class DiagnosisContext:
    """Context of a diagnosis. ``claims``: created for the job; ``named``: spec.storage.claim; ``warnings``: see
    :class:`rljob.operator.plan.Observed`."""

    claims: Sequence[Child] = ()
    named: str = ""
    warnings: Mapping[str, str] = field(default_factory=dict)


def key_of_claim(name: str) -> str:
    """Return the key of a claim that the operator did not create and never reads, in place of its uid."""
    return f"PersistentVolumeClaim/{name}"


def waits_for_claim(pod: Pod) -> bool:
    """Return whether a pod is unschedulable because a claim is not bound."""
    scheduled = pod_condition(pod, "PodScheduled")
    return scheduled is not None and scheduled.status == "False" and _is_unbound(scheduled.message)


def of_pod(pod: Pod, context: DiagnosisContext = DiagnosisContext()) -> PodProblem:
    """Return why a pod is not ready."""
    scheduled = pod_condition(pod, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return _unscheduled(scheduled.message, scheduled.reason, context)
    containers = [*pod.status.init_container_statuses, *pod.status.container_statuses]
    found = [pod_problem for container in containers if (pod_problem := _of_container(container)) is not None]
    if found:
        return max(found, key=lambda pod_problem: pod_problem.severity)
    if pod.status.phase == "Failed":
        end = newest_end([pod])
        return PodProblem(reasons.PODS_NOT_READY, ENDED, with_last_line(end) if end else "terminated by its node")
    if pod.status.phase == "Running":
        return PodProblem(reasons.PODS_NOT_READY, "not ready", "started, and not answering yet")
    if warning := context.warnings.get(pod.metadata.uid):
        return PodProblem(reasons.CONTAINER_CREATE_FAILED, "waiting", warning)
    return PodProblem(reasons.PODS_NOT_READY, "starting", "containers are being created")


def of_workload(child: Child, warnings: Mapping[str, str]) -> PodProblem | None:
    """Return why a workload lacks pods, from its status or its events; None if neither reports a reason."""
    failure = condition(child, "ReplicaFailure")
    message = str(failure.get("message", "")) if failure is not None else warnings.get(child.metadata.uid)
    return refusal(message) if message is not None else None


def refusal(message: str) -> PodProblem:
    """Return the problem for a refused creation of a pod."""
    text = _FORBIDDEN.sub("", message).strip()
    if "exceeded quota" in text:
        return PodProblem(reasons.QUOTA_EXCEEDED, "refused", text)
    return PodProblem(reasons.PODS_FORBIDDEN, "refused", text)


def _unscheduled(message: str, reason: str, context: DiagnosisContext) -> PodProblem:
    if reason == "SchedulingGated":
        return PodProblem(reasons.PODS_PENDING, "pending", "held by scheduling gates")
    missing = _NO_CLAIM.search(message)
    if missing:
        other = "create a new job with another spec.storage.claim"  # the field is immutable
        if missing["name"] != context.named:
            other = "correct the template that names it"
        text = f"claim {missing['name']} does not exist; create it, or {other}"
        return PodProblem(reasons.VOLUME_CLAIM_PENDING, "pending", text)
    if bad := _BAD_CLAIM.search(message):
        return PodProblem(reasons.VOLUME_CLAIM_PENDING, "pending", f"claim {bad['name']} {bad['why'].rstrip('.')}")
    if _is_unbound(message):
        return PodProblem(reasons.VOLUME_CLAIM_PENDING, "pending", _unbound(context))
    return PodProblem(reasons.PODS_PENDING, "pending", scheduling(message))


def scheduling(message: str) -> str:
    """Return the scheduler's message without its counts: "insufficient nvidia.com/gpu"."""
    if "no nodes available" in message or message.startswith("0/0 nodes"):
        return "there are no nodes"
    found = _NODES.match(message.strip())
    if found is None:
        return message.strip().rstrip(".") or "no node was found yet"
    causes = [_COUNT.sub("", part.strip()).rstrip(".") for part in re.split(r", (?=\d)", found["why"].split(". ")[0])]
    return ", ".join(sorted({_REWORDED.get(cause, cause[:1].lower() + cause[1:]) for cause in causes if cause}))


def _is_unbound(message: str) -> bool:
    return any(each in message for each in _UNBOUND)


def _unbound(context: DiagnosisContext) -> str:
    waiting = [claim for claim in context.claims if claim.body.get("status", {}).get("phase") != "Bound"]
    named = context.named
    if not waiting:
        claim_named = f"claim {named} (spec.storage.claim)" if named else "a claim of the pod's template"
        if named and (warning := context.warnings.get(key_of_claim(named))):
            return f"{claim_named} {_unbound_warning(warning)}"
        return f"{claim_named} is not bound: kubectl describe pvc {named}".rstrip() + " shows the reason"
    claim = waiting[0]
    spec, status = claim.body.get("spec", {}), claim.body.get("status", {})
    cause = next((str(each.get("message", "")) for each in status.get("conditions", ()) if each.get("message")), "")
    size = spec.get("resources", {}).get("requests", {}).get("storage", "?")
    modes = " ".join(spec.get("accessModes", ()))
    if status.get("phase") == "Lost":
        cause = "its volume is lost"
    elif not cause and (warning := context.warnings.get(claim.metadata.uid)):
        return f"claim {claim.metadata.name} {_unbound_warning(warning)}"
    elif not cause and not spec.get("storageClassName"):
        cause = (
            "the cluster has no default storage class; set the chart's jobs.storage.className, or create a new job "
            "with spec.storage.claim"
        )
    elif not cause:
        cause = (
            f"storage class {spec['storageClassName']} has not provisioned a volume of {size} with {modes} yet; check "
            "that the class exists and has capacity"
        )
    return f"claim {claim.metadata.name} is not bound: {cause}"


def _unbound_warning(warning: str) -> str:
    """Return the message for a warning event of a claim that is not bound."""
    if missing := _NO_CLASS.search(warning):
        fix = "create the class, or create the claim again with an existing one (kubectl get storageclass)"
        return f"requests StorageClass {missing['name']}, which does not exist; {fix}"
    return f"is not bound: {warning}"


def _of_container(container: ContainerStatus) -> PodProblem | None:
    waiting = container.state.waiting
    if waiting is None:
        return None
    if waiting.reason in _IMAGE:
        text = _PULL.sub("", _BACK_OFF.sub("", waiting.message)).strip() or waiting.reason
        return PodProblem(reasons.IMAGE_PULL_FAILED, "waiting for their image", text, container.image)
    if waiting.reason in _CONTAINER:
        return PodProblem(reasons.CONTAINER_CREATE_FAILED, "waiting", waiting.message or waiting.reason)
    if waiting.reason == "CrashLoopBackOff":
        end = last_end(container)
        where = "" if container.name == MAIN else f"container {container.name}: "
        return PodProblem(
            reasons.CRASH_LOOP, "crashing", where + (with_last_line(end) if end else "it exits repeatedly")
        )
    return None
