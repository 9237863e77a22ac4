"""Every component × every phase × every fault: the run continues, and its final ledger is correct.

The coordinator and the runner are real, engine, trainer and reward are fakes; all are processes. Cases of one fault
share runs (see e2e/faults/run_cases.py), so the first test runs all cases and the others look up their
outcome. To run a single case: RLJOB_THOROUGH=1 pytest e2e/test_kill_matrix.py -k NAME.

`make thorough` tries all cases, `make test` a selection of them (see e2e/faults/cases.py).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.faults.cases import Case, all_cases, cases_of_every_change, selected_cases
from e2e.faults.disk import NoMountsError, private_mounts

ROOT = Path(__file__).resolve().parents[1]
CASES = {case.name: case for case in selected_cases()}
TIMEOUT_SECONDS = 1800

Outcomes = dict[str, str]


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], str]:
    """Return the outcome of a case; the first call runs it with all selected cases that can share its run."""
    here = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["name"] for item in here if item.originalname == "test_the_run_survives"]
    directory = tmp_path_factory.mktemp("matrix")

    @functools.cache
    def outcomes(disk: bool) -> Outcomes:
        names = [name for name in selected if (CASES[name].fault == "full") == disk]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "e2e.faults.run_cases",
            str(directory / f"disk-{disk}"),
            *names,
        ]
        namespace = mount_namespace_or_skip() if disk else []
        done = subprocess.run([*namespace, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: Outcomes = json.loads(done.stdout)
        return found

    return lambda case: outcomes(case.fault == "full")[case.name]


def mount_namespace_or_skip() -> list[str]:
    try:
        return private_mounts()
    except NoMountsError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize("name", CASES)
def test_the_run_survives(name: str, outcome: Callable[[Case], str]) -> None:
    problem = outcome(CASES[name])
    assert not problem, problem


def test_the_selected_cases_cover_every_fault_component_and_message() -> None:
    def cells(cases: list[Case], of: Callable[[Case], tuple[object, ...]]) -> set[tuple[object, ...]]:
        return {of(case) for case in cases}

    some, everything = cases_of_every_change(), all_cases()
    assert set(some) < set(everything) and len(set(some)) == len(some)
    kills, all_kills = ([case for case in cases if case.fault == "kill"] for cases in (some, everything))
    for of in (
        lambda case: (case.victim, case.phase, case.moment.component, case.moment.message),
        lambda case: (case.phase, case.moment.message, case.moment.when),
    ):
        assert cells(kills, of) == cells(all_kills, of)
    for of in (
        lambda case: (case.fault, case.victim),
        lambda case: (case.fault, case.victim, case.moment.when),
        lambda case: (case.fault, case.phase, case.moment.component, case.moment.message),
    ):
        assert cells(some, of) == cells(everything, of)
