"""The run's status as readers see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rljob.api.job_status import (
    LONGEST_REASON,
    METRIC_NAME_LENGTH,
    CheckpointStatus,
    EndedSamples,
    EngineStatus,
    EvaluationResult,
    Metric,
    PolicyStatus,
    Progress,
    Queue,
    State,
)
from rljob.api.text_escape import escape_block, short_line
from rljob.coordinator.awaited_sample import awaited_sample
from rljob.coordinator.connection import Connection
from rljob.coordinator.run import Run
from rljob.coordinator.sample_outcomes import TOO_MANY_FAILED
from rljob.coordinator.weight_publisher import TrainerSession
from rljob.protocol.agent_protocol import EngineCrashed
from rljob.protocol.run_status import ComponentStatus, HistoryPoint, RunStatus

MOST_POINTS = 512
"""Of the history that the status carries; metrics.jsonl has every step."""


def status_of(run: Run) -> RunStatus:
    """Return the status of ``run`` now."""
    trainer, weights, steps = run.trainer, run.weights, run.spec.training.steps
    checkpoints = trainer.checkpoints
    reason, message = run.failure or ("", "")
    return RunStatus(
        state=state_of(run),
        reason=reason,
        message=escape_block(message or _waiting_for(run)),
        incarnation=trainer.session.incarnation,
        progress=Progress(
            step=run.version,
            steps=steps,
            text=_share(run.version, steps),
            seconds=run.progress.seconds,
            eta_seconds=run.progress.eta(run.version, steps),
        ),
        policy=PolicyStatus(
            weights.published, weights.lineage, weights.digests.get((weights.lineage, weights.published), "")
        ),
        last_checkpoint=CheckpointStatus(checkpoints.newest or -1, checkpoints.newest_path),
        warnings=[escape_block(warning) for warning in run.warnings],
        earlier_warnings=run.earlier_warnings,
        queues=[Queue(name, max(0, value)) for name, value in run.counts().items()],
        ended=_ended(run),
        staleness=_staleness(run.progress.last_step),
        engines=_engines(run),
        loads=run.loads.all(),
        observed_generation=run.observed_generation,
        metrics=[Metric(name, value) for name, value in _metrics(run).items()],
        evaluations=_evaluations(run),
        history=thinned(run.progress.points),
        components=_component_statuses(run),
        events=run.progress.event_counts(),
    )


def without_reasons(status: RunStatus) -> RunStatus:
    """Return ``status`` without the reasons of failed samples: text of rewards, which may quote prompts and answers."""
    ended = dataclasses.replace(status.ended, last_failure="")
    evaluations = [dataclasses.replace(result, failure="") for result in status.evaluations]
    message = "" if status.reason == TOO_MANY_FAILED else status.message
    return dataclasses.replace(status, message=message, ended=ended, evaluations=evaluations)


def _ended(run: Run) -> EndedSamples:
    ends = run.ends
    return EndedSamples(
        trained=ends["trained"],
        baseline=ends["baseline"],
        filtered=ends["filtered"],
        surplus=ends["surplus"],
        expired=ends["expired"],
        failed=ends["failed"],
        last_failure=_reason(run.last_failure),
    )


def _evaluations(run: Run) -> list[EvaluationResult]:
    return [dataclasses.replace(result, failure=_reason(result.failure)) for result in run.evaluations.results]


def _reason(text: str) -> str:
    """Return the reason of a failed sample as one line of bounded length. It may contain text of models and rewards."""
    return short_line(text, LONGEST_REASON)


def _metrics(run: Run) -> dict[str, float]:
    """Return the metrics of the status. Longer names, which a status does not permit, are only in metrics.jsonl. Those
    of the trainer are last: a cluster has only the first ones."""
    progress = run.progress
    metrics = progress.summary() | progress.watches.seconds() | progress.engine_seconds()
    if run.over and progress.points:
        metrics["tokens_per_second"] = progress.tokens_per_second(len(progress.points))  # of the whole run
    permitted = [(name, value) for name, value in metrics.items() if len(name) <= METRIC_NAME_LENGTH]
    return dict(sorted(permitted, key=lambda metric: metric[0].startswith("trainer/")))


def thinned(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    """Return at most MOST_POINTS of ``points``: every 2^n-th, so that points stay as the run grows, and the
    newest."""
    stride = 1
    while len(points) > stride * (MOST_POINTS - 1):
        stride *= 2
    kept = list(points[::stride])
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]


def _share(step: int, steps: int) -> str:
    return f"{step}/{steps} {100 * step // steps}%" if steps else f"{step}/{steps}"


def _staleness(metrics: Mapping[str, float]) -> str:
    return f"{metrics['staleness/mean']:.1f}/{metrics['staleness/max']:.0f}" if metrics else ""


def _engines(run: Run) -> list[EngineStatus]:
    """Return the engines by name: of a pod whose agent has just connected again there may be two for a moment."""
    by_name: dict[str, EngineStatus] = {}
    for engine in run.engines.connected():
        shown = EngineStatus(engine.name, len(engine.requests), run.draining.drained(engine))
        other = by_name.get(engine.name)
        if other is not None:
            shown = EngineStatus(engine.name, shown.load + other.load, shown.drained and other.drained)
        by_name[engine.name] = shown
    return list(by_name.values())


def final_state(run: Run) -> State:
    """Return the state of ``run`` after its end."""
    if run.failure is not None:
        return "Failed"
    return "Succeeded" if run.finished else "Suspended"


def state_of(run: Run) -> State:
    """Return where ``run`` is."""
    if run.failure is not None or run.ended.is_set():  # not finished: a client that reads the end may stop processes
        return final_state(run)
    beside = run.evaluations.dedicated and run.version < run.spec.training.steps
    ready = any(engine.serving is not None for engine in run.engines.connected())
    if run.evaluations.running is not None and ready and not beside:
        return "Evaluating"
    if run.version >= run.spec.training.steps and (run.version > 0 or ready):
        return "Finishing"
    return "Running" if run.version > 0 or run.trajectories.generated_tokens > 0 else "Starting"


def _waiting_for(run: Run) -> str:
    if run.over:
        return ""
    session = run.trainer.session
    if session.blocked:
        return f"the trainer waits: {session.blocked}"
    if run.suspending:
        return "suspending: the trainer finishes its batch and writes a checkpoint"
    missing = []
    if session.connection is None:
        missing.append("the trainer")
    if not run.engines.connected():
        missing.append("an engine")
    elif run.evaluations.dedicated and run.must_hold_version and not any(e.evaluates for e in run.engines.connected()):
        missing.append("an engine for evaluation")
    if not run.trajectories.runners:
        missing.append("a runner")
    if not missing:
        return awaited_sample(run)
    crashes = [f"; pool {crash.pool}: {crash.reason}" for crash in run.engines.crashed.values() if crash.starting]
    return f"waiting for {' and '.join(missing)} to connect{''.join(crashes[:1])}"


def _component_statuses(run: Run) -> list[ComponentStatus]:
    crashed = dict(run.engines.crashed)
    components = []
    for engine in run.engines.connected():
        crash = crashed.pop(engine.connection, None) if engine.connection is not None else None
        reason, state = (crash.reason, _crashed_state(crash, engine.state)) if crash is not None else ("", engine.state)
        held = (engine.running, engine.waiting)
        if silent := engine.silent_seconds(run.now):
            reason, state = f"its agent has been silent for {silent:.0f} s; it gets no requests", "silent"
        spent = run.progress.engines.of(engine)
        components.append(ComponentStatus("agent", engine.instance, state, engine.restarts, reason, *held, spent))
    components += [
        ComponentStatus("agent", crash.pool, _crashed_state(crash, "starting"), crash.restarts, crash.reason)
        for crash in crashed.values()
    ]
    if run.trainer.session.connection is not None:
        components.append(_trainer(run.trainer.session, run.trainer.session.connection, run.version))
    components += [ComponentStatus("runner", runner.instance, "connected") for runner in run.trajectories.runners]
    return components


def _crashed_state(crash: EngineCrashed, state: str) -> str:
    return "failed" if crash.final else state


def _trainer(session: TrainerSession, connection: Connection, version: int) -> ComponentStatus:
    message = session.blocked
    if not message and session.step < version:
        message = f"repeating the steps after its checkpoint: step {session.step} of {version}"
    return ComponentStatus(
        "trainer", connection.instance, session.busy or "waiting", max(0, session.incarnation - 1), message
    )
