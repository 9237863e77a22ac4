"""Decisions of user-written filters about groups: asked from runners, recorded, and applied to the scheduler.

``Scheduler.deciding`` has the groups that need a decision. :meth:`GroupDecisions.advance` sends each to a runner, so a
group that a restarted coordinator finds there is sent again. A runner's answer counts once, and only if it repeats the
number of the newest question about its group.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rljob.coordinator.connection import Connection
from rljob.protocol import runner_protocol as m
from rljob.scheduling.groups import Group

if TYPE_CHECKING:
    from rljob.coordinator.run import Run

GRACE_SECONDS = 60.0
"""Time beyond failurePolicy.stallSeconds, after which the runner itself reports a function that hangs. Longer than the
coordinator needs to notice a half-open connection."""
MOST_LOST = 3
"""Runners that may be lost while they call the function for a group. Then the group fails: it may have ended them."""


@dataclass(eq=False)
class OpenDecision:
    """A question about a group. ``runner``: who was asked last; None: it is lost. ``since``: time of the question."""

    group: Group
    number: int
    runner: Connection | None
    since: float

    @property
    def message(self) -> m.FilterGroup:
        """The question. The survivors of a deciding group do not change."""
        rewards = [sample.reward for sample in self.group.scored if sample.reward is not None]
        return m.FilterGroup(self.group.id, self.group.task, self.number, rewards)


class GroupDecisions:
    """The open decisions of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._open: dict[str, OpenDecision] = {}  # by group
        self._answered: dict[tuple[Connection, str], float] = {}
        """(Runner, task) → time of the last answer: a runner calls the function of a task for one group at a time."""
        self._lost: Counter[str] = Counter()  # group → runners that were lost while they called its function

    def advance(self) -> None:
        """Ask about the groups that wait for a decision; forget those that ended meanwhile."""
        deciding = self._run.scheduler.deciding
        if not deciding and not self._open:
            return
        for name in [name for name in self._open if name not in deciding]:
            del self._lost[name]
            self._forget(self._open.pop(name))
        new = [g for g in deciding.values() if g.id not in self._open or self._open[g.id].runner is None]
        runners = self._run.trajectories.runners
        if not new or not runners:
            return
        asked = Counter(decision.runner for decision in self._open.values())
        for group in new:
            runner = min(runners, key=lambda runner: asked[runner])
            asked[runner] += 1
            decision = OpenDecision(group, self._run.trajectories.next_number(), runner, self._run.now)
            self._open[group.id] = decision
            self._send(decision)
            self._watch(decision, self._limit)

    def register(self, connection: Connection) -> None:
        """Ask a runner that connected again what it was asked before, except about groups that ended meanwhile: a
        finished run does not forget their questions."""
        deciding = self._run.scheduler.deciding
        for decision in [decision for name, decision in self._open.items() if name in deciding]:
            runner = decision.runner
            if runner is not None and runner is not connection and runner.instance == connection.instance:
                decision.runner, decision.since = connection, self._run.now
                self._send(decision)

    def lose(self, connection: Connection) -> None:
        """Remove a runner; others are asked what it was asked, but not about a group that MOST_LOST runners were lost
        with."""
        self._answered = {key: time for key, time in self._answered.items() if key[0] is not connection}
        asked = [decision for decision in self._open.values() if decision.runner is connection]
        called = {decision.group.task: decision for decision in reversed(asked)}  # of each task the first one
        for decision in asked:
            decision.runner = None
        for decision in called.values():
            self._lost[decision.group.id] += 1
            if self._lost[decision.group.id] >= MOST_LOST and not self._run.over:
                lost = f"{MOST_LOST} runners were lost while it decided about the group; it must not end its process"
                self._fail(decision, lost)
        self._run.changed()

    def answer(self, connection: Connection, message: m.GroupFiltered) -> None:
        """Apply and acknowledge an answer. One that is repeated, or from a runner that was asked earlier, is only
        acknowledged."""
        decision = self._open.get(message.group)
        if decision is not None and decision.number == message.number and decision.runner is connection:
            self._answered[connection, decision.group.task] = self._run.now
            self._decide(decision, message.accepted, message.reason)
        self._run.ledger.then(connection.send, m.AckGroups([message.number]))

    def waiting(self, group: Group) -> tuple[float, Connection | None]:
        """Return for how many seconds a group has waited for its decision since it was asked for, and the runner."""
        decision = self._open.get(group.id)
        return (0.0, None) if decision is None else (self._run.now - decision.since, decision.runner)

    def _fail(self, decision: OpenDecision, reason: str) -> None:
        group = decision.group
        function = f"tasks[{group.task}].groupFilter.function {self._run.scheduler.function(group)}"
        self._decide(decision, False, f"{function}: {reason}")

    def _decide(self, decision: OpenDecision, accepted: bool, reason: str) -> None:
        del self._open[decision.group.id], self._lost[decision.group.id]
        if decision.group.id in self._run.scheduler.deciding:
            self._run.outcomes.decided(decision.group, accepted, reason)

    def _send(self, decision: OpenDecision) -> None:
        runner, message = decision.runner, decision.message
        assert runner is not None, "a question has a runner"
        self._run.ledger.then(runner.send, message)  # the rewards are durable first

    def _forget(self, decision: OpenDecision) -> None:
        if decision.runner is not None:
            decision.runner.send(m.AckGroups([decision.number]))

    # --- deadline ---

    @property
    def _limit(self) -> float:
        return self._run.spec.failure_policy.stall_seconds + GRACE_SECONDS

    def _watch(self, decision: OpenDecision, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._check, decision)

    def _check(self, decision: OpenDecision) -> None:
        """Fail a group about which a connected runner has not answered in time."""
        runner, group = decision.runner, decision.group
        if self._run.over or runner is None or self._open.get(group.id) is not decision:
            return
        with self._run.fail_run_on_error():
            begun = max(decision.since, self._answered.get((runner, group.task), decision.since))
            left = begun + self._limit - self._run.now
            if not runner.open or left > 0:
                self._watch(decision, max(left, 1.0))
                return
            self._forget(decision)
            self._fail(decision, f"runner {runner.instance} sent no decision for {self._limit:g} s")
