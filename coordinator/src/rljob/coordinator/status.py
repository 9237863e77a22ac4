"""The run's status as readers see it."""

from __future__ import annotations

from rljob.coordinator.run import Run
from rljob.protocol.status import (
    CheckpointStatus,
    Metric,
    PartStatus,
    PolicyStatus,
    Progress,
    Queue,
    RunStatus,
    State,
)


def status_of(run: Run) -> RunStatus:
    """Return the status of ``run`` now."""
    policy, steps = run.policy, run.spec.training.steps
    newest = policy.checkpoints[-1] if policy.checkpoints else -1
    reason, message = run.failure or ("", "")
    return RunStatus(
        state=_state(run),
        reason=reason,
        message=message or _waiting_for(run),
        incarnation=policy.incarnation,
        progress=Progress(run.version, steps, run.history.seconds, run.history.eta(run.version, steps)),
        policy=PolicyStatus(
            policy.published, policy.lineage, policy.digests.get((policy.lineage, policy.published), "")
        ),
        last_checkpoint=CheckpointStatus(newest, policy.checkpoint_path),
        queues=[Queue(name, value) for name, value in run.counts().items()],
        metrics=[Metric(name, value) for name, value in (run.history.metrics | run.history.watches.seconds()).items()],
        evaluations=list(run.evaluations.results),
        history=list(run.history.points),
        parts=_parts(run),
    )


def _state(run: Run) -> State:
    if run.failure is not None:
        return "Failed"
    if run.finished:
        return "Succeeded"
    if run.evaluations.running is not None and any(e.serving is not None for e in run.engines.connected()):
        return "Evaluating"
    if run.version >= run.spec.training.steps:
        return "Finishing"
    return "Running" if run.version > 0 or run.trajectories.generated_tokens > 0 else "Starting"


def _waiting_for(run: Run) -> str:
    missing = []
    if run.policy.trainer is None:
        missing.append("the trainer")
    if not run.engines.connected():
        missing.append("an engine")
    if run.trajectories.runners == 0:
        missing.append("a runner")
    return f"waiting for {' and '.join(missing)} to connect" if missing and not run.finished else ""


def _parts(run: Run) -> list[PartStatus]:
    parts = [PartStatus("agent", e.instance, e.state, e.restarts) for e in run.engines.connected()]
    if run.policy.trainer is not None:
        parts.append(PartStatus("trainer", run.policy.trainer.instance, run.policy.busy or "waiting"))
    return parts
