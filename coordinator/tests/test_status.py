"""What the status and Prometheus report about the components."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from world import job

from rljob.api.job_status import LONGEST_REASON, EvaluationResult
from rljob.coordinator import serve
from rljob.coordinator.metrics import API_REQUESTS, REFUSED, REGISTRY, ConnectionCollector, RunCollector
from rljob.coordinator.progress import RunHistory
from rljob.coordinator.routes import build_app
from rljob.coordinator.status_report import status_of
from rljob.coordinator.status_sync import StatusSyncCollector
from rljob.coordinator.tracking import TrackingWriter, finish
from rljob.protocol import agent_protocol as m
from rljob.protocol.connection_limits import HttpLimits, OpenConnections
from rljob.protocol.run_status import HistoryPoint, decode_status, run_fields, status_from
from rljob.scheduling.groups import REJECTED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"

NAMES = {
    "rljob_run_state", "rljob_training_steps", "rljob_samples_trained_total",
    "rljob_policy_version", "rljob_lineage", "rljob_trainer_incarnation", "rljob_engines",
    "rljob_generated_tokens_total", "rljob_engine_crashes_total", "rljob_engine_seconds_total",
    "rljob_samples_discarded_total", "rljob_events_total", "rljob_trained_staleness_bucket",
    "rljob_trained_staleness_count", "rljob_trained_staleness_sum",
    "rljob_step_response_length_trained_over_scored", "rljob_step_response_length_trained_ks_p",
    "rljob_step_response_length_cut_share",
    "rljob_step_dispatch_members_at_home", "rljob_step_dispatch_turns_at_home",
    "rljob_step_weights_update_seconds", "rljob_step_weights_pause_seconds",
    "rljob_samples", "rljob_role_load",
    "rljob_groups", "rljob_accuracy", "rljob_pass_at", "rljob_step_reward_mean", "rljob_step_staleness_mean",
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
    world.trainer.connect()
    while world.run.trainer.session.busy != "Train":  # its digest comes first
        await world.some(1)
    world.trainer.hold = True
    world.agents[0].say(m.EngineCrashed("main", "vLLM was killed by signal 9", "out of memory", 2, False))
    await world.some(3)
    components = {each.role: each for each in status_of(world.run).components}
    assert (components["trainer"].restarts, components["trainer"].state) == (1, "Train")
    assert components["trainer"].message == "repeating the steps after its checkpoint: step 0 of 2"
    assert "signal 9" in components["agent"].message and components["agent"].state == "ready"
    world.agents[0].say(m.EngineCrashed("main", "vLLM cannot run this model", "", 3, True, final=True))
    await world.some(3)
    assert "failed" in {each.state for each in status_of(world.run).components if each.role == "agent"}
    assert components["runner"].instance == world.runner.peer.instance


async def test_the_names_of_figures_for_prometheus_stay(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(evaluation={"problems": 2, "passAt": [1]}), tmp_path)
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


async def test_a_cluster_has_the_metrics_of_the_run_however_many_the_trainer_has(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    world.run.progress.last_step = {f"trainer/{i}": 0.0 for i in range(99)} | world.run.progress.last_step
    names = [metric["name"] for metric in run_fields(status_of(world.run))["metrics"]]
    own = {"reward/mean", "dispatch/turns_at_home", "weights/pause_seconds", "tokens_per_second", "engine_seconds/dead"}
    assert own < set(names) and len(names) == 64 and names[-1].startswith("trainer/")


async def test_the_buckets_of_staleness_have_all_samples_up_to_their_bound(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.run.progress.staleness.update({0: 3, 5: 2, 100: 1})
    [family] = [each for each in RunCollector(world.run).collect() if each.name == "rljob_trained_staleness"]
    found = {(sample.name[len(family.name) :], sample.labels.get("le")): sample.value for sample in family.samples}
    assert (found["_count", None], found["_sum", None]) == (6, 110)
    assert {bound: value for (name, bound), value in found.items() if name == "_bucket"} == {
        "0.0": 3, "1.0": 3, "2.0": 3, "3.0": 3, "4.0": 3, "6.0": 5, "8.0": 5, "12.0": 5, "16.0": 5, "32.0": 5,
        "64.0": 5, "+Inf": 6,
    }  # fmt: skip


async def test_the_page_on_monitoring_has_every_metric_with_type_and_labels(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(evaluation={"problems": 2, "passAt": [1]}), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    client, throttle = SimpleNamespace(last_event_at=1.0), SimpleNamespace(applied={}, at=1.0)
    declared = [REFUSED, API_REQUESTS]
    families = [family for metric in declared for family in metric.collect()]
    connections = OpenConnections(HttpLimits())
    connections.count("invalid HTTP request")
    families += [*ConnectionCollector(connections).collect(), *RunCollector(world.run).collect()]
    families += [*StatusSyncCollector(client, throttle).collect()]  # type: ignore[arg-type]
    labels = {family.name: {name for sample in family.samples for name in sample.labels} for family in families}
    labels |= {metric.describe()[0].name: set(metric._labelnames) for metric in declared}
    served = {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type): labels[family.name]
        for family in families
    }
    trained = {key for key in served if key[0].startswith("rljob_step_trainer_")}
    assert trained and not any(served.pop(key) for key in trained)
    served[("rljob_step_trainer_*", "gauge")] = set()
    table = PAGE.read_text().partition("| metric of the coordinator |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    documented = {
        (name.strip("`"), kind): set(re.findall(r"`(\w+)`", cell.partition(":")[0])) for name, kind, cell in rows
    }
    assert documented == served
    (discarded,) = (cell for name, _, cell in rows if "discarded" in name)
    assert set(re.findall(r"`(\w+)`", discarded.partition(":")[2])) == set(REJECTED)


async def test_the_status_counts_ended_samples_and_has_the_last_failure_also_after_a_restart(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(evaluation={"problems": 2}), tmp_path)
    world.reward = lambda sample, result: math.nan if sample in ("g1.0", "e0.1.0") else 1.0
    await world.start()
    world.connect_all()
    await world.settle()
    ended = status_of(world.run).ended
    assert (ended.trained, ended.failed, ended.last_failure) == (16, 2, "its reward is nan")
    recorded = world.store.query("SELECT state, COUNT(*) FROM samples WHERE id LIKE 'g%' GROUP BY state")
    assert {row[0]: row[1] for row in recorded} == {n: x for n, x in vars(ended).items() if x and n != "last_failure"}
    assert status_from(run_fields(status_of(world.run))).ended == ended, "in a cluster without a coordinator"
    world.kill_coordinator()
    await world.start()
    assert status_of(world.run).ended == ended


async def test_the_last_failure_is_the_last_in_time_also_after_a_restart(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    while len(world.run.trajectories.by_sample) < 4:
        await world.some(1)
    for sample in ("g1.0", "g0.0"):
        world.run.outcomes.failed(world.run.trajectories.by_sample[sample], f"{sample} failed", "runner")
    assert status_of(world.run).ended.last_failure == "g0.0 failed"
    await world.store.drain()
    world.kill_coordinator()
    await world.start()
    assert status_of(world.run).ended.last_failure == "g0.0 failed"


async def test_only_the_owner_reads_why_samples_failed(new_world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(REGISTRY, "register", lambda collector: None)
    world = new_world(job(), tmp_path)
    await world.start()
    world.run.last_failure = "ValueError: the answer is a secret"
    world.run.evaluations.results.append(EvaluationResult(0, "sums", 0.0, 2, 0.0, 1, "ValueError: a secret"))
    world.run.failure = ("TooManyFailedSamples", "the last failure: a secret")
    app = build_app(world.run, {"owner": "token", "agent": "other"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://coordinator") as client:
        for token in ("other", ""):
            answer = await client.get("/v1/status", headers={"Authorization": f"Bearer {token}"})
            assert "secret" not in answer.text
            assert decode_status(answer.content).state == "Failed"
        answer = await client.get("/v1/status", headers={"Authorization": "Bearer token"})
    status = decode_status(answer.content)
    assert [status.ended.last_failure, status.evaluations[0].failure, status.message] == [
        *("ValueError: the answer is a secret", "ValueError: a secret", "the last failure: a secret")
    ]


async def test_reasons_in_the_status_are_one_printable_line_of_bounded_length(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.run.last_failure = "\x1b]0;title\x07\n" + "long " * 1000
    world.run.evaluations.results.append(EvaluationResult(0, "sums", 0.0, 2, 0.0, 1, "\x9b" * 1000))
    world.run.failure = ("X", "the end:\n\x1b[2Jof it")
    status = status_of(world.run)
    assert status.ended.last_failure.startswith(r"\x1b]0;title\x07\nlong ") and status.ended.last_failure.endswith("…")
    assert status.evaluations[0].failure.startswith(r"\x9b\x9b") and status.message == "the end:\n\\x1b[2Jof it"
    assert len(status.ended.last_failure) == len(status.evaluations[0].failure) == LONGEST_REASON


def reporting(run: Any, finished: asyncio.Event) -> asyncio.Task[None]:
    tracking = SimpleNamespace(write=lambda: False, close=lambda: None)
    return asyncio.create_task(serve._report(run, finished, tracking, Path("status.json")))  # type: ignore[arg-type]


async def test_the_status_file_is_written_again_when_a_descriptor_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written, failures = asyncio.Event(), [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def write(*_: object) -> None:
        if failures:
            raise failures.pop()
        written.set()

    monkeypatch.setattr(serve, "write_status", write)
    monkeypatch.setattr(serve, "STATUS_SECONDS", 0.0)
    task = reporting(SimpleNamespace(ended=asyncio.Event()), asyncio.Event())
    await written.wait()
    task.cancel()
    assert caplog.messages == ["status.json cannot be written: Too many open files; retrying"]


def ending(number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, asyncio.Task[None], list[str | None]]:
    """Return a run that has finished, the task that reports it, and the states written to the status file. The first
    write fails with an error number."""
    run, finished = SimpleNamespace(ended=asyncio.Event(), failure=None, finished=True), asyncio.Event()
    failures, states = [OSError(number, os.strerror(number))], list[str | None]()

    def write(_run: object, _path: object, state: str | None = None) -> None:
        assert not run.ended.is_set()
        if failures:
            raise failures.pop()
        states.append(state)

    monkeypatch.setattr(serve, "write_status", write)
    monkeypatch.setattr(serve, "RETRY_SECONDS", 0.0)
    finished.set()
    return run, reporting(run, finished), states


async def test_the_end_of_a_run_is_reported_once_it_is_in_the_status_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run, task, states = ending(errno.EMFILE, monkeypatch)
    await run.ended.wait()
    task.cancel()
    assert states == ["Succeeded"]


async def test_a_full_disk_at_the_end_of_a_run_ends_the_process_without_a_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, task, states = ending(errno.ENOSPC, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        await task  # it is started again when there is space
    assert not run.ended.is_set() and not states


def test_the_speed_shown_is_a_mean_over_the_last_steps() -> None:
    history = RunHistory(time.monotonic)
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
    metrics = {metric.name: metric.value for metric in status_of(world.run).metrics}
    assert metrics["tokens_per_second"] == world.run.progress.tokens_per_second(4) > 0


async def test_a_step_has_the_same_metrics_in_status_and_metrics_jsonl_also_after_a_restart(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    before = world.run.progress
    finish(TrackingWriter(tmp_path, tensorboard=False))
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
    world.run.progress.last_step[f"trainer/{'x' * 99}"] = 1.0
    assert {metric.name for metric in status_of(world.run).metrics} == set(shown), "the CRD permits no longer name"
