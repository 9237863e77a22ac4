"""What the status and Prometheus say of the parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from world import job, m

from rljob.coordinator.metrics import RunCollector
from rljob.coordinator.progress import RunProgress
from rljob.coordinator.status import status_of
from rljob.coordinator.tracking import Tracking, finish
from rljob.protocol.status import HistoryPoint

NAMES = {
    "rljob_policy_version", "rljob_lineage", "rljob_trainer_incarnation", "rljob_engines",
    "rljob_generated_tokens_total", "rljob_engine_crashes_total", "rljob_samples_discarded_total", "rljob_samples",
    "rljob_groups", "rljob_accuracy", "rljob_step_reward_mean", "rljob_step_staleness_mean",
    "rljob_step_staleness_max", "rljob_step_tokens_per_second", "rljob_step_trainer_loss",
}  # fmt: skip


async def test_parts_say_how_often_they_died_and_why(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(checkpoints={"everySteps": 50}), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.version < 2:
        await world.some(1)
    world.trainer.disconnect()
    world.trainer.reborn()
    world.trainer.hold = True
    world.trainer.connect()
    world.agents[0].say(m.EngineCrashed("main", "vLLM was killed by signal 9", "out of memory", 2, False))
    await world.some(3)
    parts = {part.role: part for part in status_of(world.run).parts}
    assert (parts["trainer"].restarts, parts["trainer"].state) == (1, "Train")
    assert parts["trainer"].message == "doing again what came after its checkpoint: step 0 of 2"
    assert "signal 9" in parts["agent"].message
    assert parts["runner"].instance == world.runner.peer.instance


async def test_the_names_of_figures_for_prometheus_stay(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(evaluation={"problems": 2}), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    world.agents[0].say(m.EngineCrashed("main", "vLLM was killed by signal 9", "", 1, False))
    registry = CollectorRegistry()
    registry.register(RunCollector(world.run))
    samples = [
        sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    assert {sample.name for sample in samples} == NAMES
    deaths = [sample for sample in samples if sample.name == "rljob_engine_crashes_total"]
    assert [(sample.labels, sample.value) for sample in deaths] == [({"pool": "main"}, 1.0)]


def test_the_speed_shown_is_a_mean_over_the_last_steps() -> None:
    history = RunProgress()
    assert history.tokens_per_second(8) == 0
    for step, (rate, seconds) in enumerate([(100.0, 1.0), (0.0, 2.0), (60.0, 5.0), (0.0, 6.0)]):
        history.points.append(HistoryPoint(step, 0.0, 0.0, rate, seconds))
    assert history.tokens_per_second(2) == 180 / 4
    assert history.tokens_per_second(4) == history.tokens_per_second(8) == 280 / 6


async def test_the_clock_of_a_run_that_is_done_stands(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    progress = status_of(world.run).progress
    assert status_of(world.run).progress.seconds == progress.seconds > 0
    assert progress.eta_seconds == -1, "nothing is left to wait for"


async def test_the_speed_of_a_run_that_is_done_is_that_of_the_whole_run(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    figures = {metric.name: metric.value for metric in status_of(world.run).metrics}
    assert figures["tokens_per_second"] == world.run.progress.tokens_per_second(4) > 0


async def test_a_step_has_the_same_metrics_in_status_and_metrics_jsonl_also_after_a_restart(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    before = world.run.progress
    finish(Tracking(tmp_path, tensorboard=False))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for point, line in zip(before.points, lines, strict=True):
        assert point.reward == line["reward/mean"] and point.staleness == line["staleness/mean"]
        assert point.seconds == line["seconds"] and point.tokens_per_second == line["tokens_per_second"]
    shown = {metric.name: metric.value for metric in status_of(world.run).metrics}
    names = {"reward/mean", "staleness/mean", "staleness/max", "trainer/loss"}
    assert {name: shown[name] for name in names} == {name: lines[-1][name] for name in names}
    world.kill_coordinator()
    await world.start()
    assert world.run.progress.points == before.points
    assert world.run.progress.summary() == before.summary()
    assert status_of(world.run).progress.seconds >= before.points[-1].seconds
