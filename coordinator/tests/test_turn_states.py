"""States of an environment before turns: recorded with the score, and sent to a trainer whose advantage needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from world import Runner, Trainer, job

from rljob.protocol.runner_protocol import TrajectoryScored
from rljob.protocol.turn_states import check_states, state_digest

TASK = {
    "name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r", "sampling": {"maxTokens": 16},
    "loop": "mypackage:loop",
}  # fmt: skip


class Stateful(Runner):
    """A runner whose turn t begins in state t."""

    def say(self, *messages: Any) -> None:
        super().say(*(self._named(message) for message in messages))

    @staticmethod
    def _named(message: Any) -> Any:
        if not isinstance(message, TrajectoryScored):
            return message
        return msgspec.structs.replace(message, states=[state_digest(str(turn)) for turn in range(message.turns)])


async def trained(new_world: Any, tmp_path: Path, **algorithm: Any) -> tuple[Any, list[Any]]:
    """Run a job to its end; return the world and the samples of its first batch."""
    world = new_world(job(algorithm=algorithm, tasks=[TASK]), tmp_path)
    world.runner, batches = Stateful(world), []
    check = Trainer.check
    world.trainer.check = lambda command, data: (batches.append(command), check(world.trainer, command, data))
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    return world, batches[0].samples


@pytest.mark.parametrize("advantage", ["gigpo", "mypackage:variant"])
async def test_the_trainer_gets_rewards_and_states_of_turns_if_its_advantage_may_read_them(
    new_world: Any, tmp_path: Path, advantage: str
) -> None:
    world, samples = await trained(new_world, tmp_path, advantage=advantage)
    assert {len(sample.turn_states) for sample in samples} > {1}, "some have several turns"
    for sample in samples:
        turns = world.runner.turns_of(sample.sample)
        assert sample.turn_states == [state_digest(str(turn)) for turn in range(turns)]
        assert len(sample.turn_rewards) == turns and sum(sample.turn_rewards) == pytest.approx(sample.reward)


async def test_other_trainers_do_not_get_them(new_world: Any, tmp_path: Path) -> None:
    _, samples = await trained(new_world, tmp_path, preset="grpo")
    assert all(sample.turn_states == [] and sample.turn_rewards == [] for sample in samples)


@pytest.mark.parametrize("states", [["0" * 16], ["", "x"], ["", "0" * 15]])
def test_states_of_other_turns_and_no_digests_are_refused(states: list[str]) -> None:
    with pytest.raises(ValueError, match=r"it has states of 1 turns|is not a digest"):
        check_states(states, 2)


def test_equal_names_are_equal_states() -> None:
    check_states([state_digest("a"), state_digest("\ud800"), ""], 3)
    assert state_digest("a") == state_digest("a") != state_digest("b")
