"""How the coordinator follows its RLJob, and when it applies status.run: without an API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from world import job

from rljob.api.job_status import EngineStatus, EvaluationResult, Metric, Progress, Queue, RunState
from rljob.coordinator import rljob_client
from rljob.coordinator.rljob_client import JobRef, RLJobView, job_ref_from_environment
from rljob.coordinator.status_report import status_of
from rljob.coordinator.status_sync import APPLY_SECONDS, ApplyThrottle, StatusSync
from rljob.protocol.run_status import RunStatus, run_fields

RUN_STATE = TypeAdapter(RunState)
HERE = JobRef("https://127.0.0.1:1", "default", "sums", "uid", Path())


def view(generation: int, suspend: bool = False, draining: tuple[str, ...] = ()) -> RLJobView:
    found = RLJobView()
    found.metadata.generation, found.spec.suspend, found.status.draining = generation, suspend, list(draining)
    return found


async def running_world(new_world: Any, tmp_path: Path) -> Any:
    """Return a world during its run."""
    world = new_world(job(steps=6), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.version < 2:
        await world.some(1)
    return world


async def test_a_job_that_is_suspended_ends_suspended(new_world: Any, tmp_path: Path) -> None:
    world = await running_world(new_world, tmp_path)
    StatusSync(world.run, HERE).on_update(view(2, suspend=True))
    await world.settle()
    status = status_of(world.run)
    assert (status.state, status.observed_generation) == ("Suspended", 2)


async def test_a_job_that_kueue_evicts_ends_suspended_without_another_generation(
    new_world: Any, tmp_path: Path
) -> None:
    world = await running_world(new_world, tmp_path)
    evicted = view(1)
    evicted.status.evicted_at = "2026-11-28T00:00:00Z"
    StatusSync(world.run, HERE).on_update(evicted)
    await world.settle()
    status = status_of(world.run)
    assert (status.state, status.observed_generation) == ("Suspended", 1)


@pytest.mark.parametrize("after", range(0, 12, 2))
async def test_a_suspension_is_cancelled_while_that_is_safe(new_world: Any, tmp_path: Path, after: int) -> None:
    world = await running_world(new_world, tmp_path)
    sync = StatusSync(world.run, HERE)
    sync.on_update(view(2, suspend=True))
    await world.some(after)
    late = world.run.suspended
    sync.on_update(view(3))
    await world.settle()
    assert sync._too_late.is_set() == late
    assert (status_of(world.run).state, world.run.observed_generation) == (
        ("Suspended", 2) if late else ("Succeeded", 3)
    )
    if not late:
        world.check_accounts()


async def test_a_suspension_of_another_client_is_not_cancelled(new_world: Any, tmp_path: Path) -> None:
    world = await running_world(new_world, tmp_path)
    world.run.suspend()
    StatusSync(world.run, HERE).on_update(view(1))
    await world.settle()
    assert status_of(world.run).state == "Suspended"


async def test_engines_in_status_draining_are_drained(new_world: Any, tmp_path: Path) -> None:
    world = await running_world(new_world, tmp_path)
    StatusSync(world.run, HERE).on_update(view(1, draining=("engine-0.0",)))
    assert all(world.run.draining.drains(engine) for engine in world.run.engines.connected())


def fields(**more: Any) -> dict[str, Any]:
    return run_fields(
        RunStatus(**({"state": "Running", "progress": Progress(1, 4, seconds=10.0, eta_seconds=20.0)} | more))
    )


@pytest.mark.parametrize(
    ("changed", "at_once", "later"),
    [
        ({}, False, False),
        ({"progress": Progress(1, 4, seconds=99.0, eta_seconds=1.0)}, False, False),
        ({"metrics": [Metric("seconds/training", 99.0)]}, False, False),
        ({"progress": Progress(2, 4, seconds=10.0, eta_seconds=20.0)}, False, True),
        ({"queues": [Queue("waiting", 1)]}, False, True),
        ({"engines": [EngineStatus("a", 1)]}, False, True),
        ({"message": "waiting for the trainer to connect"}, False, True),
        ({"state": "Suspended"}, True, True),
        ({"observed_generation": 2}, True, True),
        ({"engines": [EngineStatus("a", 0, True)]}, True, True),
    ],
)
def test_the_status_is_applied_at_once_if_the_state_changes_and_never_for_times_alone(changed, at_once, later) -> None:
    throttle = ApplyThrottle(fields(), at=100.0)
    assert throttle.due(fields(**changed), 100.0 + APPLY_SECONDS - 0.1) is at_once
    assert throttle.due(fields(**changed), 100.0 + APPLY_SECONDS) is later


def shown(version: int, state: str | None) -> RLJobView:
    """Return the RLJob with a status.run."""
    found = view(1)
    found.metadata.resource_version = str(version)
    found.status.run = None if state is None else rljob_client._Run(state)
    return found


@pytest.mark.parametrize(("state", "version", "due"), [
    (None, 8, True),  # deleted
    ("Running", 8, True),  # restored from a backup
    ("Succeeded", 8, False),
    ("Running", 6, False),  # an event from before the apply
    ("Running", 7, False),
])  # fmt: skip
def test_a_status_that_another_client_overwrote_is_applied_again(state: str | None, version: int, due: bool) -> None:
    throttle, ended = ApplyThrottle(), fields(state="Succeeded")
    throttle.done(ended, 7, 100.0)
    throttle.on_update(shown(version, state))
    assert not throttle.due(ended, 100.0 + APPLY_SECONDS - 0.1), (
        "two conflicting writers write at intervals, not immediately"
    )
    assert throttle.due(ended, 100.0 + APPLY_SECONDS) is due
    throttle.done(ended, version + 1, 110.0)
    assert not throttle.due(ended, 200.0)


async def test_the_applied_fields_match_the_schema_of_status_run(new_world: Any, tmp_path: Path) -> None:
    world = await running_world(new_world, tmp_path)
    status = status_of(world.run)
    applied = RUN_STATE.validate_python(run_fields(status))
    assert applied.progress.text == f"{world.run.version}/6 {100 * world.run.version // 6}%"
    assert applied.staleness and applied.engines[0].name == "engine-0.0"
    assert RUN_STATE.validate_python(run_fields(RunStatus("Failed", "X", "m" * 9999))).message == "m" * 4096
    warned = RUN_STATE.validate_python(run_fields(RunStatus("Running", warnings=["w" * 9999])))
    assert warned.warnings == ["w" * 4096]
    ugly = [Metric("loss", float("nan")), *(Metric(f"m{i}", 1.0) for i in range(99))]
    assert len(RUN_STATE.validate_python(run_fields(RunStatus("Running", metrics=ugly))).metrics) == 64


def test_the_first_and_the_newest_evaluations_outlive_the_coordinator() -> None:
    results = [EvaluationResult(version, "sums", 0.5, 16, 0.5) for version in range(99)]
    few, many = (
        RUN_STATE.validate_python(run_fields(RunStatus("Running", evaluations=some))) for some in (results[:2], results)
    )
    assert [result.version for result in few.evaluations] == [0, 1]
    assert [result.version for result in many.evaluations] == [*range(32), *range(67, 99)]


def test_the_job_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLJOB_NAMESPACE", "RLJOB_JOB_NAME", "RLJOB_JOB_UID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert job_ref_from_environment() is None
    monkeypatch.setenv("RLJOB_NAMESPACE", "ns")
    monkeypatch.setenv("RLJOB_JOB_NAME", "sums")
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST is not set"):
        job_ref_from_environment()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    job_ref = job_ref_from_environment()
    assert job_ref is not None
    assert (job_ref.server, job_ref.account) == (
        "https://[fd00::1]:6443",
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
    )
