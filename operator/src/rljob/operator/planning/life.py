"""The life of a job: what one look at it leads to. See :func:`plan`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Sequence
from dataclasses import replace

from rljob.api.models import RLJob
from rljob.api.status import Attempt, RoleStatus
from rljob.manifests.inputs import Cluster
from rljob.operator.plan import Event, Observed, Plan, Ref
from rljob.operator.planning import (
    afterlife,
    budgets,
    claims,
    conditions,
    deadlines,
    initializer,
    readiness,
    reasons,
    roles,
    scale,
    suspension,
    trainer,
)
from rljob.operator.planning.draft import Draft
from rljob.operator.planning.initializer import INITIALIZER, Stage
from rljob.operator.planning.rendering import Render, render
from rljob.operator.planning.scene import KEPT, WORKLOADS, Scene, controller, look
from rljob.operator.planning.stuck import ASK_SECONDS, stuck
from rljob.operator.planning.times import remaining
from rljob.operator.planning.trainer import TRAINER, Verdict

RELEASE = importlib.metadata.version("rljob-operator")


def plan(observed: Observed, cluster: Cluster, render: Render = render) -> Plan:
    """Return what is to be done about a job, given all that is known of it.

    Pure: the same observation gives the same plan, and the observation that a plan leads to asks for nothing new.
    """
    job = observed.job
    if observed.metadata.deletion_timestamp is not None or (job is not None and job.spec.managed_by is not None):
        return Plan()
    observed = replace(observed, pods=[pod for pod in observed.pods if controller(pod) is not None])
    draft = Draft(observed, observed.status.model_copy())
    draft.status.observed_generation = observed.metadata.generation
    draft.status.release = RELEASE
    if afterlife.is_over(draft.status):
        afterlife.tidy(draft)
    elif job is None or observed.problems:
        _refuse(draft, observed.problems)
    else:
        _live(draft, job, cluster, render)
    draft.status.ready = roles.ready_counts(draft.status.roles)
    _keep_quiet(draft)
    draft.events += conditions.transitions(observed.status, draft.status)
    return draft.plan()


def _keep_quiet(draft: Draft) -> None:
    """Leave what is worth no write of its own to the next one: which Job the attempt has, as its pods come at once, and
    that they are late is written too. Until then a Job that was deleted is known by the pods it had."""
    before, after = draft.observed.status, draft.status
    if before.trainer is None or after.trainer is None or before.trainer.job_uid or not after.trainer.job_uid:
        return
    quiet = after.model_copy(update={"trainer": after.trainer.model_copy(update={"job_uid": ""})})
    if quiet == before:
        draft.status = quiet


def _refuse(draft: Draft, problems: Sequence[str]) -> None:
    """Say what is wrong with a spec; what runs is left alone."""
    message = "; ".join(problems) or "the spec is not valid"
    conditions.set_condition(draft, "Ready", False, reasons.INVALID_SPEC, message)


def _live(draft: Draft, job: RLJob, cluster: Cluster, render: Render) -> None:
    """Take a valid job that has not ended a step further."""
    observed, run = draft.observed, draft.status.run
    attempt = trainer.present(observed) or Attempt(started_at=draft.instant)
    try:
        scene = look(observed, job, cluster, attempt, render)
    except ValueError as error:
        _refuse(draft, str(error).splitlines())
        return
    if run is not None and run.state == "Succeeded":
        afterlife.end(draft, "Complete", reasons.SUCCEEDED, run.message or "the run has succeeded")
    elif run is not None and run.state == "Failed":
        afterlife.end(draft, "Failed", run.reason or reasons.RUN_FAILED, run.message or "the run has failed")
    elif job.spec.suspend:
        suspension.suspend(draft, scene)
    else:
        _work(draft, scene, cluster, render)


def _work(draft: Draft, scene: Scene, cluster: Cluster, render: Render) -> None:
    """Have the job's parts made and kept, unless something ends it."""
    observed, status, attempt = draft.observed, draft.status, scene.attempt
    if observed.claim_in_use:
        _wait_for_claim(draft)
        return
    resumed = suspension.is_suspended(status)
    if resumed:
        suspension.resume(draft)
    status.suspended_at = None
    retained, lost = claims.of_another_run(scene), claims.lost(scene)
    begun = observed.status.start_time is not None
    if not begun and not retained:
        status.start_time = draft.instant
    stage = initializer.stage(scene, status)
    conditions.set_condition(draft, "Initialized", stage.done, stage.reason, stage.message)
    deadlines.note_waiting(draft, scene)
    over = deadlines.overdue(draft, scene) or roles.fatal(scene)
    if over is None and stage.over:
        over = stage.reason, stage.message
    verdict = Verdict(attempt)
    if over is None and stage.done:
        verdict = _judge(draft, scene, resumed)
        over = verdict.over
    if over is not None:
        afterlife.end(draft, "Failed", *over)
        status.roles = _bury(status.roles, verdict)
        return
    draft.deletions.update(trainer.strays(observed, verdict.attempt.number))
    if verdict.attempt.number != attempt.number:
        scene = look(observed, scene.job, cluster, verdict.attempt, render)
        deadlines.note_waiting(draft, scene)
    _await_pods(draft, scene, stage)
    blocked = bool(observed.foreign or lost) or (bool(retained) and not begun)
    _make(draft, scene, stage, trainer.back_off_left(verdict.attempt, draft.now) <= 0, {*retained, *lost}, blocked)
    surveyed, lacks = roles.survey(scene, observed.status, "" if stage.done else "waits for the initializer")
    status.roles = _bury(surveyed, verdict)
    run = suspension.present_run(status)
    foreign = observed.foreign if begun else {**observed.foreign, **retained}
    found = readiness.of_job(stage, lacks, status.trainer, run, foreign, observed.refused)
    if troubled := {**claims.going(scene), **lost}:
        found = readiness.Readiness(False, reasons.CLAIM, troubled[min(troubled)])
    conditions.set_condition(draft, "Ready", found.ready, found.reason, found.message)


def _wait_for_claim(draft: Draft) -> None:
    """Begin nothing, not even the job's time, while another job uses its claim; nobody tells of that one's end."""
    message = draft.observed.claim_in_use
    if not conditions.is_true(draft.status, "Initialized"):
        conditions.set_condition(draft, "Initialized", False, reasons.CLAIM_IN_USE, message)
    conditions.set_condition(draft, "Ready", False, reasons.CLAIM_IN_USE, message)
    draft.look_again(ASK_SECONDS)


def _judge(draft: Draft, scene: Scene, resumed: bool) -> Verdict:
    """Decide on the trainer's attempt and note the decision."""
    status, role = draft.status, scene.role(TRAINER)
    assert role is not None, "every job has a trainer"
    recorded, attempt = status.trainer, scene.attempt
    if recorded is None and not attempt.role_hash and not attempt.job_uid:
        attempt = attempt.model_copy(update={"role_hash": role.hash})
    if resumed and recorded is not None:
        attempt = trainer.following(attempt, draft.now, role.hash)
    verdict = trainer.decide(draft.observed, attempt, role.hash, scene.job.spec.failure_policy)
    if verdict.over is None:
        status.trainer = verdict.attempt
        draft.look_again(verdict.look_again)
        if recorded is None or recorded.number != verdict.attempt.number:
            draft.record_first = True
        if verdict.ending is not None:
            draft.events.append(_restart_event(verdict))
    return verdict


def _restart_event(verdict: Verdict) -> Event:
    ending, attempt = verdict.ending, verdict.attempt
    assert ending is not None
    begins = f"begins at {attempt.not_before}" if attempt.not_before else "begins"
    message = f"attempt {attempt.number} of the trainer {begins}; attempt {attempt.number - 1} ended: {ending.why}"
    return Event("Normal" if ending.cost == "free" else "Warning", reasons.TRAINER_RESTARTED, message)


def _bury(statuses: list[RoleStatus], verdict: Verdict) -> list[RoleStatus]:
    """Count the death of the trainer's attempt."""
    ending = verdict.ending
    if ending is None or not ending.exit:
        return statuses
    return [
        role.model_copy(update={"restarts": role.restarts + (verdict.over is None), "last_exit": ending.exit})
        if role.name == TRAINER
        else role
        for role in statuses
    ]


def _await_pods(draft: Draft, scene: Scene, stage: Stage) -> None:
    """Have it looked at again when something is late, and while it stays so."""
    named = scene.job.spec.storage.claim or ""
    for left in stuck(draft.observed.pods, draft.observed.children, draft.now, named).values():
        draft.look_again(left if left > 0 else ASK_SECONDS)
    late = scene.workloads(TRAINER) if not scene.pods.get(TRAINER) else []
    if stage.lack is not None:
        late += scene.workloads(INITIALIZER)
    for child in late:
        draft.look_again(remaining(child.metadata.creation_timestamp, roles.LATE_SECONDS, draft.now))


def _make(
    draft: Draft, scene: Scene, stage: Stage, trainer_due: bool, withheld: Collection[Ref], blocked: bool
) -> None:
    """Say which objects shall be, and which no longer. ``withheld``: claims that are neither made nor changed.
    ``blocked``: nothing that has pods is started."""
    children, foreign = draft.observed.children, draft.observed.foreign
    again = (stage.remove.kind, stage.remove.metadata.name) if stage.remove is not None else None
    started = any(ref[0] in WORKLOADS for ref in children)
    held = scale.drain(draft, scene)
    rendered = set()
    for role in scene.roles:
        waits = role.desired > 0 and role.kind != INITIALIZER and not stage.done
        over = role.kind == INITIALIZER and stage.done
        for each in role.objects:
            ref = each["kind"], each["metadata"]["name"]
            rendered.add(ref)
            if not started and not over and (waits or ref[0] in WORKLOADS) and ref not in children:
                draft.needed.append(ref)
            if waits or over:
                continue
            if ref == again or ref in withheld:
                continue  # first the old one goes; what another run left is not touched
            if ref[0] in WORKLOADS and blocked and ref not in children and ref not in foreign:
                continue  # it would run on what belongs to another; what is foreign itself is asked for until it is had
            if role.kind == TRAINER and ref[0] == "Job" and not trainer_due:
                continue
            if ref[0] == "RLJobScale":
                each = scale.with_scale_status(scene, role, each)
                if ref not in children:
                    each = scale.with_replicas(each, scene.wanted[role.name])
            if ref[0] == "PodDisruptionBudget":
                each = budgets.with_room(draft, scene, role, each)
            draft.desired.append(scale.with_replicas(each, held.get(ref[1]) if ref[0] == "Deployment" else None))
    draft.delete(
        children[ref]
        for ref in sorted(children)
        if ref not in rendered
        and ref[0] not in KEPT
        and not (ref[0] == "Deployment" and ref[1] in held)
        and children[ref].metadata.deletion_timestamp is None
    )
    if stage.remove is not None:
        draft.delete([stage.remove])
