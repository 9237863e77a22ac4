"""The load of the roles that can be scaled, for `status.run.loads` and the metric `rljob_role_load`.

The built-in autoscaler of the operator, a HorizontalPodAutoscaler and KEDA divide the load of a role by its target per
pod; for a pool of engines the target is 1.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rljob.api.job_status import RoleLoad
from rljob.api.roles import Rollout
from rljob.coordinator.engine_demand import Counters, EngineDemand
from rljob.coordinator.engines import EngineRecord
from rljob.coordinator.trajectory import Trajectory
from rljob.manifests.names import role_name

if TYPE_CHECKING:
    from rljob.coordinator.run import Run

UPDATE_SECONDS = 1.0


class RoleLoads:
    """The load of every role of a run. ``update`` is called at every change of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._updated = (-1, float("-inf"))
        self._pools = {pool.name: EngineDemand() for pool in run.spec.policy_pools if pool.purpose == "training"}

    def update(self) -> None:
        """Measure the pools that train: at the start of a step, and at most every UPDATE_SECONDS."""
        run = self._run
        version, at = self._updated
        if run.version == version and run.progress.seconds - at < UPDATE_SECONDS:
            return
        self._updated = run.version, run.progress.seconds
        trains = run.trainer.session.connection is not None and not run.over and not run.suspending
        for name, demand in self._pools.items():
            demand.update(len(self._serving(name)), self._counters(name) if trains else None)

    def all(self) -> list[RoleLoad]:
        """Return the load of every role that has one now."""
        self.update()
        loads = [RoleLoad(name, float(count)) for name, count in self._in_flight().items()]
        for pool in self._run.spec.policy_pools:
            needed = self._needed(pool)
            if needed is not None:
                loads.append(RoleLoad(role_name("rollout", pool.name), round(needed, 1)))
        return loads

    def _in_flight(self) -> Counter[str]:
        """Return role → samples or episodes of runner, rewards and environments.

        A sample of a task that selects the reward by its row counts for every reward. One of a task with an environment
        and a reward also counts for the reward while the environment acts.
        """
        spec, open_samples = self._run.spec, self._run.trajectories.by_sample.values()
        found = Counter(dict.fromkeys(self._names(), 0))
        found["runner"] = len(open_samples)
        rewards = {
            task.name: [reward.name for reward in spec.rewards] if task.reward_column else task.named_rewards
            for task in spec.tasks
        }
        environments = {task.name: task.environment.name for task in spec.tasks if task.environment is not None}
        for trajectory in open_samples:
            if trajectory.runner is None:
                continue
            if trajectory.task in environments:
                found[role_name("environment", environments[trajectory.task])] += 1
            if _awaits_score(trajectory):
                found.update(role_name("reward", name) for name in rewards[trajectory.task])
        return found

    def _names(self) -> list[str]:
        spec = self._run.spec
        rewards = [role_name("reward", reward.name) for reward in spec.rewards]
        return ["runner", *rewards, *(role_name("environment", each.name) for each in spec.environments)]

    def _needed(self, pool: Rollout) -> float | None:
        """Return the engines that a pool needs. Those for evaluation need as many as hold all of its answers."""
        if pool.purpose == "evaluation":
            return float(self._run.evaluations.remaining) / pool.max_concurrency
        return self._pools[pool.name].needed

    def _serving(self, pool: str) -> list[EngineRecord]:
        """Return the engines of a pool that started, without those that are about to be removed."""
        run = self._run
        connected = [engine for engine in run.engines.connected() if engine.pool == pool]
        return [engine for engine in connected if engine.state != "starting" and not run.draining.drains(engine)]

    def _counters(self, pool: str) -> Counters:
        progress, run = self._run.progress, self._run
        accounts = [account for account in progress.engines.accounts if account.pool == pool]
        seconds = progress.engines.seconds(accounts)
        waiting = progress.watches.seconds()["seconds_trainer_waiting"]
        return Counters(progress.seconds, run.version, waiting, seconds["generating"], seconds["waiting"])


def _awaits_score(trajectory: Trajectory) -> bool:
    """Return whether the answer of a sample is complete and has no score."""
    turns = trajectory.turns
    return not trajectory.requests and bool(turns) and all(turn.finished for turn in turns.values())
