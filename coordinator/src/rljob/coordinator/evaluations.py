"""Evaluation on held-out problems: all answers of an evaluation come from one pinned policy version.

Evaluations run before the first step, after the last, and every ``evaluation.everySteps`` steps between. With
``shared`` engines, trainer and engines stay at the pinned version during the evaluation, so a restarted engine can
receive the same version again. ``dedicated`` engines keep the pinned version while training continues; if all engines
with that version are lost and the trainer has advanced, the evaluation is dropped and the next version is evaluated
instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rljob.api.job_status import EvaluationResult
from rljob.api.models import RLJobSpec
from rljob.coordinator.trajectory import Trajectory
from rljob.ledger.evaluation_results import evaluation_result
from rljob.ledger.states import Kind, State
from rljob.ledger.writer import LedgerWriter
from rljob.scheduling.groups import Sample, make_group

log = logging.getLogger(__name__)


class Evaluations:
    """The evaluations of one run: results, and the running evaluation."""

    def __init__(self, spec: RLJobSpec, ledger: LedgerWriter, add: Callable[[list[Trajectory]], None]) -> None:
        self._spec = spec
        self._ledger = ledger
        self._add = add
        self.results: list[EvaluationResult] = []
        self.dedicated = spec.evaluation is not None and spec.evaluation.engines == "dedicated"
        self.running: int | None = None  # version of the running evaluation
        self.dropped = -1  # the last version whose evaluation was dropped
        self._open: dict[str, Sample] = {}
        self._rewards: dict[str, dict[str, list[float | None]]] = {}
        """Task → group → rewards of its samples that ended; None: the sample failed."""
        self._failures: dict[str, str] = {}  # task → reason of its last failure

    def wanted(self, version: int) -> bool:
        """Return whether ``version`` must be evaluated and has no result yet."""
        evaluation = self._spec.evaluation
        if evaluation is None or any(result.version == version for result in self.results):
            return False
        if version <= self.dropped:
            return False
        edge = version in (0, self._spec.training.steps)
        owed = self.dropped > max((result.version for result in self.results), default=-1)
        return edge or owed or (evaluation.every_steps > 0 and version % evaluation.every_steps == 0)

    def start(self, version: int, held_out: Mapping[str, int]) -> None:
        """Admit evaluation.problems problems of each task; of a task in ``held_out`` at most that number of rows."""
        assert self._spec.evaluation is not None and self.running is None
        trajectories = []
        number = 0
        for task in self._spec.evaluation.tasks or []:
            problems = self._spec.evaluation.problems
            for row in range(min(problems, held_out.get(task, problems))):
                answers = self._spec.evaluation.samples_per_problem
                group = make_group(f"e{version}.{number}", number, task, row, answers)
                trajectories += [Trajectory(sample, task, row, version) for sample in group.samples]
                samples = [sample.id for sample in group.samples]
                self._ledger.admit_group(group.id, Kind.EVALUATION, number, task, row, version, samples, 0)
                number += 1
        self.resume(version, trajectories, [])

    def resume(self, version: int, open_: list[Trajectory], ended: list[tuple[str, str, float | None, str]]) -> None:
        """Start with open samples and ended ones: (task, group, reward, reason), failed ones in order of time; reward
        None: the sample failed."""
        assert self._spec.evaluation is not None
        self.running = version
        self._open = {trajectory.sample.id: trajectory.sample for trajectory in open_}
        self._rewards = {task: {} for task in self._spec.evaluation.tasks or []}
        self._failures = {}
        for task, group, reward, reason in ended:
            self._count(task, group, reward, reason)
        log.info("evaluating version %d: %d answers", version, len(open_))
        self._add(open_)
        self._finish_if_complete()

    def drop(self) -> list[str]:
        """Drop the running evaluation; return its open samples. The next version is evaluated instead."""
        assert self.running is not None
        reason = f"no engine has version {self.running} any more, and the trainer has advanced"
        log.warning(
            "the evaluation of version %d is dropped: %s; the next version is evaluated instead", self.running, reason
        )
        for sample in self._open.values():
            sample.end = "expired"
        self._ledger.record_dropped(self.running)
        self._ledger.end_samples(list(self._open), State.EXPIRED, reason)
        dropped, self._open = list(self._open), {}
        self.dropped, self.running = self.running, None
        return dropped

    def take(self, sample: Sample, reward: float | None, reason: str = "") -> None:
        """Record the reward of a sample; None: the sample failed for ``reason``, which counts as reward 0."""
        if self._open.pop(sample.id, None) is not None:
            sample.reward, sample.end = reward, "evaluated" if reward is not None else "failed"
            self._count(sample.group.task, sample.group.id, reward, reason)
            self._finish_if_complete()

    def _count(self, task: str, group: str, reward: float | None, reason: str) -> None:
        if reward is None:
            self._failures[task] = reason
        self._rewards[task].setdefault(group, []).append(reward)

    def _finish_if_complete(self) -> None:
        if self._open or self.running is None:
            return
        assert self._spec.evaluation is not None
        for task, rewards in self._rewards.items():
            failure = self._failures.get(task, "")
            result = evaluation_result(self.running, task, list(rewards.values()), self._spec.evaluation, failure)
            self.results.append(result)
            self._ledger.record_evaluation(result)
            log.info(
                "version %d: accuracy %.3f on %d problems of %s, %d answers failed",
                self.running, result.accuracy, result.problems, task, result.failed,
            )  # fmt: skip
        self.running = None

    @property
    def remaining(self) -> int:
        """Open samples of the running evaluation."""
        return len(self._open)
