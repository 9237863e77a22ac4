"""Greedy answers as baselines: sampled at temperature 0, scored, passed to the trainer as a number, and not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ledgers import RecordingTrainer
from world import job

from rljob.ledger.audit import audit
from rljob.protocol.agent_protocol import Generate
from rljob.protocol.trainer_protocol import Train


class KeepingTrainer(RecordingTrainer):
    """A trainer that keeps its batches."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.trained: list[Train] = []

    def _execute(self, command: Any) -> None:
        super()._execute(command)
        if isinstance(command, Train):
            self.trained.append(command)


async def started(new_world: Any, tmp_path: Path, **fields: Any) -> tuple[Any, list[Generate]]:
    """Start a job whose groups have greedy answers; return the world and the requests of its engine."""
    world = new_world(job(**{"algorithm": {"preset": "remax"}, **fields}), tmp_path)
    world.trainer = KeepingTrainer(world)
    world.reward = lambda sample, result: 0.5 if sample.endswith(".0") else float(sum(result.token_ids) % 2)
    requests: list[Generate] = []
    agent = world.agents[0]
    handle = agent.handle

    def record(message: Any) -> None:
        requests.extend([message] if isinstance(message, Generate) else [])
        handle(message)

    agent.handle = record
    (world.storage / "job.json").write_text(world.manifest.model_dump_json(by_alias=True))
    await world.start()
    world.connect_all()
    return world, requests


async def finished(new_world: Any, tmp_path: Path, **fields: Any) -> tuple[Any, list[Generate]]:
    """Run a job as :func:`started` to its end; return the same."""
    world, requests = await started(new_world, tmp_path, **fields)
    await world.settle()
    return world, requests


def problems(world: Any) -> list[str]:
    """Return what the audit finds."""
    return [problem for check in audit(world.storage).checks for problem in check.problems]


async def test_the_first_member_of_a_group_is_greedy_and_its_reward_is_the_baseline(
    new_world: Any, tmp_path: Path
) -> None:
    world, requests = await finished(new_world, tmp_path)
    assert world.run.finished and requests
    for request in requests:
        assert request.sampling.temperature == (0.0 if request.request_id.sample.endswith(".0") else 1.0)
    rewards = {row["id"]: row["reward"] for row in world.store.query("SELECT id, reward FROM samples")}
    for batch in world.trainer.trained:
        assert len(batch.samples) == 4, "two groups of two"
        assert not any(sample.sample.endswith(".0") for sample in batch.samples)
        assert all(sample.baseline == rewards[f"{sample.group}.0"] for sample in batch.samples)
    ends = dict(world.store.query("SELECT state, COUNT(*) FROM samples GROUP BY state"))
    assert ends["trained"] == 2 * ends["baseline"] == 16
    assert world.run.ends["baseline"] == 8
    assert problems(world) == []


async def test_open_groups_keep_their_greedy_answer_over_a_restart(new_world: Any, tmp_path: Path) -> None:
    world, requests = await started(new_world, tmp_path)
    world.agents[0].hold = True
    await world.settle()
    world.kill_coordinator()
    await world.start()
    groups = world.run.scheduler.groups.values()
    assert groups and all([s.greedy for s in group.samples] == [True, False, False] for group in groups)
    world.agents[0].hold = False
    world.connect_all()
    await world.settle()
    assert {request.sampling.temperature for request in requests if request.request_id.sample.endswith(".0")} == {0.0}
    assert world.run.finished and problems(world) == []


async def test_a_user_written_filter_and_the_length_statistics_do_not_see_the_greedy_answer(
    new_world: Any, tmp_path: Path
) -> None:
    task = {
        "name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r",
        "sampling": {"maxTokens": 16}, "groupFilter": {"function": "mypackage:accept"},
    }  # fmt: skip
    redundancy = {"redundancy": {"members": 1}}
    world, _ = await finished(new_world, tmp_path, tasks=[task], scheduling=redundancy)
    assert world.runner.asked and all(len(asked.rewards) == 2 for asked in world.runner.asked)
    assert problems(world) == []
    before = world.run.lengths.metrics()
    world.kill_coordinator()
    await world.start()
    assert world.run.lengths.metrics() == before


CORRUPTIONS = {
    "the baseline has another reward": (
        "UPDATE samples SET reward = 0.25, turn_rewards = '[0.25]' WHERE id = 'g0.0'", "its advantage differs",
    ),
    "the greedy answer has the end surplus": (
        "UPDATE samples SET state = 'surplus', reason = 'x' WHERE id = 'g0.0'", "the ends of its samples",
    ),
    "another member is the baseline": (
        "UPDATE samples SET state = 'baseline', step = NULL, advantage = NULL WHERE id = 'g0.1'", "not a greedy answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_the_audit_detects_a_wrong_baseline(new_world: Any, tmp_path: Path, name: str) -> None:
    world, _ = await finished(new_world, tmp_path)
    assert problems(world) == []
    statement, problem = CORRUPTIONS[name]
    world.store.db.execute(statement)
    world.store.db.commit()
    assert any(problem in found for found in problems(world)), problems(world)
