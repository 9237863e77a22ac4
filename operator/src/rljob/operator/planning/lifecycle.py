"""Plans the lifecycle of a job: the order of decisions in one plan. See :func:`plan`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rljob.api.job_status import Attempt, RoleStatus
from rljob.api.models import RLJob
from rljob.manifests.gang import GROUP
from rljob.manifests.inputs import Cluster, Flavor
from rljob.manifests.names import RAY_CLUSTER
from rljob.operator.object_kinds import ref_of
from rljob.operator.plan import INITIALIZER, TRAINER, Event, Observed, Plan, Ref
from rljob.operator.planning import (
    claims,
    completion,
    conditions,
    gang_placement,
    initializer_stage,
    kueue_admission,
    lost_nodes,
    ray_engine_state,
    ray_engines,
    readiness,
    reasons,
    replica_decision,
    role_status,
    scale,
    scale_status,
    starvation,
    suspension,
    trainer,
)
from rljob.operator.planning.initializer_stage import InitializerStage
from rljob.operator.planning.job_view import (
    RETAINED_KINDS,
    WORKLOADS,
    JobView,
    Render,
    controller,
    observe,
    render,
    workloads,
)
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.stalled import ASK_SECONDS, stalled
from rljob.operator.planning.timestamps import remaining
from rljob.operator.planning.trainer import AttemptDecision

WAITING = frozenset({reasons.STARTING, reasons.PODS_PENDING, reasons.PODS_NOT_READY, reasons.TRAINER_RESTARTING})
"""Reasons of Ready for which a gang without nodes is the cause."""
RELEASE = importlib.metadata.version("rljob-operator")


def plan(observed: Observed, cluster: Cluster, render: Render = render) -> Plan:
    """Return the plan for an observed job.

    Pure: the same observation gives the same plan, and planning again after its execution requests nothing new.
    """
    job = observed.job
    if observed.metadata.deletion_timestamp is not None or (job is not None and job.spec.managed_elsewhere):
        return Plan()
    observed = replace(observed, pods=[pod for pod in observed.pods if controller(pod) is not None])
    builder = PlanBuilder(observed, observed.status.model_copy())
    builder.status.observed_generation = observed.metadata.generation
    builder.status.release = RELEASE
    if completion.is_over(builder.status):
        completion.clean_up(builder)
    elif job is None or observed.problems:
        _reject_spec(builder, observed.problems)
    else:
        _advance(builder, job, cluster, render)
    conditions.set_stalled(builder)
    builder.status.ready = role_status.ready_counts(builder.status.roles)
    _skip_minor_update(builder)
    builder.events += conditions.transitions(observed.status, builder.status)
    return builder.plan()


def _skip_minor_update(builder: PlanBuilder) -> None:
    """Drop a status change that only records the uid of the attempt's Job; the next write includes the uid.

    The pods of the Job are created soon and change the status. Until then a deleted Job is recognized by its pods.
    """
    before, after = builder.observed.status, builder.status
    if before.trainer is None or after.trainer is None or before.trainer.job_uid or not after.trainer.job_uid:
        return
    without_uid = after.model_copy(update={"trainer": after.trainer.model_copy(update={"job_uid": ""})})
    if without_uid == before:
        builder.status = without_uid


def _reject_spec(builder: PlanBuilder, problems: Sequence[str]) -> None:
    """Report the errors of a spec; running pods are left unchanged, unless Kueue demands them."""
    stops = kueue_admission.stop_rejected(builder)
    message = "; ".join([*problems, *([stops] if stops else [])]) or "the spec is not valid"
    conditions.set_condition(builder, "Ready", False, reasons.INVALID_SPEC, message)


def _advance(builder: PlanBuilder, job: RLJob, cluster: Cluster, render: Render) -> None:
    """Plan for a valid job that has not ended."""
    observed, run = builder.observed, builder.status.run
    cluster = _with_recorded_gang(builder, cluster)
    attempt = trainer.current_attempt(observed) or Attempt(started_at=builder.instant)
    left = starvation.seconds_to_starvation(observed)
    if left is not None and starvation.has_elastic_engines(observed):
        builder.requeue_after(left)
    if run is not None and run.state == "Succeeded":
        completion.end(builder, "Complete", reasons.SUCCEEDED, run.message or "the run has succeeded")
        return
    if run is not None and run.state == "Failed":
        completion.end(builder, "Failed", run.reason or reasons.RUN_FAILED, run.message or "the run has failed")
        return
    unknown = ""
    flavors: Mapping[str, Flavor] = {}
    try:
        flavors = kueue_admission.flavors_of_roles(observed)
    except kueue_admission.MissingFlavorError as error:
        unknown = str(error)  # a job that stops does not need them
    try:
        view = observe(observed, job, cluster, attempt, render, flavors, left is not None and left <= 0)
    except ValueError as error:
        _reject_spec(builder, str(error).splitlines())
        return
    admission = kueue_admission.read(view) if view.gang == "kueue" else None
    if job.spec.suspend:
        suspension.suspend(builder, view)
    elif admission is not None and not admission.admitted and (admission.evicted or not observed.claim_in_use):
        kueue_admission.wait(builder, view, admission)
    elif unknown:
        conditions.set_condition(builder, "Ready", False, reasons.API_REJECTED, unknown)
        builder.requeue_after(ASK_SECONDS)
    else:
        _run_job(builder, view, cluster, render)


def _with_recorded_gang(builder: PlanBuilder, cluster: Cluster) -> Cluster:
    """Return the settings of the cluster with the gang provider of the job's pods, if there are any."""
    status = builder.status
    recorded = status.gang_provider
    if not recorded and status.start_time is not None and any(workloads(builder.observed)):
        recorded = "none"  # created by a release without gang providers
    return replace(cluster, gang=recorded) if recorded and recorded != cluster.gang else cluster


def _run_job(builder: PlanBuilder, view: JobView, cluster: Cluster, render: Render) -> None:
    """Select the objects of a job that is not suspended, unless the job ends."""
    observed, status, attempt = builder.observed, builder.status, view.attempt
    if observed.claim_in_use:
        _wait_for_claim(builder)
        return
    resumed = suspension.is_suspended(status)
    if resumed:
        suspension.resume(builder)
    status.suspended_at = status.evicted_at = None
    retained, lost = claims.of_another_run(view), claims.lost(view)
    begun = observed.status.start_time is not None
    if not begun and not retained:
        status.start_time = builder.instant
    status.gang_provider = view.gang
    stage = initializer_stage.stage(view, status)
    conditions.set_condition(builder, "Initialized", stage.done, stage.reason, stage.message)
    completion.record_pending(builder, view)
    over = completion.overdue(builder, view) or role_status.fatal(view)
    if over is None and stage.over:
        over = stage.reason, stage.message
    decision = AttemptDecision(attempt)
    if over is None and stage.done:
        decision = _decide_attempt(builder, view, resumed)
        over = decision.over
    if over is not None:
        completion.end(builder, "Failed", *over)
        status.roles = _count_exit(status.roles, decision)
        return
    builder.deletions.update(trainer.orphaned_jobs(observed, decision.attempt.number))
    lost_nodes.delete_lost_coordinator(builder)
    if decision.attempt.number != attempt.number:
        flavors = kueue_admission.flavors_of_roles(observed)
        view = observe(observed, view.job, cluster, decision.attempt, render, flavors, view.gives_back)
        completion.record_pending(builder, view)
    _requeue_for_late_pods(builder, view, stage)
    blocked = bool(observed.conflicts or lost) or (bool(retained) and not begun)
    _select_objects(
        builder, view, stage, trainer.back_off_left(decision.attempt, builder.now) <= 0, {*retained, *lost}, blocked
    )
    replica_decision.autoscale(builder, view)
    surveyed, problems = role_status.survey(view, observed.status, "" if stage.done else "waits for the initializer")
    status.roles = _count_exit(surveyed, decision)
    run = suspension.current_run(status)
    foreign = observed.conflicts if begun else {**observed.conflicts, **retained}
    found = readiness.of_job(stage, problems, status.trainer, run, foreign, observed.refused)
    if found.reason in WAITING and (message := gang_placement.waiting(view)):
        found = readiness.Readiness(False, reasons.GANG_PENDING, message)
    if view.gang == "kueue":
        kueue_admission.report_ready(builder, kueue_admission.read(view), not any(each.essential for each in problems))
    if claim_problems := {**claims.being_deleted(view), **lost}:
        found = readiness.Readiness(False, reasons.VOLUME_CLAIM_PENDING, claim_problems[min(claim_problems)])
    conditions.set_condition(builder, "Ready", found.ready, found.reason, found.message)


def _wait_for_claim(builder: PlanBuilder) -> None:
    """Start nothing, not even the active deadline, while another job uses the claim. Poll: no event reports its end."""
    message = builder.observed.claim_in_use
    if not conditions.is_true(builder.status, "Initialized"):
        conditions.set_condition(builder, "Initialized", False, reasons.CLAIM_IN_USE, message)
    conditions.set_condition(builder, "Ready", False, reasons.CLAIM_IN_USE, message)
    builder.requeue_after(ASK_SECONDS)


def _decide_attempt(builder: PlanBuilder, view: JobView, resumed: bool) -> AttemptDecision:
    """Decide about the trainer's attempt and record the decision."""
    status, role = builder.status, view.role(TRAINER)
    assert role is not None, "every job has a trainer"
    recorded, attempt = status.trainer, view.attempt
    if recorded is None and not attempt.role_hash and not attempt.job_uid:
        attempt = attempt.model_copy(update={"role_hash": role.hash})
    if resumed and recorded is not None:
        attempt = trainer.next_attempt(attempt, builder.now, role.hash)
    decision = trainer.decide(builder.observed, attempt, role.hash, view.job.spec.failure_policy)
    if decision.over is None:
        status.trainer = decision.attempt
        builder.requeue_after(decision.requeue_after)
        if recorded is None or recorded.number != decision.attempt.number:
            builder.record_first = True
        if decision.ending is not None:
            builder.events.append(_restart_event(decision))
    return decision


def _restart_event(decision: AttemptDecision) -> Event:
    ending, attempt = decision.ending, decision.attempt
    assert ending is not None
    begins = f"begins at {attempt.not_before}" if attempt.not_before else "begins"
    message = f"attempt {attempt.number} of the trainer {begins}; attempt {attempt.number - 1} ended: {ending.why}"
    return Event("Normal" if ending.cost == "free" else "Warning", reasons.TRAINER_RESTARTED, message)


def _count_exit(statuses: list[RoleStatus], decision: AttemptDecision) -> list[RoleStatus]:
    """Count the exit of the trainer's attempt."""
    ending = decision.ending
    if ending is None or not ending.exit:
        return statuses
    return [
        role.model_copy(update={"restarts": role.restarts + (decision.over is None), "last_exit": ending.exit})
        if role.name == TRAINER
        else role
        for role in statuses
    ]


def _requeue_for_late_pods(builder: PlanBuilder, view: JobView, stage: InitializerStage) -> None:
    """Reconcile again when an object becomes stalled, and repeatedly while it is."""
    builder.requeue_after(stage.requeue_after)
    named = view.job.spec.storage.claim or ""
    for left in stalled(builder.observed.pods, builder.observed.children, builder.now, named).values():
        builder.requeue_after(left if left > 0 else ASK_SECONDS)
    late = view.workloads(TRAINER) if not view.pods.get(TRAINER) else []
    late += ray_engine_state.clusters_without_pods(view)
    if stage.problem is not None:
        late += view.workloads(INITIALIZER)
    for child in late:
        builder.requeue_after(remaining(child.metadata.creation_timestamp, role_status.LATE_SECONDS, builder.now))


def _select_objects(
    builder: PlanBuilder,
    view: JobView,
    stage: InitializerStage,
    trainer_due: bool,
    withheld: Collection[Ref],
    blocked: bool,
) -> None:
    """Select the desired objects and the deletions. ``withheld``: claims that are neither created nor changed.
    ``blocked``: no workload is created."""
    children, foreign = builder.observed.children, builder.observed.foreign
    replaced = (stage.remove.kind, stage.remove.metadata.name) if stage.remove is not None else None
    started = any(ref[0] in WORKLOADS for ref in children)
    withheld = {*withheld, *gang_placement.withheld(builder, view)}
    trainer_due = trainer_due and not gang_placement.waits_for_engines(view)
    gang_placement.requeue(builder, view)
    gang_withheld = any(ref[0] == RAY_CLUSTER for ref in withheld)
    unneeded = ray_engines.leaving(builder, view) if stage.done else []
    heads = [each.head.metadata.name for each in unneeded if each.head is not None]
    held, draining = scale.drain(builder, view, heads)
    rendered = set()
    for role in view.roles:
        waits = (role.desired > 0 or role.kind == GROUP) and role.kind != INITIALIZER and not stage.done
        over = role.kind == INITIALIZER and stage.done
        for each in role.objects:
            ref = ref_of(each)
            rendered.add(ref)
            if not started and not over and (waits or ref[0] in WORKLOADS) and ref not in children:
                builder.needed.append(ref)
            if waits or over:
                continue
            if ref[0] == RAY_CLUSTER:
                continue  # ray_engines.select() chooses them and their names
            if ref == replaced or ref in withheld:
                continue  # the old Job is deleted first; the claim of another run is not changed
            if ref[0] in WORKLOADS and blocked and ref not in children and ref not in foreign:
                continue  # it would use objects of another owner; a workload with a foreign name is retried
            if role.kind == TRAINER and ref[0] == "Job" and not trainer_due:
                continue
            if ref[0] == "RLJobScale":
                each = scale_status.with_scale_status(view, role, each)
                if ref not in children:
                    each = scale.with_replicas(each, view.wanted[role.name])
            if ref[0] == "PodDisruptionBudget":
                each = scale.with_room(builder, view, role, each)
            if ref[0] == "Deployment":
                each = scale.with_replicas(each, held.get(ref[1]))
            if ref[0] == "Deployment" and role.kind == "rollout":
                each = scale.with_replicas(each, scale.before_placement(view, each))
            builder.desired.append(each)
    builder.delete(
        children[ref]
        for ref in sorted(children)
        if ref not in rendered
        and ref[0] not in {*RETAINED_KINDS, RAY_CLUSTER}
        and not (ref[0] == "Deployment" and ref[1] in held)
        and children[ref].metadata.deletion_timestamp is None
    )
    if stage.done:
        builder.desired += ray_engines.select(builder, view, unneeded, draining, blocked, gang_withheld)
    if stage.remove is not None:
        builder.delete([stage.remove])
