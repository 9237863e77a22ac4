"""A whole run in virtual time: the production coordinator and runner, and simulated engines, rewards and trainer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rljob.api.algorithm_presets import model_pools
from rljob.api.models import RLJob
from rljob.coordinator.message_router import MessageRouter
from rljob.coordinator.recovery import recover
from rljob.coordinator.run import Run
from rljob.protocol.agent_protocol import Generate, RequestId
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.protocol.trainer_protocol import Train
from rljob.runner.driver import CAPACITY, RunnerDriver
from rljob.runner.group_filter import GroupFilter, Verdict
from rljob.runner.leased_trajectory import TaskRuntime
from rljob.runner.loops import Loop
from rljob.runner.loops.single_turn import single_turn
from rljob.runner.pools.leased_questions import NO_POOLS, PoolRuntime
from rljob.runner.pools.question import Question
from rljob.runner.prompts import Prompt
from rljob.simulation.memory_ledger import MemoryLedger
from rljob.simulation.memory_link import MemoryLink, MemoryServer, Observer, Traffic
from rljob.simulation.simulated_engine import ONE_TOKEN, EngineModel, SimulatedEngine, SimulationRecorder, Turn
from rljob.simulation.simulated_trainer import SimulatedTrainer
from rljob.simulation.virtual_time import StandstillError, run_in_virtual_time

STANDSTILL_SECONDS = 86_400.0
"""A day of virtual time in which no engine and no trainer does anything ends a simulation."""
WATCH_SECONDS = STANDSTILL_SECONDS / 24
"""Virtual time between two looks at what they did."""
COLLECTIONS = (100_000, 50, 50)
"""Thresholds of the garbage collector, as those of the coordinator's service: few objects of a run are in cycles."""


class SimulatedRunError(RuntimeError):
    """The run failed. ``reason``: one word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


SampleReward = Callable[[str], Awaitable[float]]
"""Returns the reward of a sample, after the time that its reward service takes."""


async def no_reward(sample: str) -> float:
    """Return 1 at once."""
    return 1.0


async def accept(rewards: list[float]) -> Verdict:
    """Accept a group at once."""
    return Verdict(True)


@dataclass(frozen=True)
class SimulatedCluster:
    """What the simulated processes do.

    ``engines``: one model for each engine, with the name of its pool. ``work``: of a request (see
    :mod:`rljob.simulation.simulated_engine`). ``train_seconds``: of a batch. ``sync_seconds``: of a weight update.
    ``loop``: of all tasks. ``filter``: of the tasks with a user-written group filter. ``runners``, ``capacity``: runner
    processes, and trajectories that each drives at a time. ``pools``: frozen pools; those of a reference or a teacher
    that are not among them give the log-probabilities 0 at once.
    """

    engines: list[tuple[str, EngineModel]]
    work: Callable[[Generate], float]
    train_seconds: Callable[[Train], float]
    sync_seconds: float = 0.0
    reward: SampleReward = no_reward
    loop: Loop = single_turn
    filter: GroupFilter = accept
    runners: int = 1
    capacity: int = CAPACITY
    pools: PoolRuntime = NO_POOLS


@dataclass
class Outcome:
    """What happened in a run; times in seconds of virtual time."""

    steps: list[float] = field(default_factory=list)  # end of each step
    ages: list[int] = field(default_factory=list)  # staleness of each trained sample
    trained: list[str] = field(default_factory=list)  # samples, in the order of batches
    train_seconds: float = 0.0
    update_seconds: float = 0.0  # of all engines
    busy_seconds: float = 0.0  # of all slots of all engines
    generated: list[float] = field(default_factory=list)  # units of work of all engines, until the end of each step
    events: int = 0  # messages, and requests that ended
    members_at_home: float = 1.0  # see rljob.scheduling.dispatch.Affinity.share
    turns_at_home: float = 1.0
    ends: Mapping[str, int] = field(default_factory=dict)


class _Record:
    """The recorder of a run: fills its :class:`Outcome`, and passes everything to a second recorder."""

    def __init__(self, outcome: Outcome, engines: list[SimulatedEngine], other: SimulationRecorder | None) -> None:
        self._outcome = outcome
        self._engines = engines
        self._other = other

    def generated(self, engine: str, slot: int, request: RequestId, start: float, end: float, work: float) -> None:
        outcome = self._outcome
        outcome.busy_seconds += end - start
        outcome.events += 1
        if self._other is not None:
            self._other.generated(engine, slot, request, start, end, work)

    def updated(self, engine: str, version: int, start: float, end: float) -> None:
        self._outcome.update_seconds += end - start
        if self._other is not None:
            self._other.updated(engine, version, start, end)

    def trained(self, batch: Train, start: float, end: float) -> None:
        outcome = self._outcome
        outcome.steps.append(end)
        outcome.generated.append(sum(engine.work_done() for engine in self._engines))
        outcome.train_seconds += end - start
        outcome.ages += [batch.step - sample.min_version for sample in batch.samples]
        outcome.trained += [sample.sample for sample in batch.samples]
        if self._other is not None:
            self._other.trained(batch, start, end)


ONE_TOKEN_PROMPT = Prompt({}, "", ONE_TOKEN)


class _OneTokenPrompts:
    """Prompts of one token."""

    async def prompt(self, task: str, split: str, row: int) -> Prompt:
        return ONE_TOKEN_PROMPT


class _OneTokenCodec:
    stop_token_ids: list[int] = []  # noqa: RUF012  (never changed)

    def encode(self, text: str, special: bool = True) -> bytes:
        return ONE_TOKEN

    def decode(self, token_ids: bytes) -> str:
        return ""


@dataclass(frozen=True)
class _SimulatedReward:
    reward: SampleReward
    token_ids = False

    async def score(self, item: ScoreItem) -> Score:
        return Score(item.sample, await self.reward(item.sample))


class _ZeroLogprobs:
    """A frozen pool of a reference or a teacher: gives each token the log-probability 0 at once."""

    async def answer(self, question: Question, seed: int, seconds: float | None) -> tuple[str, str]:
        return "", "stop"

    async def logprobs(self, token_ids: bytes) -> Sequence[float]:
        return [0.0] * (len(token_ids) // len(ONE_TOKEN))


class SimulatedRun:
    """One run.

    Args:
        job: resolved manifest.
        cluster: the processes around the coordinator.
        prepare: called with the run before it starts, for example to replace its policy.
        recorder: receives what engines and trainer do.
        observer: sees every frame of messages.
    """

    def __init__(
        self,
        job: RLJob,
        cluster: SimulatedCluster,
        prepare: Callable[[Run], None] | None = None,
        recorder: SimulationRecorder | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._prepare = prepare
        self.outcome = Outcome()
        self._engines: list[SimulatedEngine] = []
        self.left: dict[Turn, float] = {}
        """See :class:`SimulatedEngine`."""
        self.recorder: SimulationRecorder = _Record(self.outcome, self._engines, recorder)
        self.links: list[MemoryLink] = []
        """Of the engines, in order."""
        self.traffic = Traffic(observers=[] if observer is None else [observer])
        self.server = MemoryServer()

    async def run(self) -> Outcome:
        """Run to the end of the job on the current event loop.

        Raises:
            SimulatedRunError: the run failed.
        StandstillError: the run makes no progress.
        """
        loop, spec = asyncio.get_running_loop(), self._job.spec
        ledger = MemoryLedger()
        run = Run(spec, ledger, loop.time)
        if self._prepare is not None:
            self._prepare(run)
        self.server.router = MessageRouter(run)
        recover(run)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(ledger.run())]
        run.changed()
        self._connect()
        tasks += [asyncio.create_task(self._runner(i).run()) for i in range(self._cluster.runners)]
        tasks += [asyncio.create_task(self._watch()), asyncio.create_task(run.ended.wait())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if run.failure is not None:
            raise SimulatedRunError(*run.failure)
        self.outcome.events += self.traffic.messages
        self.outcome.ends = run.ends
        queue = run.trajectories.queue
        self.outcome.members_at_home, self.outcome.turns_at_home = queue.members.share, queue.turns.share
        ledger.close()
        return self.outcome

    async def _watch(self) -> None:
        """Raise StandstillError if engines and trainer do nothing for a day. Heartbeats never end by themselves."""
        loop, before, changed = asyncio.get_running_loop(), -1, 0.0
        while loop.time() - changed < STANDSTILL_SECONDS:
            now = self.outcome.events + len(self.outcome.steps)
            if now > before:
                before, changed = now, loop.time()
            await asyncio.sleep(WATCH_SECONDS)
        raise StandstillError(f"no engine and no trainer did anything for {STANDSTILL_SECONDS:g} s of virtual time")

    def _connect(self) -> None:
        cluster, lengths = self._cluster, {pool.name: pool.max_model_length for pool in self._job.spec.rollouts}
        trainer = SimulatedTrainer(cluster.train_seconds, cluster.sync_seconds, self.recorder)
        trainer.connect(self.server, self.traffic)
        for i, (pool, model) in enumerate(cluster.engines):
            engine = SimulatedEngine(
                f"engine-{i:04d}",
                pool,
                model,
                lengths[pool],
                cluster.work,
                cluster.sync_seconds,
                self.recorder,
                self.left,
            )
            self._engines.append(engine)
            self.links.append(engine.connect(self.server, self.traffic))

    def _runner(self, number: int) -> RunnerDriver:
        cluster, name = self._cluster, f"runner-{number}"
        stall_seconds = self._job.spec.failure_policy.stall_seconds
        reward, length = _SimulatedReward(cluster.reward), min(p.max_model_length for p in self._job.spec.rollouts)
        runtimes = {
            task.name: TaskRuntime(
                task,
                cluster.loop,
                reward,
                length,
                task.sampling.temperature,
                stall_seconds,
                pools=self._pools(task.name),
            )
            for task in self._job.spec.tasks
        }
        return RunnerDriver(
            name,
            lambda register: MemoryLink(self.server, "runner", name, register, self.traffic),
            runtimes,
            _OneTokenPrompts(),
            _OneTokenCodec(),
            {},
            {task.name: cluster.filter for task in self._job.spec.tasks if task.group_filter.function is not None},
            cluster.capacity,
        )

    def _pools(self, task: str) -> PoolRuntime:
        """Return the frozen pools, with the roles of those that give log-probabilities of samples of ``task``."""
        pools, roles = self._cluster.pools, model_pools(self._job.spec.algorithm, task)
        return replace(pools, frozen={**dict.fromkeys(roles.values(), _ZeroLogprobs()), **pools.frozen}, roles=roles)


def simulate(
    job: RLJob,
    cluster: SimulatedCluster,
    prepare: Callable[[Run], None] | None = None,
    recorder: SimulationRecorder | None = None,
    observer: Observer | None = None,
) -> Outcome:
    """Simulate a run in virtual time; arguments as for :class:`SimulatedRun`."""
    with few_collections():
        return run_in_virtual_time(SimulatedRun(job, cluster, prepare, recorder, observer).run())


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage at the thresholds of the coordinator's service."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
