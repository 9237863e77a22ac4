"""Random schedules of faults in virtual time: the production coordinator and runner, 16 engines and two runners.

Each example draws a job, the latency of every frame, doubled and exchanged messages, and faults of all kinds at random
times. The properties hold for all of them: every sample ends once, every batch is trained once in each lineage, no
sample is older than the bound, nothing starves, and the same schedule gives the same events again.

`make test` runs a few examples. RLJOB_THOROUGH=1 runs 10,000; RLJOB_SCHEDULES=N runs N. They are divided into parts,
which `pytest -n` distributes.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import functools
import gc
import hashlib
import logging
import math
import os
import random
import re
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import job

from rljob.coordinator.message_router import MessageRouter
from rljob.coordinator.recovery import recover
from rljob.coordinator.run import Run
from rljob.coordinator.serve import COMMIT_SECONDS
from rljob.ledger import writer
from rljob.ledger.queries import completions
from rljob.ledger.writer import LedgerWriter
from rljob.protocol.agent_protocol import RegisterEngine
from rljob.protocol.branches import TurnKey, before, order
from rljob.protocol.contexts import KeptContexts, context_digest
from rljob.protocol.runner_protocol import RegisterRunner
from rljob.protocol.trainer_protocol import RegisterTrainer, Train
from rljob.runner.context import Context
from rljob.runner.driver import RunnerDriver
from rljob.runner.group_filter import Verdict
from rljob.runner.pools.leased_questions import PoolRuntime
from rljob.runner.pools.question import Question
from rljob.scheduling.mixture import TaskShare
from rljob.simulation.memory_link import MemoryLink
from rljob.simulation.simulated_engine import EngineModel, SimulatedEngine
from rljob.simulation.simulated_run import SimulatedCluster, SimulatedRun, few_collections
from rljob.simulation.simulated_trainer import SimulatedTrainer
from rljob.simulation.virtual_time import VirtualLoop, run_in_virtual_time

SCHEDULES = int(os.environ.get("RLJOB_SCHEDULES", "10000" if os.environ.get("RLJOB_THOROUGH") else "100"))
PARTS = 16 if SCHEDULES >= 1000 else 1
ENGINES, RUNNERS, MOST_FAULTS = 16, 2, 8
LIMIT_SECONDS = 3600.0
"""Virtual time in which every run must end: two minutes without faults, and at most eight faults of two minutes."""
NOTICED_SECONDS = 40.0
"""Time after which the coordinator notices a half-open connection."""
CHECK_SECONDS = 5.0
"""Time between two checks of sums that would stay wrong; they are also checked before each fault and at the end."""
REGISTRATIONS = (RegisterEngine, RegisterRunner, RegisterTrainer)

KINDS = ("cut", "half-open", "kill engine", "kill runner", "kill trainer", "kill coordinator", "full disk", "suspend")


@dataclass(frozen=True)
class Fault:
    """A fault of a process at a time; it lasts for some seconds of virtual time."""

    at: float
    kind: str
    victim: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """What hypothesis draws."""

    seed: int
    alpha: int
    redundant: tuple[int, int]  # groups, members
    in_flight: str
    filtered: bool
    function: bool  # whether a user-written filter decides about groups
    turns: int
    branches: int  # made after each turn of the first context; each has at most two turns, and two branches of its own
    asks: int  # questions to a frozen pool at the same time, before each turn of the first context and of its branches
    kept: bool  # whether agents keep contexts between turns
    latency: float  # seconds, at most
    doubled: float  # probability that a message arrives twice
    faults: tuple[Fault, ...]

    # The following depend on the seed: hypothesis may draw a rare value in none of some hundred schedules.

    @property
    def evaluated(self) -> bool:
        """Whether versions 0 and 3 are evaluated, with two samples for each problem."""
        return self.seed % 8 == 1

    @property
    def regenerate(self) -> bool:
        """Whether onDeadline is regenerate."""
        return self.seed % 3 == 1

    @property
    def greedy(self) -> bool:
        """Whether each group has a greedy answer."""
        return self.seed % 7 == 2

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return 2 if self.seed % 5 in (1, 2) else 1

    @property
    def turns_of_sample(self) -> int:
        """Turns of all contexts of a sample."""
        return self.turns * (1 + self.branches * (min(self.turns, 2) + 2))


@functools.cache
def manifest(
    alpha: int, redundant: tuple[int, int], in_flight: str, filtered: bool, function: bool, regenerate: bool,
    tasks: int, evaluated: bool, greedy: bool,
) -> Any:  # fmt: skip
    settings = {"groupFilter": {"function": "mypackage:accept"}} if function else {}
    evaluation = {"problems": 1, "everySteps": 3, "samplesPerProblem": 2, "passAt": [1, 2], "temperature": 1.0}
    return job(
        3, alpha, 2, 2,
        rollouts=[{"name": "main", "maxConcurrency": 1}],
        scheduling={
            "redundancy": {"groups": redundant[0], "members": redundant[1]},
            "onDeadline": "regenerate" if regenerate else "wait",
        },
        evaluation=evaluation if evaluated else None,
        algorithm={"groupFilter": "nonconstant" if filtered else "none", "preset": "remax" if greedy else "grpo"},
        weightSync={"inFlight": in_flight},
        tasks=[
            {"name": f"sums-{task}", "weight": 1.0 / (task + 1), "data": {"reasoningGym": {"dataset": "chain_sum"}},
             "reward": "r", "sampling": {"maxTokens": 16}, **settings}
            for task in range(tasks)
        ],
    )  # fmt: skip


class Teacher:
    """A frozen pool that never gives the same answer twice: a loop that asked again after a turn would have another
    context than the turn was generated from."""

    def __init__(self, run: FaultyRun) -> None:
        self._run = run
        self._answers = 0

    async def answer(self, question: Question, seed: int, seconds: float | None) -> tuple[str, str]:
        await asyncio.sleep(self._run.rng.choice([0.0, 0.1, 5.0]))
        self._answers += 1
        return str(self._answers), "stop"


class FaultyRun(SimulatedRun):
    """A run whose processes and connections fail by a schedule, and start again."""

    def __init__(self, schedule: Schedule, record_events: bool = False) -> None:
        self.schedule = schedule
        self.rng = random.Random(schedule.seed)
        self.spec = manifest(
            schedule.alpha, schedule.redundant, schedule.in_flight, schedule.filtered, schedule.function,
            schedule.regenerate, schedule.tasks, schedule.evaluated, schedule.greedy,
        )  # fmt: skip
        cluster = SimulatedCluster(
            [("main", EngineModel(1))] * ENGINES,
            lambda request: 1 + request.sampling.seed % 7,
            lambda batch: 2.5,
            sync_seconds=0.3,
            reward=self._reward,
            loop=self._loop,
            filter=self._filter,
            pools=PoolRuntime({"teacher": Teacher(self)}),
        )
        self.events = hashlib.sha256()
        super().__init__(self.spec, cluster, observer=self._record_event if record_events else None)
        self.traffic.disturb = self._disturb
        self.ledger: LedgerWriter | None = None
        self.committed_shares = {task.name: TaskShare() for task in self.spec.spec.tasks}
        self.batches: dict[int, set[tuple[str, ...]]] = {}
        self.ages: list[int] = []
        self.disk_is_full = False
        self.names = 0

    def _record_event(self, name: str, frame: list[Any]) -> None:
        self.events.update(f"{name} {frame}".encode())

    # --- the cluster ---

    async def _reward(self, sample: str) -> float:
        *_, group, member = (int(number) for number in re.findall(r"\d+", sample))
        await asyncio.sleep(group % 3)
        offset = 2.0 * (group % 4) if self.schedule.function else 0.0  # of all rewards of the group
        return offset + float((group + self.schedule.seed) % 3 > 0 and member % 2)

    async def _loop(self, context: Context) -> Any:
        tokens, branches = context.prompt.token_ids, []
        for number in range(self.schedule.turns):
            tokens += await self._ask(context)
            turn = await context.generate(tokens)
            tokens += turn.token_ids + struct.pack("<i", number) * number  # no observation after the first turn
            made = [self._branch(context.branch(), tokens, 2) for _ in range(self.schedule.branches)]
            branches += map(asyncio.create_task, made)
        await asyncio.gather(*branches)
        return await context.score("", turn.finish)

    async def _ask(self, context: Context) -> bytes:
        """Return the answers of the pool to equal and to different questions as tokens."""
        questions = [context.ask("teacher", f"question {i // 2}") for i in range(self.schedule.asks)]
        return b"".join(struct.pack("<i", int(answer.text)) for answer in await asyncio.gather(*questions))

    async def _filter(self, rewards: list[float]) -> Verdict:
        """Reject every fourth group by its rewards, after some time: a runner may die meanwhile."""
        await asyncio.sleep(sum(rewards) % 3)
        return Verdict(rewards[0] // 2 != 2)

    async def _branch(self, context: Context, tokens: bytes, depth: int) -> None:
        for number in range(min(self.schedule.turns, depth)):
            tokens += await self._ask(context)
            turn = await context.generate(tokens)
            tokens += turn.token_ids + struct.pack("<i", number)
        if depth > 1:
            again = self._branch(context.branch(), tokens, 1), self._branch(context.branch(), tokens, 1)
            await asyncio.gather(*again)

    def _disturb(self, frame: list[Any]) -> tuple[float, list[Any]]:
        """Delay a frame, double messages, and exchange messages about different samples."""
        rng, arriving = self.rng, frame
        if self.schedule.doubled:
            arriving = []
            for message in frame:
                again = rng.random() < self.schedule.doubled and not isinstance(message, REGISTRATIONS)
                arriving += [message, message] if again else [message]
        for i in range(len(arriving) - 1):
            one, two = (getattr(each, "sample", None) for each in arriving[i : i + 2])
            if one and two and one != two and rng.random() < 0.5:
                arriving[i : i + 2] = arriving[i + 1], arriving[i]
        return rng.random() * self.schedule.latency, arriving

    # --- processes ---

    def start_coordinator(self) -> None:
        """Start the coordinator with what the ledger has. The queue of a killed one is lost."""
        before, self.ledger = self.ledger, LedgerWriter(None)
        if before is not None:
            self.ledger.db.close()
            self.ledger.db = self.ledger._reader = before.db
            self.ledger.segments, self.ledger.texts = before.segments, before.texts
        commit = self.ledger._commit

        def commit_unless_full(*arguments: Any) -> None:
            if self.disk_is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            commit(*arguments)
            self.committed_shares = copy.deepcopy(self.running.scheduler.mixture.shares)

        self.ledger._commit = commit_unless_full  # type: ignore[method-assign]
        self.running = Run(self.spec.spec, self.ledger, asyncio.get_running_loop().time)
        self.server.router = MessageRouter(self.running)
        recover(self.running)
        assert self.running.scheduler.mixture.shares == self.committed_shares
        self.committing = asyncio.create_task(self.ledger.run(COMMIT_SECONDS))
        self.running.changed()

    def kill_coordinator(self) -> None:
        if self.committing.done():
            assert isinstance(self.committing.exception(), OSError)
        self.committing.cancel()
        router, self.server.router = self.server.router, None
        for link in self.all_links():
            link.cut()
        assert router is not None
        self.running.failure = ("Killed", "")  # its timers change nothing any more

    def start_engine(self, number: int) -> None:
        self.names += 1
        self.engines[number] = SimulatedEngine(
            f"engine-{number}-{self.names}",
            "main",
            EngineModel(1),
            32_768,
            self._cluster.work,
            0.3,
            self.recorder,
            self.left,
        )
        if not self.schedule.kept:
            self.engines[number]._contexts = KeptContexts(0)
        self.links[number] = self.engines[number].connect(self.server, self.traffic)

    def start_runner(self, number: int) -> None:
        self.names += 1
        self.drivers[number] = self._runner(self.names)
        self.runner_tasks[number] = asyncio.create_task(self.drivers[number].run())

    def all_links(self) -> list[MemoryLink]:
        runners = [driver._link for driver in self.drivers]
        return [*self.links, *runners, self.trainer_link]  # type: ignore[list-item]

    async def inject(self, fault: Fault) -> None:
        """Wait for the time of a fault, cause it, and repair it after its duration."""
        await asyncio.sleep(fault.at)
        check_engine_seconds(self.running)
        links = self.all_links()
        match fault.kind:
            case "cut" | "half-open":
                link = links[fault.victim % len(links)]
                link.cut(noticed_after=NOTICED_SECONDS if fault.kind == "half-open" else 0.0)
                self.partitioned[link] = asyncio.get_running_loop().time() + fault.seconds
            case "kill engine":
                number = fault.victim % ENGINES
                self.engines[number].kill()
                self.start_engine(number)
            case "kill runner":
                number = fault.victim % RUNNERS
                self.runner_tasks[number].cancel()
                self.drivers[number].close()
                self.all_links()[ENGINES + number].cut()
                self.start_runner(number)
            case "kill trainer":
                self.trainer.restart()
            case "kill coordinator":
                if self.server.router is not None:
                    self.kill_coordinator()
                    self.away_until = asyncio.get_running_loop().time() + fault.seconds
            case "full disk":
                self.disk_is_full = True
                await asyncio.sleep(fault.seconds)
                self.disk_is_full = False
            case "suspend":
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualLoop)
                loop._now += fault.seconds  # all timers are late

    def supervise(self) -> None:
        """Start what has ended, and connect what may connect."""
        now = asyncio.get_running_loop().time()
        if self.committing.done() and self.server.router is not None:  # the disk is full: the process ends
            self.kill_coordinator()
        if self.server.router is None and now >= self.away_until and not self.disk_is_full:
            self.start_coordinator()
        for link in self.all_links():
            if now >= self.partitioned.get(link, 0.0):
                link.connect()

    async def run(self) -> Any:
        """Run to the end, with all faults."""
        self.away_until, self.partitioned = 0.0, {}
        self.engines: list[SimulatedEngine] = [None] * ENGINES  # type: ignore[list-item]
        self.links = [None] * ENGINES  # type: ignore[list-item]
        self.drivers: list[RunnerDriver] = [None] * RUNNERS  # type: ignore[list-item]
        self.runner_tasks: list[Any] = [None] * RUNNERS
        self.start_coordinator()
        self.trainer = SimulatedTrainer(self._train_seconds, 0.3, self.recorder)
        self.trainer_link = self.trainer.connect(self.server, self.traffic)
        for number in range(ENGINES):
            self.start_engine(number)
        for number in range(RUNNERS):
            self.start_runner(number)
        faults = [asyncio.create_task(self.inject(fault)) for fault in self.schedule.faults]
        loop, check_at = asyncio.get_running_loop(), 0.0
        while not (self.running.over and self.running.ended.is_set() and self.server.router is not None):
            assert loop.time() < LIMIT_SECONDS, f"the run starves at version {self.running.version}"
            await asyncio.sleep(0.5)
            self.supervise()
            if loop.time() >= check_at:
                check_engine_seconds(self.running)
                check_at = loop.time() + CHECK_SECONDS
        for task in faults:
            task.cancel()
        assert self.running.failure is None, self.running.failure
        return self.outcome

    def _train_seconds(self, batch: Train) -> float:
        self.batches.setdefault(batch.step, set()).add(tuple(sample.sample for sample in batch.samples))
        self.ages += [batch.step - sample.min_version for sample in batch.samples]
        return 2.5


def check_engine_seconds(run: Run) -> None:
    """Assert that the seconds of each engine add up to wall-clock time. A server counts as one more engine while the
    coordinator has not noticed that the server before it is gone."""
    engines, now = run.progress.engines, run.progress._until()
    assert len(engines.accounts) <= ENGINES + MOST_FAULTS
    for account in engines.accounts:
        spent = engines.seconds([account])
        assert min(spent.values()) >= 0 and math.isclose(sum(spent.values()), now - account.begun, abs_tol=1e-6)


def check(run: FaultyRun) -> None:
    """Assert the properties of a finished run from its ledger."""
    assert run.ledger is not None
    rows = run.ledger.query("SELECT id, group_id, state, step FROM samples WHERE number >= 0")
    ends = Counter(row["state"] for row in rows)
    assert ends.keys() <= {"trained", "baseline", "filtered", "surplus", "expired"}, ends
    assert ends["baseline"] == 2 * 3 * run.schedule.greedy, ends
    batches = {row[0]: msgspec.json.decode(row[1]) for row in run.ledger.query("SELECT step, samples FROM batches")}
    listed = [sample for samples in batches.values() for sample in samples]
    assert sorted(batches) == [0, 1, 2] and [len(samples) for samples in batches.values()] == [4, 4, 4]
    assert len(set(listed)) == len(listed)
    assert sorted(listed) == sorted(row["id"] for row in rows if row["state"] == "trained")
    assert {step: {tuple(samples)} for step, samples in batches.items()} == run.batches, "a replay has the same batch"
    assert all(0 <= age <= run.schedule.alpha for age in run.ages)
    lowest = {
        row["sample"]: row["turns"]
        for row in run.ledger.query(
            "SELECT sample, COUNT(DISTINCT turn || ':' || branch) AS turns FROM completions GROUP BY sample"
        )
    }
    assert all(lowest[sample] == run.schedule.turns_of_sample for sample in listed)
    check_engine_seconds(run.running)
    groups: Counter[str] = Counter(row["group_id"] for row in rows if row["state"] == "trained")
    assert set(groups.values()) == {2}, "groups are trained whole"
    accepted = {row[0]: row[1] for row in run.ledger.query("SELECT 'g' || group_number, accepted FROM decisions")}
    assert all(accepted.get(group) == (1 if run.schedule.function else None) for group in groups)
    check_contexts(run.ledger)
    check_answers(run)
    check_evaluations(run)


def check_evaluations(run: FaultyRun) -> None:
    """Assert that versions 0 and 3 were evaluated once, with all their samples and at that version."""
    assert run.ledger is not None
    tasks = run.schedule.tasks if run.schedule.evaluated else 0
    results = run.ledger.query("SELECT version, COUNT(*) FROM evaluations GROUP BY version")
    assert [tuple(row) for row in results] == [(version, tasks) for version in (0, 3) if tasks]
    rows = run.ledger.query(
        "SELECT s.state, s.min_version, s.max_version, g.version FROM samples s JOIN groups g ON g.id = s.group_id"
        " WHERE s.number < 0"
    )
    expected = [("evaluated", version, version, version) for version in (0, 3) for _ in range(2 * tasks)]
    assert sorted(tuple(row) for row in rows) == expected


def check_answers(run: FaultyRun) -> None:
    """Assert that every trained sample has the answer of each of its questions once."""
    assert run.ledger is not None
    counted = "SELECT COUNT(*) FROM answers a WHERE a.sample_number = s.number AND a.attempt = s.attempt"
    rows = run.ledger.query(f"SELECT s.id, ({counted}) FROM samples s WHERE s.state = 'trained'")
    assert {row[1] for row in rows} == {run.schedule.asks * run.schedule.turns_of_sample}


def check_contexts(ledger: LedgerWriter) -> None:
    """Assert that every completion was generated from all tokens of its branch before it, which the payload has
    once."""
    for row in ledger.query("SELECT id, attempt, prompt_tokens, total_tokens, sequences FROM samples"):
        tokens: dict[TurnKey | None, bytes] = {None: b""}  # after each turn
        prompt, parents = b"", set()
        for record in completions(ledger, row["id"], row["attempt"]):
            key = (record.turn, record.branch)
            assert key not in parents and (key not in tokens or not record.given)
            prompt = prompt or record.given
            context = tokens.get(key, tokens[before(key)]) + record.given
            parents.add(before(key))
            assert record.context == context_digest(context)
            tokens[key] = context + record.token_ids
        ends = [len(tokens[key]) // 4 for key in sorted(tokens.keys() - parents - {None}, key=order)]
        assert (row["prompt_tokens"] or 0, row["total_tokens"] or 0) == (len(prompt) // 4, sum(ends))
        assert row["sequences"] is None or msgspec.json.decode(row["sequences"]) == ends
        assert row["total_tokens"] is None or (row["sequences"] is None) == (len(ends) == 1)


faults = st.builds(
    Fault,
    at=st.floats(0, 60),
    kind=st.sampled_from(KINDS),
    victim=st.integers(0, ENGINES + RUNNERS),
    seconds=st.sampled_from([0.0, 1.0, 3.0, 20.0, 120.0]),
)
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 2**32),
    alpha=st.integers(0, 3),
    redundant=st.sampled_from([(0, 0), (1, 0), (0, 1), (2, 1)]),
    in_flight=st.sampled_from(["keep", "abort", "wait"]),
    filtered=st.booleans(),
    function=st.booleans(),
    turns=st.sampled_from([1, 1, 2, 3]),
    branches=st.sampled_from([0] * 10 + [1, 2]),  # a run with branches takes four times as long
    asks=st.sampled_from([0, 0, 1, 3]),
    kept=st.booleans(),
    latency=st.sampled_from([0.0, 0.01, 1.0]),
    doubled=st.sampled_from([0.0, 0.1]),
    faults=st.lists(faults, max_size=MOST_FAULTS).map(tuple),
)


@pytest.fixture(autouse=True, scope="module")
def wall_clock_jumps() -> Any:
    """Wall clocks jump: they only label rows of the ledger."""
    patch, rng = pytest.MonkeyPatch(), random.Random(0)
    patch.setattr(writer, "now", lambda: rng.choice([0.0, 1e9, 4e9]))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="module")
def little_besides_the_runs() -> Any:
    """Nothing else takes the time of thousands of runs: collections of the objects of all test modules, and warnings
    that pytest would format and keep."""
    logger = logging.getLogger("rljob.coordinator")
    level = logger.level
    logger.setLevel(logging.ERROR)
    gc.freeze()
    with few_collections():
        yield
    gc.unfreeze()
    logger.setLevel(level)


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=SCHEDULES // PARTS)
@given(schedule=schedules)
def test_random_faults_change_no_account_and_starve_nothing(part: int, schedule: Schedule) -> None:
    run = FaultyRun(schedule)
    run_in_virtual_time(run.run())
    check(run)


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=max(2, SCHEDULES // PARTS // 100))
@given(schedule=schedules)
def test_a_schedule_gives_the_same_events_again(part: int, schedule: Schedule) -> None:
    runs = [FaultyRun(schedule, record_events=True) for _ in range(2)]
    for run in runs:
        run_in_virtual_time(run.run())
    assert runs[0].events.digest() == runs[1].events.digest()
    assert runs[0].ages == runs[1].ages
