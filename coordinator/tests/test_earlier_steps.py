"""Moments of rewards and the adapted coefficient of KL, from the metrics of steps, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledgers import RecordingTrainer
from world import job

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.coordinator.earlier_steps import MEASURED_KL, EarlierStepsHistory
from rljob.protocol.trainer_protocol import Train


def history(**fields: Any) -> EarlierStepsHistory:
    """Return a history without steps."""
    algorithm = Algorithm.model_validate(fields)
    fill(algorithm)
    return EarlierStepsHistory(algorithm)


def metrics(rewards: list[float], kl: float | None = None) -> dict[str, float]:
    """Return the metrics of a step that are read."""
    found = {"samples": float(len(rewards)), "reward/mean": float(np.mean(rewards))}
    found["reward/std"] = float(np.std(rewards))
    return found if kl is None else found | {MEASURED_KL: kl}


def test_the_moments_are_those_of_all_earlier_rewards() -> None:
    generator = np.random.default_rng(0)
    batches = [generator.normal(3, 2, size).tolist() for size in (5, 1, 8, 3)]
    found = history()
    for step, batch in enumerate(batches):
        found.add(step, metrics(batch))
    before = found.before(0)
    assert (before.samples, before.reward_mean, before.reward_squares, before.kl_coefficient) == (0, 0, 0, None)
    for step in range(1, 5):
        rewards = np.concatenate(batches[:step])
        earlier = found.before(step)
        assert earlier.samples == len(rewards)
        assert earlier.reward_mean == pytest.approx(rewards.mean(), rel=1e-12)
        assert earlier.reward_squares == pytest.approx(np.square(rewards - rewards.mean()).sum(), rel=1e-12)


def test_the_coefficient_moves_towards_the_target_by_a_bounded_share() -> None:
    found = history(klCoefficient=0.1, klTarget=0.5, klHorizon=10)
    for step, kl in enumerate([0.55, 5.0, 0.0, None]):
        found.add(step, metrics([1.0], kl))
    coefficients = [found.before(step).kl_coefficient for step in range(5)]
    first = 0.1 * (1 + 0.1 / 10)
    assert coefficients == pytest.approx(
        [0.1, first, first * 1.02, first * 1.02 * 0.98, first * 1.02 * 0.98], rel=1e-12
    )


def test_without_a_target_the_coefficient_is_that_of_the_manifest() -> None:
    found = history(klCoefficient=0.1)
    found.add(0, metrics([1.0], 3.0))
    assert found.before(1).kl_coefficient is None


class Measuring(RecordingTrainer):
    """A trainer that reports a KL divergence, and keeps what it got of earlier steps."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.earlier: dict[int, list[Any]] = {}

    def _execute(self, command: Any) -> None:
        super()._execute(command)
        if isinstance(command, Train):
            self.earlier.setdefault(command.step, []).append(command.earlier)

    def say(self, *messages: Any) -> None:
        for done in self.done.values():
            done.metrics["reference_kl_k3"] = 0.1 * (done.step + 1)
        super().say(*messages)


async def test_a_batch_has_the_same_numbers_after_a_restart_and_in_a_replay(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(algorithm={"klCoefficient": 0.1, "klTarget": 0.2}), tmp_path)
    world.trainer = trainer = Measuring(world)
    await world.start()
    world.connect_all()
    while 2 not in trainer.earlier:
        await world.some(1)
    world.kill_coordinator()
    await world.start()
    trainer.reborn()
    world.connect_all()
    await world.settle()
    assert world.run.finished and sorted(trainer.earlier) == [0, 1, 2, 3]
    for step, found in trainer.earlier.items():
        assert all(each == found[0] for each in found), f"step {step}"
        assert found[0] == world.run.earlier.before(step)
    assert [found[0].samples for found in trainer.earlier.values()] == [0, 4, 8, 12]
    assert len({found[0].kl_coefficient for found in trainer.earlier.values()}) > 2
