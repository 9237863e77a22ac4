"""The soak's plan, what it tears, and its report. The soak itself is `make soak`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.faults.cases import PHASES
from e2e.soak import results, soak_run, whole_run
from e2e.soak.fault import Fault, FaultError
from e2e.soak.plan import FAMILIES, FULL_MINUTES, count, expected_seconds, plan, steps_until_restart
from e2e.soak.results import Outcome, RunResult
from e2e.soak.soak_run import MORE_STEPS, SoakRun
from e2e.soak.victims import VICTIMS

SEEDS = range(20)
START_SECONDS = 60.0
NETWORK_VICTIMS = {"agent", "trainer", "coordinator", "reward", "engine", "all"}
CASES = [case for family in FAMILIES.values() for case in family.cases]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_soak_has_sixty_faults_of_all_families_within_its_time(seed: int) -> None:
    runs = plan(seed, FULL_MINUTES)
    assert list(runs) == [0, 1, 2]
    assert sum(map(count, runs.values())) >= results.MIN_FAULTS
    for faults in runs.values():
        assert count(faults) >= 20
        assert {fault.family for fault in faults} == set(FAMILIES)
        assert START_SECONDS + expected_seconds(faults) < 60 * FULL_MINUTES / len(runs)


def test_a_plan_is_a_function_of_seed_and_minutes() -> None:
    assert plan(3, 30.0) == plan(3, 30.0)
    assert plan(3, 30.0) != plan(4, 30.0)
    assert all({fault.family for fault in faults} == set(FAMILIES) for faults in plan(3, 1.0).values())
    assert sum(map(count, plan(3, 60.0).values())) > sum(map(count, plan(3, 30.0).values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_cases_of_a_family_come_equally_often(family: str) -> None:
    faults = [fault.name for faults in plan(5, 90.0).values() for fault in faults if fault.family == family]
    counts = Counter({case.name: 0 for case in FAMILIES[family].cases})
    counts.update(faults)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert min(counts.values()) >= 1


def test_cases_are_unique_and_name_victims_and_messages_that_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    messages = {message for phase in PHASES.values() for message in phase}
    for family in ("cut", "silence", "loss"):
        assert {case.victim for case in FAMILIES[family].cases} <= NETWORK_VICTIMS
    assert {case.victim for case in FAMILIES["kill"].cases} == set(VICTIMS)
    assert {case.victim for case in FAMILIES["stop"].cases} == set(VICTIMS)
    assert {case.victim for case in FAMILIES["hang"].cases} <= set(VICTIMS)
    moments = [case.moment for case in CASES if case.moment is not None]
    assert {(moment.component, moment.message) for moment in moments} <= messages
    assert {moment.when for moment in moments} <= {"before", "after"}


def test_stops_last_20_and_90_seconds() -> None:
    assert {case.seconds for case in FAMILIES["stop"].cases} == {20.0}
    assert {case.seconds for case in FAMILIES["hang"].cases} == {90.0}


@pytest.mark.parametrize("seed", SEEDS)
def test_other_processes_are_killed_beside_one_that_hangs(seed: int) -> None:
    for faults in plan(seed, FULL_MINUTES).values():
        for fault in faults:
            victims = [fault.victim, *(other.victim for other in fault.beside)]
            assert len(set(victims)) == len(victims) == (3 if fault.family == "hang" else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_come_before_and_after_each_restart(seed: int) -> None:
    for faults in plan(seed, FULL_MINUTES).values():
        places = [i for i, fault in enumerate(faults) if fault.family == "restart"]
        assert len(places) == 2
        assert all(second - first > 1 for first, second in zip([0, *places], [*places, len(faults)], strict=True))


def test_a_fault_can_be_left_out() -> None:
    assert all("checkpoint" not in fault.name for faults in plan(1, 60.0, ("checkpoint",)).values() for fault in faults)


def test_steps_are_planned_until_the_next_restart() -> None:
    one, restart = Fault("kill", "kill", "runner"), Fault("restart", "kill", "payload")
    assert steps_until_restart([]) == 1
    assert steps_until_restart([one, restart, one, one]) == 1 + one.steps + restart.steps
    assert steps_until_restart([one, one]) == 1 + 2 * one.steps


def test_torn_files_end_as_after_a_power_cut(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("payload", "texts")]
    for folder in folders:
        folder.mkdir()
    segments = [folder / name for folder in folders for name in ("000001", "000002")]
    for path in (tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", *segments):
        path.write_bytes(b'{"event": "started"}\n')
    assert whole_run.damage(tmp_path, "all files", random.Random(1)) is None
    assert (tmp_path / "events.jsonl").read_bytes() == (tmp_path / "metrics.jsonl").read_bytes() == b'{"event": "sta'
    assert [path.stat().st_size for path in segments] == [21, 56, 21, 56]
    assert (tmp_path / "status.json").read_bytes() == b""
    assert (tmp_path / "ports.json").read_bytes() == b"{"


def test_a_damaged_checkpoint_keeps_its_length_and_the_one_before_is_expected(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000009.tmp-1").mkdir(parents=True)
    for name in ("step-000003", "step-000006"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(bytes(5000))
    assert whole_run.damage(tmp_path, whole_run.CHECKPOINT, random.Random(1)) == 3
    older, newest = (
        (tmp_path / "checkpoints" / name / "model.safetensors").read_bytes() for name in ("step-000003", "step-000006")
    )
    assert older == bytes(5000) != newest
    assert len(newest) == 5000


def result_of(*problems: str, audits: tuple[str, ...] = ("",)) -> RunResult:
    outcomes = [Outcome("kill", "kill runner", float(i), problem) for i, problem in enumerate(problems)]
    return RunResult(1, [Outcome(results.CHECK, "the run ends", 1.0), *outcomes], list(audits), steps=9)


def test_all_targets_hold_after_sixty_survived_faults() -> None:
    targets = results.targets([result_of(*[""] * 60)], 1500.0, 30.0, [])
    assert {name: one["holds"] for name, one in targets.items()} == dict.fromkeys(targets, True)
    figures = results.figures([result_of(*[""] * 60)], 1500.0, {"seed": 1})
    assert (figures["faults"], figures["minutes"], figures["seed"]) == (60, 25.0, 1)
    assert (figures["recovery_seconds_p50"], figures["recovery_seconds_max"]) == (29.5, 59.0)
    assert figures["families"] == {"kill": {"injected": 60, "survived": 60}}


@pytest.mark.parametrize(
    ("missed", "runs", "seconds", "not_run"),
    [
        ("faults", [result_of(*[""] * 59)], 60.0, []),
        ("not_survived", [result_of(*[""] * 60, "no batch")], 60.0, []),
        ("audits_not_clean", [result_of(*[""] * 60, audits=("", "FAILED"))], 60.0, []),
        ("minutes", [result_of(*[""] * 60)], 1900.0, []),
        ("families_not_run", [result_of(*[""] * 60)], 60.0, ["loss"]),
    ],
)
def test_a_target_is_missed(missed: str, runs: list[RunResult], seconds: float, not_run: list[str]) -> None:
    targets = results.targets(runs, seconds, 30.0, not_run)
    assert [name for name, one in targets.items() if not one["holds"]] == [missed]


def test_a_check_that_fails_is_an_outcome_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = RunResult(2)
    with result.checking("the run ends"):
        raise FaultError("exit code 1")
    assert result.failed
    assert [(one.family, one.problem) for one in result.outcomes] == [(results.CHECK, "exit code 1")]
    assert "the run ends" in capsys.readouterr().err


class FakeRljob:
    """Has exited with a code; a second start keeps running."""

    def __init__(self, code: int, started: asyncio.Event) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.exited.set_result(code)
        self.started = started
        self.steps: list[int] = []

    async def start(self, steps: int) -> None:
        self.steps.append(steps)
        self.exited = asyncio.get_running_loop().create_future()
        self.started.set()


async def test_a_run_that_trained_all_steps_too_early_gets_more(tmp_path: Path) -> None:
    run, event = SoakRun(tmp_path, 1, tmp_path, 1, tmp_path), asyncio.Event()
    run.rljob = rljob = FakeRljob(0, event)  # type: ignore[assignment]
    await run.until(event)
    assert rljob.steps == [MORE_STEPS]


async def test_a_run_that_fails_while_an_event_is_awaited_does_not_survive(tmp_path: Path) -> None:
    run, event = SoakRun(tmp_path, 1, tmp_path, 1, tmp_path), asyncio.Event()
    run.rljob = FakeRljob(1, event)  # type: ignore[assignment]
    with pytest.raises(FaultError, match="exited with code 1"):
        await run.until(event)


async def test_a_fault_waits_for_its_victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, tries = SoakRun(tmp_path, 1, tmp_path, 1, tmp_path), 0

    def begin(run: SoakRun, fault: Fault) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise FaultError("there is no process runner")

    monkeypatch.setattr(soak_run, "POLL_SECONDS", 0)
    monkeypatch.setitem(FAMILIES, "kill", replace(FAMILIES["kill"], begin=begin))
    await run._begin(Fault("kill", "kill", "runner"))
    assert tries == 3
