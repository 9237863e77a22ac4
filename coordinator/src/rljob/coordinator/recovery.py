"""Restores a run from its ledger. Called once, before any peer connects."""

from __future__ import annotations

import logging
from collections import Counter
from typing import cast

from rljob.api.job_status import MOST_WARNINGS
from rljob.coordinator.event_counts import EVENTS
from rljob.coordinator.progress import ENGINE_SECONDS
from rljob.coordinator.run import Run
from rljob.coordinator.trajectory import Trajectory
from rljob.ledger import queries
from rljob.ledger.queries import GroupRecord, SampleRecord
from rljob.ledger.recorded_lengths import cut_answers, scored_groups, scored_lengths
from rljob.ledger.sample_numbers import sample_number
from rljob.ledger.states import OPEN
from rljob.ledger.step_metrics import recorded_steps
from rljob.ledger.writer import LedgerWriter
from rljob.scheduling.groups import End, Group, Sample
from rljob.scheduling.mixture import Mixture, TaskShare

log = logging.getLogger(__name__)


def recover(run: Run) -> None:
    """Restore the state of ``run`` from its ledger. A new run keeps its initial state."""
    run.ledger.restore()
    version = queries.version_of(run.ledger)
    _recover_trainer(run)
    _recover_scheduler(run, version)
    _recover_evaluations(run)
    _recover_progress(run)
    if queries.is_finished(run.ledger) and version >= run.spec.training.steps:
        run.finished = True
        run.progress.end()
        run.on_finished()
    log.info("ledger: version %d, lineage %d, %d groups open", version, run.weights.lineage, len(run.scheduler.groups))


def _recover_trainer(run: Run) -> None:
    record = queries.trainer_record(run.ledger)
    run.trainer.restore(record)
    run.weights.restore(record)
    run.trajectories.restore(record.starts + 1)
    run.warnings, run.earlier_warnings = queries.warnings(run.ledger, MOST_WARNINGS)
    run.ledger.record_start(record.starts + 1)


def _recover_scheduler(run: Run, version: int) -> None:
    scheduler, admitted = run.scheduler, queries.admissions(run.ledger)
    shares = {task: TaskShare(**vars(record)) for task, record in queries.mixture(run.ledger).items()}
    mixture = Mixture({task.name: task.weight for task in run.spec.tasks}, shares)
    waiting, trajectories = [], []
    for record in queries.open_groups(run.ledger):
        group = _group(record, scheduler.settings.greedy)
        steps = {sample.step for sample in record.samples if sample.state == "batched"} - {None}
        if steps:
            group.step = steps.pop()
            assert group.step is not None
            group.complete = True
            scheduler.batches.setdefault(group.step, []).append(group)
            continue
        waiting.append(group)
        for sample, row in zip(group.samples, record.samples, strict=True):
            if sample.open:
                trajectories.append(_trajectory(run.ledger, sample, row))
    run.ends.update(admitted.ends)
    run.last_failure = admitted.last_failure
    decisions = queries.decisions_of_open_groups(run.ledger)
    accepted = {group for group, decision in decisions.items() if decision.accepted}
    scheduler.restore(mixture, version, admitted.batched + len(waiting), admitted.groups, waiting, accepted)
    for group in [group for group in waiting if group.id in scheduler.deciding and group.id in decisions]:
        run.end_samples(scheduler.decide(group, False, decisions[group.id].reason))
    run.trajectories.add(trajectories)


def _recover_evaluations(run: Run) -> None:
    run.evaluations.results += queries.evaluation_results(run.ledger)
    run.evaluations.dropped = queries.last_dropped_evaluation(run.ledger)
    evaluation = queries.open_evaluation(run.ledger)
    if evaluation is None:
        return
    open_ = [
        _trajectory(run.ledger, sample, row, evaluation.version)
        for group in evaluation.groups
        for sample, row in zip(_group(group).samples, group.samples, strict=True)
        if sample.open
    ]
    run.evaluations.resume(evaluation.version, open_, evaluation.ended)


def _recover_progress(run: Run) -> None:
    before: Counter[str] = Counter()
    for step, metrics in recorded_steps(run.ledger.query):
        run.progress.add(step, metrics)
        run.earlier.add(step, metrics)
        before.update({name: value for name, value in metrics.items() if name.startswith((ENGINE_SECONDS, EVENTS))})
    run.progress.before = dict(before)
    query, greedy = run.ledger.query, run.scheduler.settings.greedy
    run.lengths.restore(scored_lengths(query, greedy), scored_groups(query, greedy), cut_answers(query, greedy))
    if run.progress.points:
        run.progress.seconds_before = run.progress.points[-1].seconds


def _group(record: GroupRecord, greedy: bool = False) -> Group:
    group = Group(
        record.id,
        record.seq,
        record.task,
        record.row,
        restarts=record.restarts,
        dispatched=record.dispatched,
        greedy=greedy,
    )
    for row in record.samples:
        sample = Sample(row.id, group, row.member, row.min_version, row.reward)
        if row.state not in OPEN:
            sample.end = cast(End, row.state.value)
        group.samples.append(sample)
    return group


def _trajectory(ledger: LedgerWriter, sample: Sample, row: SampleRecord, version: int | None = None) -> Trajectory:
    """Return the trajectory of an open sample, with the turns of its completions. ``version``: pinned policy
    version."""
    result = Trajectory(sample, sample.group.task, sample.group.row, version, row.attempt)
    result.recorded_version, result.dispatched_before = row.min_version, row.dispatched
    result.bound_version()
    progress = ledger.progress.get(sample_number(sample.id))
    for record in queries.payload_records(ledger, progress.numbers if progress else [], row.attempt):
        key = (record.turn, record.branch)
        turn = result.turns.get(key)
        if turn is None:
            turn = result.add_turn(key, record.given)
            turn.context = record.context
        result.branches[record.branch].append(record.token_ids)
        turn.token_ids += record.token_ids
        turn.finish = record.finish
        turn.completions += 1
    for answer in queries.answers(ledger, sample.id, row.attempt):
        result.answers[answer.branch, answer.question, answer.number] = answer
    return result
