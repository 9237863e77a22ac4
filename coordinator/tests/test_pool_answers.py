"""Answers of frozen pools in the coordinator: stored before the runner gets them, replayed, discarded, audited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import world as world_module
from ledgers import alter, copy
from world import int32, job

from rljob.ledger.audit import audit
from rljob.ledger.queries import answers, completions
from rljob.ledger.sample_numbers import sample_number
from rljob.protocol import runner_protocol as m
from rljob.protocol.batch_samples import SampleTokens

AGENT_TASK = {
    "name": "sums",
    "data": {"reasoningGym": {"dataset": "chain_sum"}},
    "loop": "agent",
    "agent": {"function": "mine.agent:solve"},
    "sampling": {"maxTokens": 16},
}
FIRST_ANSWER = 100


class AskingRunner(world_module.Runner):
    """Each sample has two turns. Between them it asks a pool that never gives the same answer twice; the number that is
    the answer's text is the observation."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.given = FIRST_ANSWER  # the pool's last answer
        self.quiet = False  # send no answer of the pool
        self.answered: dict[str, m.PoolAnswered] = {}  # not stored yet
        self.stored: dict[str, m.PoolAnswer] = {}
        self.turns_of = lambda sample: 2

    def reborn(self) -> None:
        super().reborn()
        self.answered, self.stored = {}, {}

    def handle(self, message: Any) -> None:
        match message:
            case m.LeaseTrajectory(sample=sample):
                self.answered.pop(sample, None)
                self.stored.pop(sample, None)
                self.stored.update((sample, answer) for answer in message.answers)
                super().handle(message)
            case m.GenerateResult(sample=sample, turn=turn):
                if sample in self.driving and turn == len(self.turns[sample]):
                    given = self.hint(sample) if turn else int32(self.prompt(self.driving[sample]))
                    self.turns[sample].append(m.TurnTokens(turn, given, message.token_ids, message.finish))
                    self._continue(sample)
            case m.PoolAnswerStored(sample=sample, answer=answer):
                if sample in self.driving and self.answered.pop(sample, None):
                    self.stored[sample] = answer
                    self._continue(sample)
            case _:
                super().handle(message)

    def hint(self, sample: str) -> bytes:
        return int32([int(self.stored[sample].text)])

    def _continue(self, sample: str) -> None:
        lease, turns = self.driving[sample], self.turns[sample]
        if len(turns) == 2:
            self._score(sample, turns)
            return
        if turns and sample not in self.stored:
            if sample not in self.answered:
                self.given += 1
                answer = m.PoolAnswer("", "f00d", 0, 1, "teacher", str(self.given), "stop")
                self.answered[sample] = m.PoolAnswered(sample, answer, lease.attempt, lease.lease)
            if not self.quiet:
                self.say(self.answered[sample])
            return
        first = int32(self.prompt(lease))
        before = first + turns[0].token_ids if turns else b""
        self.say(world_module.generate_request(lease, len(turns), before, self.hint(sample) if turns else first))


async def asking_world(new_world: Any, tmp_path: Path, task: Any = None) -> Any:
    tasks = {"tasks": [task]} if task else {}
    world = new_world(job(n=1, g=2, alpha=0, steps=2, **tasks), tmp_path)
    world.runner = AskingRunner(world)
    world.trainer.check_sample = lambda scalars, tokens, *_: check_sample(world, tokens)
    (tmp_path / "job.json").write_text(world.manifest.model_dump_json(by_alias=True))
    await world.start()
    return world


def check_sample(world: Any, tokens: SampleTokens) -> None:
    """Assert that the answer is between the turns, outside of the loss."""
    [answer] = recorded(world, tokens.sample)
    between = tokens.segments[2]
    assert [segment.kind for segment in tokens.segments] == ["prompt", "model", "observation", "model"]
    assert tokens.token_ids[4 * between.start : 4 * between.end] == int32([int(answer.text)])
    assert not any(tokens.loss_mask[between.start : between.end])


def recorded(world: Any, sample: str) -> list[m.PoolAnswer]:
    """Return the answers that count."""
    [(attempt,)] = world.store.query("SELECT attempt FROM samples WHERE number = ?", sample_number(sample))
    return answers(world.store, sample, attempt)


async def until(world: Any, condition: Callable[[], object]) -> None:
    """Run until ``condition`` is true."""
    for _ in range(200):
        if condition():
            return
        await world.some(1)
    raise AssertionError("the condition is never true")


async def finish(world: Any) -> None:
    """Run to the end; assert that no sample failed."""
    for agent in world.agents:
        agent.hold = False
    world.connect_all()
    await world.settle()
    assert world.run.finished and world.run.failure is None
    world.check_accounts()
    assert not world.store.query("SELECT reason FROM samples WHERE state = 'failed'")


async def until_answered(world: Any) -> None:
    """Run until the first answer is stored, with engines that then generate no second turn."""
    world.connect_all()
    await until(world, lambda: len(world.runner.turns.get("g0.0", [])) == 1)
    world.agents[0].hold = True
    await until(world, lambda: "g0.0" in world.runner.stored)


@pytest.mark.parametrize("victims", ["runner", "coordinator", "runner and coordinator"])
async def test_a_loop_that_runs_again_gets_the_recorded_answer(new_world: Any, tmp_path: Path, victims: str) -> None:
    world = await asking_world(new_world, tmp_path)
    await until_answered(world)
    known = world.runner.stored["g0.0"]
    if "runner" in victims:
        world.runner.disconnect()
        world.runner.reborn()
    if "coordinator" in victims:
        world.kill_coordinator()
        await world.start()
    world.connect_all()
    await until(world, lambda: "g0.0" in world.runner.stored)
    assert world.runner.stored["g0.0"] == known
    await finish(world)
    assert recorded(world, "g0.0") == [known] and world.runner.given == FIRST_ANSWER + 4, "each sample asked once"
    assert completions(world.store, "g0.0", 0)[1].given == int32([int(known.text)])
    check_audit(tmp_path)


def check_audit(storage: Path) -> None:
    failed = [check for check in audit(storage).checks if not check.ok]
    assert [check.name for check in failed] == ["checkpoints exist and match the ledger"], "the trainer is simulated"


async def first_answer(world: Any) -> m.PoolAnswered:
    """Run until the pool has answered both samples; return the message about g0.0. None is sent."""
    world.runner.quiet = True
    world.connect_all()
    await world.settle()
    message: m.PoolAnswered = world.runner.answered["g0.0"]
    return message


async def test_an_answer_reaches_the_runner_once_it_is_durable_and_the_first_one_counts(
    new_world: Any, tmp_path: Path
) -> None:
    world = await asking_world(new_world, tmp_path)
    message = await first_answer(world)
    world.runner.say(message, another(message, text="777"))
    assert not world.store.query("SELECT * FROM answers") and not world.runner.peer.take()
    await world.store.drain()
    assert len(world.store.query("SELECT * FROM answers")) == 1
    stored = world.runner.peer.take()
    assert stored == [m.PoolAnswerStored("g0.0", message.answer)] * 2
    world.runner.handle(stored[0])
    world.runner.quiet = False
    world.runner.disconnect()
    await finish(world)


@pytest.mark.parametrize("durable", [False, True])
async def test_after_a_killed_coordinator_the_runner_sends_its_answer_again(
    new_world: Any, tmp_path: Path, durable: bool
) -> None:
    world = await asking_world(new_world, tmp_path)
    message = await first_answer(world)
    world.runner.say(message)
    if durable:
        await world.store.drain()
    world.kill_coordinator()
    await world.start()
    assert len(world.store.query("SELECT * FROM answers")) == durable
    world.runner.quiet = False
    await finish(world)
    assert recorded(world, "g0.0") == [message.answer]


def another(message: m.PoolAnswered, **changes: Any) -> m.PoolAnswered:
    return msgspec.structs.replace(message, answer=msgspec.structs.replace(message.answer, **changes))


@pytest.mark.parametrize(
    "changes", [{"finish": "abort"}, {"number": -1}, {"number": 1 << 62}, {"branch": "x"}, {"turn": -1}]
)
async def test_a_malformed_answer_fails_its_own_sample(new_world: Any, tmp_path: Path, changes: Any) -> None:
    world = await asking_world(new_world, tmp_path)
    world.runner.say(another(await first_answer(world), **changes))
    world.runner.quiet = False
    world.runner.disconnect()
    world.connect_all()
    await world.settle()
    ends = dict(world.store.query("SELECT id, state FROM samples WHERE id LIKE 'g0.%'"))
    assert ends["g0.0"] == "failed" and world.run.finished


async def test_an_answer_of_an_old_lease_is_not_recorded(new_world: Any, tmp_path: Path) -> None:
    world = await asking_world(new_world, tmp_path)
    message = await first_answer(world)
    world.runner.say(msgspec.structs.replace(another(message, text="777"), lease=message.lease - 1))
    world.runner.say(msgspec.structs.replace(another(message, text="777"), sample="g99.0"))
    await world.store.drain()
    assert not world.store.query("SELECT * FROM answers")
    assert world.runner.peer.take() == [m.Cancel(["g99.0"])], "the lease may have crossed the message"
    world.runner.quiet = False
    world.runner.disconnect()
    await finish(world)


@pytest.mark.parametrize("why", ["new lineage", "agent"])
async def test_a_sample_that_begins_again_asks_again(new_world: Any, tmp_path: Path, why: str) -> None:
    world = await asking_world(new_world, tmp_path, AGENT_TASK if why == "agent" else None)
    await until_answered(world)
    old = world.runner.stored["g0.0"]
    if why == "agent":
        world.runner.disconnect()
        world.runner.reborn()
        world.connect_all()
    else:
        world.run.trajectories.start_over(world.run.trajectories.by_sample["g0.0"])
    await until(world, lambda: "g0.0" not in world.runner.stored)
    world.kill_coordinator()
    await world.start()
    await finish(world)
    [new] = recorded(world, "g0.0")
    assert new.text != old.text
    rows = world.store.query("SELECT attempt FROM answers WHERE sample = 'g0.0' ORDER BY attempt")
    assert len(rows) == 2 and rows[0][0] == 0 < rows[1][0]


async def test_an_agent_that_asked_before_its_first_turn_begins_again(new_world: Any, tmp_path: Path) -> None:
    """It has not requested a turn."""
    world = await asking_world(new_world, tmp_path, AGENT_TASK)
    world.runner._continue = lambda sample: None
    world.runner.connect()
    await until(world, lambda: "g0.0" in world.runner.driving)
    lease = world.runner.driving["g0.0"]
    world.runner.say(
        m.PoolAnswered("g0.0", m.PoolAnswer("", "f00d", 0, 0, "teacher", "1", "stop"), lease.attempt, lease.lease)
    )
    await world.store.drain()
    world.runner.disconnect()
    world.runner.reborn()
    world.runner.connect()
    await until(world, lambda: "g0.0" in world.runner.driving)
    again = world.runner.driving["g0.0"]
    assert again.attempt > lease.attempt and not again.answers
    del world.runner._continue
    world.runner.disconnect()
    await finish(world)


async def test_the_audit_finds_a_lost_answer_and_one_of_no_sample(new_world: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    world = await asking_world(new_world, tmp_path / "run")
    await finish(world)
    check_audit(tmp_path / "run")
    for i, (statement, message) in enumerate(
        [
            ("UPDATE answers SET position = position + 1", "its text is missing or damaged"),
            ("UPDATE answers SET sample_number = 999424", "its sample does not exist"),
            ("UPDATE answers SET attempt = 3", "its attempt, number or finish is not valid"),
            ("UPDATE answers SET finish = 'abort'", "its attempt, number or finish is not valid"),
        ]
    ):
        damaged = copy(tmp_path / "run", tmp_path / str(i))
        alter(damaged, f"{statement} WHERE sample = 'g0.0'")
        problems = [problem for check in audit(damaged).checks for problem in check.problems]
        assert any(message in problem for problem in problems), problems
