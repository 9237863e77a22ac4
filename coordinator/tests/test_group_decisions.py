"""Decisions of user-written group filters in the coordinator: recorded once, before their effect, over all kills."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledgers import RecordingTrainer
from world import job

from rljob.coordinator.awaited_sample import awaited_sample
from rljob.coordinator.status_report import status_of
from rljob.ledger.audit import audit
from rljob.protocol import runner_protocol as m
from rljob.runner.group_filter import Verdict
from rljob.simulation.simulated_engine import EngineModel
from rljob.simulation.simulated_run import SimulatedCluster, simulate

FUNCTION = "mypackage:accept"
REASON = f"tasks[sums].groupFilter.function {FUNCTION} raised ValueError: no"


def manifest(**options: Any) -> Any:
    """Return a job whose task has a user-written filter."""
    task = {
        "name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r",
        "sampling": {"maxTokens": 16}, "groupFilter": {"function": FUNCTION},
    }  # fmt: skip
    return job(**{"alpha": 1, "tasks": [task], **options})


def decisions(world: Any) -> dict[str, tuple[int, str]]:
    """Return group → its decision in the ledger."""
    rows = world.store.query("SELECT g.id, d.* FROM decisions d JOIN groups g ON g.number = d.group_number")
    return {row["id"]: (row["accepted"], row["reason"]) for row in rows}


def ends(world: Any, group: str) -> set[tuple[str, str]]:
    """Return (state, reason) of the samples of a group."""
    return {tuple(row) for row in world.store.query("SELECT state, reason FROM samples WHERE group_id = ?", group)}


async def begun(world: Any) -> Any:
    """Start a world; return it."""
    world.trainer = RecordingTrainer(world)
    (world.storage / "job.json").write_text(world.manifest.model_dump_json(by_alias=True))
    await world.start()
    world.connect_all()
    return world


async def until(world: Any, condition: Callable[[], Any], limit: int = 200) -> None:
    """Run until a condition holds."""
    for _ in range(limit):
        if condition():
            return
        await world.some(1)
    raise AssertionError("the condition does not come true")


def check(world: Any) -> None:
    """Assert that the run ended with an accepting decision about every trained group, and a clean audit."""
    assert world.run.finished
    world.check_accounts()
    trained = {row[0] for row in world.store.query("SELECT DISTINCT group_id FROM samples WHERE state = 'trained'")}
    assert trained and trained <= {group for group, (accepted, _) in decisions(world).items() if accepted}
    assert [problem for check in audit(world.storage).checks for problem in check.problems] == []


async def test_a_run_trains_the_groups_that_the_function_accepts(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)

    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, asked.group != "g1")
    await begun(world)
    await world.settle()
    check(world)
    assert {group for group, (accepted, _) in decisions(world).items() if not accepted} == {"g1"}
    assert ends(world, "g1") == {("filtered", f"groupFilter.function {FUNCTION} rejected the group")}
    assert status_of(world.run).events["rejected/function"] == 2
    assert world.runner.filtered == {}, "every answer is acknowledged"
    numbers = [asked.number for asked in world.runner.asked]
    assert len(set(numbers)) == len(numbers) == len({asked.group for asked in world.runner.asked})


async def test_rewards_are_durable_before_the_question_and_a_decision_before_its_acknowledgement(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(manifest(), tmp_path)
    world.commit_turns = lambda: 20
    await begun(world)
    acknowledged: set[str] = set()
    for _ in range(2000):
        asked, open_ = len(world.runner.asked), set(world.runner.filtered)
        for part in world.parts:
            part.step()
        for message in world.runner.asked[asked:]:
            rows = world.store.query("SELECT reward FROM samples WHERE group_id = ? ORDER BY number", message.group)
            assert message.rewards == [row[0] for row in rows]
        acknowledged |= open_ - set(world.runner.filtered)
        assert acknowledged <= set(decisions(world))
        await asyncio.sleep(0)
    assert acknowledged


async def test_a_function_that_fails_ends_its_groups_and_the_run_continues(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, True, REASON if asked.group == "g1" else "")
    await begun(world)
    await world.settle()
    check(world)
    assert decisions(world)["g1"] == (0, REASON) and ends(world, "g1") == {("failed", REASON)}
    assert status_of(world.run).events["rejected/filter_failed"] == 2
    assert world.run.last_failure == REASON


async def test_a_function_that_always_fails_ends_the_run_with_its_sentence(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, False, REASON)
    await begun(world)
    await world.settle()
    assert world.run.failure == (
        "TooManyFailedSamples", f"no group could be trained any more; the last failure: {REASON}"
    )  # fmt: skip


async def test_a_runner_that_dies_before_its_answer_is_replaced(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    answer, world.decide = world.decide, lambda asked: None
    await begun(world)
    await until(world, lambda: len(world.runner.asked) >= 2)
    before = {asked.group: asked for asked in world.runner.asked}
    old = world.runner.peer
    world.runner.disconnect()
    world.runner.reborn()
    world.runner.asked.clear()
    world.decide = answer
    world.connect_all()
    await until(world, lambda: before.keys() <= {asked.group for asked in world.runner.asked})
    again = {asked.group: asked for asked in world.runner.asked}
    assert all(again[group].number > asked.number for group, asked in before.items())
    assert all(again[group].rewards == asked.rewards for group, asked in before.items())
    assert old is not world.runner.peer
    await world.settle()
    check(world)


async def lose_runner(world: Any, group: str) -> None:
    """Have the runner exit once it is asked about a group, as a function that calls os._exit does; start another."""
    await until(world, lambda: any(asked.group == group for asked in world.runner.asked))
    lost = world.run.trajectories.runners[0]
    world.runner.disconnect()
    world.run.decisions.lose(lost)
    world.runner.reborn()
    world.runner.asked.clear()
    world.connect_all()


async def test_a_function_that_ends_its_runner_three_times_fails_the_group(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(alpha=0), tmp_path)
    world.decide = lambda asked: None
    await begun(world)
    await until(world, lambda: len(world.runner.asked) == 2)
    first, second = (asked.group for asked in world.runner.asked)
    for _ in range(2):
        await lose_runner(world, first)
    assert first in world.run.scheduler.deciding
    world.decide = lambda asked: None if asked.group == first else m.GroupFiltered(asked.group, asked.number, True)
    await lose_runner(world, first)
    await world.settle()
    check(world)
    reason = (
        f"tasks[sums].groupFilter.function {FUNCTION}: 3 runners were lost while it decided about the group; "
        "it must not end its process"
    )
    assert decisions(world)[first] == (0, reason) and ends(world, first) == {("failed", reason)}
    assert decisions(world)[second] == (1, ""), "its function was not called when the runners were lost"
    assert not world.run.decisions._lost


async def test_an_answer_of_an_earlier_question_is_acknowledged_and_ignored(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    world.decide = lambda asked: None
    await begun(world)
    await until(world, lambda: world.runner.asked)
    first = world.runner.asked[0]
    world.runner.disconnect()
    world.runner.reborn()
    world.connect_all()
    await until(world, lambda: any(q.group == first.group and q.number > first.number for q in world.runner.asked))
    world.runner.filtered[first.group] = stale = m.GroupFiltered(first.group, first.number, False)
    world.runner.say(stale)
    await until(world, lambda: not world.runner.filtered)
    assert decisions(world) == {} and first.group in world.run.scheduler.deciding


async def test_a_runner_that_connects_again_is_asked_again_with_the_same_number(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    answer, world.decide = world.decide, lambda asked: None
    await begun(world)
    await until(world, lambda: world.runner.asked)
    first = world.runner.asked.pop(0)
    world.runner.disconnect()
    world.decide = answer
    world.runner.connect()
    await until(world, lambda: world.runner.asked)
    assert first in world.runner.asked
    await world.settle()
    check(world)


async def test_a_runner_that_connects_again_after_the_end_is_asked_nothing(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    world.decide = lambda asked: None
    await begun(world)
    await until(world, lambda: world.runner.asked)
    world.run.end_samples(world.run.scheduler.finish())
    world.run.finished = True
    world.runner.asked.clear()
    world.runner.disconnect()
    world.runner.connect()
    await world.some(20)
    assert world.run.decisions._open and world.runner.asked == []


async def test_a_repeated_answer_counts_once(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    await begun(world)
    await until(world, lambda: world.runner.filtered)
    world.runner.say(*world.runner.filtered.values())
    await world.settle()
    check(world)


async def test_a_coordinator_that_dies_before_the_decision_asks_again(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(), tmp_path)
    answer, world.decide = world.decide, lambda asked: None
    await begun(world)
    await until(world, lambda: len(world.runner.asked) >= 2)
    before = {asked.group: asked for asked in world.runner.asked}
    world.kill_coordinator()
    world.runner.asked.clear()
    await world.start()
    assert before.keys() <= world.run.scheduler.deciding.keys()
    assert not any(world.run.scheduler.groups[group].complete for group in before)
    world.decide = answer
    world.connect_all()
    await until(world, lambda: before.keys() <= {asked.group for asked in world.runner.asked})
    assert min(asked.number for asked in world.runner.asked) > max(asked.number for asked in before.values())
    await world.settle()
    check(world)


async def test_a_coordinator_that_dies_between_a_decision_and_its_batch_does_not_ask_again(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(manifest(n=3), tmp_path)
    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, True) if asked.group == "g0" else None
    await begun(world)
    await until(world, lambda: "g0" in decisions(world))
    assert not world.store.query("SELECT 1 FROM batches")
    world.kill_coordinator()
    world.runner.asked.clear()
    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, True)
    await world.start()
    assert world.run.scheduler.groups["g0"].complete
    world.connect_all()
    await world.settle()
    assert "g0" not in {asked.group for asked in world.runner.asked}
    check(world)


@pytest.mark.parametrize(
    ("reason", "end"),
    [("", ("filtered", f"groupFilter.function {FUNCTION} rejected the group")), (REASON, ("failed", REASON))],
)
async def test_a_decision_without_its_effect_is_applied_by_the_next_coordinator(
    new_world: Any, tmp_path: Path, reason: str, end: tuple[str, str]
) -> None:
    world = new_world(manifest(), tmp_path)
    world.decide = lambda asked: None
    await begun(world)
    await until(world, lambda: world.runner.asked)
    group = world.runner.asked[0].group
    survivors = [sample.id for sample in world.run.scheduler.deciding[group].scored]
    world.store.record_decision(group, False, reason, survivors)
    if reason:
        world.store.record_failure(survivors[0])
    await world.store.drain()
    world.kill_coordinator()
    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, True)
    await world.start()
    assert group not in world.run.scheduler.groups
    world.connect_all()
    await world.settle()
    assert ends(world, group) == {end}
    check(world)


async def test_a_runner_that_sends_no_decision_fails_the_group(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(alpha=0), tmp_path)
    world.decide = lambda asked: None if asked.group == "g1" else m.GroupFiltered(asked.group, asked.number, True)
    await begun(world)
    await world.settle()
    decision = world.run.decisions._open["g1"]
    world.run.decisions._check(decision)
    assert "g1" in world.run.scheduler.deciding, "its time is not over"
    decision.since -= 661
    world.run.decisions._answered.clear()
    world.run.decisions._check(decision)
    await world.settle()
    check(world)
    reason = f"tasks[sums].groupFilter.function {FUNCTION}: runner runner.0 sent no decision for 660 s"
    assert decisions(world)["g1"] == (0, reason) and ends(world, "g1") == {("failed", reason)}


def test_a_run_continues_after_the_time_of_a_decision() -> None:
    """In virtual time: the function of the runner never returns for the first group, and the runner has no limit."""
    asked: list[list[float]] = []

    async def hang_once(rewards: list[float]) -> Verdict:
        asked.append(rewards)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return Verdict(True)

    cluster = SimulatedCluster([("main", EngineModel(4))], lambda request: 1.0, lambda batch: 1.0, filter=hang_once)
    outcome = simulate(manifest(alpha=0), cluster)
    assert outcome.steps[0] > 660 and outcome.steps[-1] < 700
    assert outcome.ends == {"failed": 2, "trained": 16}


async def test_the_limit_of_a_decision_begins_with_the_answer_before_it(new_world: Any, tmp_path: Path) -> None:
    """A runner decides about the groups of a task one after another."""
    world = new_world(manifest(), tmp_path)
    world.decide = lambda asked: None
    await begun(world)
    await until(world, lambda: len(world.runner.asked) >= 2)
    open_ = list(world.run.decisions._open.values())
    limit = world.run.decisions._limit
    assert limit == 660
    for decision in open_:
        decision.since -= limit + 1
    world.runner.say(m.GroupFiltered(open_[0].group.id, open_[0].number, True))
    world.run.decisions._check(open_[1])
    assert open_[1].group.id in world.run.scheduler.deciding
    world.run.decisions._answered.clear()
    world.run.decisions._check(open_[1])
    await world.store.drain()
    assert decisions(world)[open_[1].group.id][1].endswith("sent no decision for 660 s")


async def test_the_decision_that_a_batch_waits_for_is_named(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(alpha=0, n=1), tmp_path)
    world.decide = lambda asked: None
    await begun(world)
    await until(world, lambda: world.runner.asked)
    assert awaited_sample(world.run) == ""
    world.run.decisions._open["g0"].since -= 90
    assert awaited_sample(world.run) == (
        "batch 0 waits for group g0: groupFilter.function of task sums has waited for its answer at runner runner.0 "
        "for 90 s"
    )


async def test_a_group_that_ends_before_its_decision_is_not_waited_for(new_world: Any, tmp_path: Path) -> None:
    world = new_world(manifest(steps=1, alpha=0, n=1, scheduling={"redundancy": {"groups": 1}}), tmp_path)
    world.decide = lambda asked: m.GroupFiltered(asked.group, asked.number, True) if asked.group == "g1" else None
    await begun(world)
    await world.settle()
    check(world)
    assert {state for state, _ in ends(world, "g0")} == {"surplus"}
    assert world.run.decisions._open == {}


def pure(message: m.FilterGroup) -> m.GroupFiltered:
    """Decide as a function of the rewards: two equal ones are rejected, except every fourth group, which fails."""
    reason = REASON if int(message.group[1:]) % 4 == 3 else ""
    return m.GroupFiltered(message.group, message.number, len(set(message.rewards)) > 1, reason)


@pytest.mark.parametrize("seed", range(20))
async def test_faults_at_any_time_lose_no_group_and_change_no_batch_at_alpha_0(
    new_world: Any, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    alpha = seed % 3
    batches = []
    for name, faults in (("calm", 0), ("faulty", 8)):
        (tmp_path / name).mkdir()
        options = {"redundancy": {"groups": 0 if alpha == 0 else seed % 2, "members": 0 if alpha == 0 else 1}}
        world = new_world(manifest(alpha=alpha, scheduling=options), tmp_path / name)
        world.decide = pure
        await begun(world)
        for _ in range(faults):
            world.decide = rng.choice([pure, lambda asked: None])
            await world.some(rng.randrange(15))
            await world.inject_fault(rng)
        world.decide = pure
        if faults:  # whoever was asked and did not answer
            world.runner.disconnect()
            world.runner.reborn()
            world.connect_all()
        await world.settle()
        check(world)
        batches.append({row[0]: row[1] for row in world.store.query("SELECT step, samples FROM batches")})
    if alpha == 0:
        assert batches[0] == batches[1]
