"""Samples with branches in the coordinator: requests, contexts, records, batches, the audit, and what users see."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import world as world_module
from ledgers import alter, copy
from world import job

from rljob.cli.main import main
from rljob.coordinator import engines as engines_module
from rljob.coordinator.batches import assemble
from rljob.coordinator.trajectory import Branch, Trajectory
from rljob.ledger.audit import audit
from rljob.ledger.payload_record import PayloadRecord
from rljob.ledger.queries import completions
from rljob.ledger.reader import LedgerReader
from rljob.ledger.sample_detail import show
from rljob.protocol.agent_protocol import Generate, RequestId
from rljob.protocol.batch_samples import BatchSample, SampleTokens, Segment
from rljob.protocol.branches import TurnKey, before, check_turn, order, path
from rljob.protocol.contexts import context_digest
from rljob.protocol.runner_protocol import (
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    TrajectoryScored,
    TurnTokens,
)
from rljob.protocol.shared_messages import VersionSpan
from rljob.scheduling.groups import Group, Sample

TREE: list[TurnKey] = [(0, ""), (1, ""), (1, "1.1"), (2, "1.1"), (2, "1.1/2.1"), (1, "1.2"), (2, "2.1")]
ENDS: list[TurnKey] = [(2, "1.1"), (2, "1.1/2.1"), (1, "1.2"), (2, "2.1")]


class BranchingRunner(world_module.Runner):
    """Requests every turn of TREE once the turn that it continues is finished."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.answers: dict[str, dict[TurnKey, TurnTokens]] = {}
        self.repeats: list[tuple[str, TurnKey]] = []  # turns of an earlier lease

    def reborn(self) -> None:
        super().reborn()
        self.answers = {}

    def handle(self, message: Any) -> None:
        match message:
            case LeaseTrajectory(sample=sample, turns=turns):
                self.driving[sample] = message
                self.answers[sample] = {(turn.turn, turn.branch): turn for turn in turns}
                self.repeats += [(sample, key) for key in self.answers[sample]]
                for key in TREE:
                    self._request(sample, key)
                self._end(sample)
            case GenerateResult(sample=sample):
                key = (message.turn, message.branch)
                if sample not in self.driving or key in self.answers[sample]:
                    return
                given = self.given(sample, key)
                assert message.context == context_digest(self.context(sample, before(key)) + given)
                self.answers[sample][key] = TurnTokens(key[0], given, message.token_ids, message.finish, key[1])
                for later in TREE:
                    if before(later) == key:
                        self._request(sample, later)
                self._end(sample)
            case _:
                super().handle(message)

    def given(self, sample: str, key: TurnKey) -> bytes:
        """Return what a turn adds: nothing in the branch 1.2."""
        if key[0] == 0:
            return world_module.int32(self.prompt(self.driving[sample]))
        return world_module.int32([] if key[1] == "1.2" else [30 + TREE.index(key)])

    def context(self, sample: str, key: TurnKey | None) -> bytes:
        """Return all tokens after a turn."""
        turns = [self.answers[sample][each] for each in path(key)] if key is not None else []
        return b"".join(turn.given + turn.token_ids for turn in turns)

    def request(self, sample: str, key: TurnKey) -> GenerateRequest:
        request = world_module.generate_request(
            self.driving[sample], key[0], self.context(sample, before(key)), self.given(sample, key)
        )
        request.branch = key[1]
        return request

    def _request(self, sample: str, key: TurnKey) -> None:
        if key not in self.answers[sample] and before(key) in (None, *self.answers[sample]):
            self.say(self.request(sample, key))

    def _continue(self, sample: str) -> None:
        for key in TREE:
            self._request(sample, key)

    def _end(self, sample: str) -> None:
        if len(self.answers[sample]) == len(TREE):
            lease, rewards = self.driving[sample], [float(i) for i in range(len(TREE) - 1)]
            reward = self.world.reward(sample, self.answers[sample][TREE[-1]]) + sum(rewards)
            self.finished[sample] = TrajectoryScored(
                sample, reward, {}, "text", len(TREE), lease.attempt, rewards, lease.lease
            )
            self.say(self.finished[sample])


async def branching_world(new_world: Any, tmp_path: Path, engines: int = 2, **options: Any) -> Any:
    world = new_world(job(**options), tmp_path, engines)
    world.runner = BranchingRunner(world)
    world.trainer.check_sample = lambda scalars, tokens, *_: check_sample(world, scalars, tokens)
    (tmp_path / "job.json").write_text(world.manifest.model_dump_json(by_alias=True))
    await world.start()
    world.connect_all()
    return world


def check_sample(world: Any, scalars: BatchSample, tokens: SampleTokens) -> None:
    """Assert that the sequences of a sample have each record once, under its own context."""
    row = world.store.query("SELECT * FROM samples WHERE id = ?", tokens.sample)[0]
    records = completions(world.store, tokens.sample, row["attempt"])
    assert {(record.turn, record.branch) for record in records} == set(TREE)
    assert tokens.ends == list(itertools.accumulate(scalars.sequences))
    assert tokens.ends[-1] == scalars.total_tokens == len(tokens.token_ids) // 4 == len(tokens.logprobs) // 4
    written = sum(len(record.token_ids) // 4 for record in records)
    assert sum(tokens.loss_mask) == scalars.response_tokens == written == sum(s.end - s.start for s in tokens.spans)
    starts = [0, *tokens.ends]
    for i, end in enumerate(ENDS):
        own = [r for key in path(end) for r in records if (r.turn, r.branch) == key]
        ids = tokens.token_ids[4 * starts[i] : 4 * tokens.ends[i]]
        assert ids == b"".join(record.given + record.token_ids for record in own)
    assert [s.reward for s in tokens.segments if s.kind == "model"][:-1] == [0, 2, 3, 4, 5, 1]


async def test_branches_of_a_sample_are_generated_at_the_same_time(new_world: Any, tmp_path: Path) -> None:
    world = await branching_world(new_world, tmp_path, 1, steps=2, n=1, g=1, alpha=0)
    (agent,) = world.agents
    agent.hold = True
    await world.some(20)
    agent.hold, after = False, agent.queue[0]
    assert after.request_id == RequestId("g0.0", 0, 0)
    while len(agent.queue) < 3:
        await world.some(1)
        agent.hold = (RequestId("g0.0", 0, 0).key) in agent.unacknowledged or agent.hold
    assert [one.request_id.branch for one in agent.queue] == ["", "1.1", "1.2"]
    seeds = {one.sampling.seed for one in agent.queue}
    assert len(seeds) == 3, "each branch has a random stream of its own"
    agent.hold = False
    await world.settle()
    assert world.run.finished and not agent.missing
    world.check_accounts()


async def test_after_a_restart_the_answer_of_one_branch_aborts_no_other(new_world: Any, tmp_path: Path) -> None:
    world = await branching_world(new_world, tmp_path, 1, steps=1, n=1, g=1, alpha=0)
    (agent,) = world.agents
    while len(agent.queue) < 3:
        await world.some(1)
        agent.hold = RequestId("g0.0", 0, 0).key in agent.unacknowledged or agent.hold
    world.kill_coordinator()
    await world.start()
    request = world.runner._request
    world.runner._request = lambda sample, key: request(sample, key) if key[1] == "1.1" else None
    world.connect_all()
    agent.queue.sort(key=lambda generate: generate.request_id.branch != "1.1")
    await world.some(20)
    assert agent.hold and [generate.request_id.branch for generate in agent.queue] == ["1.1", "", "1.2"]
    agent.hold = False
    agent.step()
    agent.hold = True
    await world.some(20)
    assert {generate.request_id.key for generate in agent.queue} >= {
        ("g0.0", 1, 0, ""), ("g0.0", 1, 0, "1.2")
    }  # fmt: skip
    world.runner._request = request
    world.runner._continue("g0.0")
    agent.hold = False
    await world.settle()
    assert world.run.finished and not world.store.query("SELECT 1 FROM samples WHERE state = 'failed'")


def test_the_lowest_version_of_a_sample_is_over_all_branches() -> None:
    group = Group("g0", 0, "sums", 0)
    trajectory = Trajectory(Sample("g0.0", group, 0, None, None), "sums", 0)
    trajectory.branches = {name: Branch(name, dispatched=version) for name, version in [("", 3), ("1.1", 1)]}
    trajectory.bound_version()
    assert trajectory.sample.min_version == 1
    trajectory.branches["1.1"].dispatched = None
    trajectory.bound_version()
    assert trajectory.sample.min_version == 3
    trajectory.recorded_version = 2
    trajectory.bound_version()
    assert trajectory.sample.min_version == 2


@pytest.mark.parametrize("seed", range(12))
async def test_random_deaths_change_no_branch(new_world: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = await branching_world(
        new_world, tmp_path, 2, steps=4, weightSync={"inFlight": rng.choice(["keep", "abort"])}
    )
    world.commit_turns = lambda: rng.choice([0, 0, 3])
    for _ in range(12):
        await world.some(rng.randrange(1, 25))
        await world.inject_fault(rng)
    await world.settle()
    assert world.run.finished and world.run.failure is None
    assert not world.store.query("SELECT 1 FROM samples WHERE state = 'failed'")
    world.check_accounts()


async def test_the_first_request_of_a_branch_brings_what_it_adds(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await branching_world(new_world, tmp_path, 1, steps=1, n=1, g=1, alpha=0)
    (agent,) = world.agents
    monkeypatch.setattr(engines_module, "FORGOTTEN_TOGETHER", 1)
    seen: list[Generate] = []
    generate = agent._generate
    agent._generate = lambda message: (seen.append(message), generate(message))
    await world.settle()
    first = {one.request_id.branch: one for one in reversed(seen) if one.request_id.sample == "g0.0"}
    assert first["1.1"].prefix_tokens > 0 and first["1.1"].token_ids == world_module.int32([32])
    assert all(one.prefix_tokens for one in seen if one.request_id.turn) and not agent.missing
    assert not agent.contexts._kept, "they are dropped with the sample"


def changed(**fields: Any) -> Callable[[GenerateRequest], GenerateRequest]:
    return lambda request: msgspec.structs.replace(request, **fields)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ((1, "1.1"), changed(branch="x"), "which is not the name of a branch"),
        ((1, "1.1"), changed(branch="2.1"), "which begins with a later turn"),
        ((1, "1.1"), changed(turn=2), "before another turn is finished"),
        ((1, "1.1"), changed(branch="0.1"), "before another turn is finished"),
        ((1, "1.1"), changed(prefix="0" * 32), "the context of turn 1 of branch 1.1 does not continue"),
        ((1, "1.1"), changed(prefix_tokens=0, prefix=""), "the context of turn 1 of branch 1.1 does not continue"),
        ((1, "1.1"), changed(given=b"abc"), "is not the bytes of at least one int32"),
    ],
)
async def test_a_wrong_request_of_a_branch_fails_its_sample(
    new_world: Any, tmp_path: Path, key: TurnKey, change: Any, message: str
) -> None:
    world = await branching_world(new_world, tmp_path, 1, steps=2, n=1, g=1, alpha=0)
    request = world.runner.request
    world.runner.request = lambda sample, asked: (
        change(request(sample, asked)) if (sample, asked) == ("g0.0", key) else request(sample, asked)
    )
    await world.settle()
    reasons = [row[0] for row in world.store.query("SELECT reason FROM samples WHERE id = 'g0.0'")]
    assert message in reasons[0] and world.run.finished
    assert not any(agent.queue or agent.unacknowledged for agent in world.agents)


@pytest.fixture(scope="module")
def branched_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run whose samples have branches; tests must not write to it."""
    storage = tmp_path_factory.mktemp("branched") / "storage"
    storage.mkdir()

    async def run() -> None:
        worlds: list[Any] = []

        def make(*arguments: Any) -> Any:
            worlds.append(world_module.World(*arguments))
            return worlds[-1]

        world = await branching_world(make, storage, 2, steps=2, checkpoints={"everySteps": 5, "keep": 2})
        await world.settle()
        assert world.run.finished
        world.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fdatasync", lambda descriptor: None)
        asyncio.run(run())
    return storage


def problems(run: Path) -> dict[str, list[str]]:
    """Return the failed checks of the audit that do not concern checkpoints of the fake trainer."""
    return {
        check.name: check.problems for check in audit(run).checks if not check.ok and "checkpoint" not in check.name
    }


def test_the_audit_follows_the_branches(branched_run: Path, tmp_path: Path) -> None:
    assert problems(branched_run) == {}
    first = "(SELECT sample_number FROM completions WHERE branch = '1.1/2.1' LIMIT 1)"
    completions_of, samples = f"AND sample_number = {first}", f"WHERE number = {first}"
    changes = {
        f"UPDATE completions SET branch = '1.3' WHERE branch = '1.2' {completions_of}": "another completion",
        f"UPDATE completions SET branch = '1' WHERE branch = '1.2' {completions_of}": "does not continue",
        f"UPDATE completions SET turn = 3 WHERE branch = '2.1' {completions_of}": "does not continue",
        f"UPDATE samples SET sequences = '[1,2,3,4]' {samples}": "differs from the",
        f"UPDATE samples SET sequences = NULL {samples}": "differs from the ledger",
        f"UPDATE samples SET sequences = '[' {samples}": "JSON",
        f"UPDATE samples SET turn_rewards = '[21.0]', reward = 21.0 {samples}": "number of turns",
    }
    for number, (statement, found) in enumerate(changes.items()):
        run = copy(branched_run, tmp_path / str(number))
        alter(run, statement)
        assert found in " ".join(text for texts in problems(run).values() for text in texts), statement


def test_a_sample_shows_its_branches(branched_run: Path) -> None:
    with LedgerReader(branched_run) as ledger:
        detail = show(ledger, "g0.0")
    assert [(turn.turn, turn.branch) for turn in detail.turns] == TREE
    assert [turn.reward for turn in detail.turns][:-1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    lengths = {(turn.turn, turn.branch): len(turn.given_ids) + len(turn.written) for turn in detail.turns}
    assert detail.sample.sequences == [sum(lengths[key] for key in path(end)) for end in ENDS]
    assert detail.sample.total_tokens == sum(detail.sample.sequences)


def test_show_names_the_branch_of_each_turn(
    branched_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ([], ["--turns"]):
        monkeypatch.setattr(sys, "argv", ["rljob", "show", str(branched_run), "g0.0", *options])
        with pytest.raises(SystemExit):
            main()
        out = capsys.readouterr().out
        named = re.findall(r"^turn (\d)     (?:branch (\S+), )?attempt 0 on engine-", out, re.M)
        assert [(int(turn), branch) for turn, branch in named] == TREE
        assert options or re.search(r"^tokens     \d+ response, 4 sequences of \d+, \d+, \d+, \d+ tokens$", out, re.M)


def record(turn: int, branch: str, given: list[int], written: list[int], finish: str = "stop") -> PayloadRecord:
    logprobs = array("f", [-float(token) for token in written]).tobytes()
    spans = [VersionSpan(turn, 0, len(written))] if written else []
    return PayloadRecord(
        "g0.0", turn, 0, world_module.int32(given), world_module.int32(written), logprobs, spans, finish, "", branch
    )


def test_a_shared_prefix_is_trained_in_the_first_sequence_that_has_it() -> None:
    records = [
        record(0, "", [1, 2], [3], "abort"),
        record(0, "", [], [4]),
        record(1, "1.2", [], [9]),
        record(1, "1.1", [5], [6, 7]),
        record(2, "1.1", [8], []),
    ]
    for each in records:
        check_turn(each.turn, each.branch)
    sample = assemble(records, [0.5, 1.0, 2.0, 4.0])
    assert array("i", sample.token_ids).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 9]
    assert array("f", sample.logprobs).tolist() == [0, 0, -3, -4, 0, -6, -7, 0, 0, 0, 0, 0, -9]
    assert list(sample.loss_mask) == [0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1]
    assert sample.ends == [8, 13]
    assert sample.segments == [
        Segment("prompt", 0, 2),
        Segment("model", 2, 4, 0.5),
        Segment("observation", 4, 5),
        Segment("model", 5, 7, 1.0),
        Segment("observation", 7, 8),
        Segment("model", 8, 8, 2.0),
        Segment("prefix", 8, 12),
        Segment("model", 12, 13, 4.0),
    ]
    spans = [(0, 2, 3), (0, 3, 4), (1, 5, 7), (1, 12, 13)]
    assert [(span.version, span.start, span.end) for span in sample.spans] == spans
    assert sorted({(r.turn, r.branch) for r in records}, key=order)[-1] == (1, "1.2")
