"""The fault environment restarts components as `rljob run` does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.fakes.fork_server import ForkServer
from e2e.fakes.harness import IMPORTS, make_job
from e2e.faults.environment import FaultEnvironment
from e2e.faults.ledger_checks import check
from e2e.faults.proxy import Moment

TRAINING = {"steps": 12, "promptsPerStep": 2, "samplesPerPrompt": 3, "maxStaleness": 0}


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer(*IMPORTS, "e2e.faults.short_times")) as server:
        yield server


@pytest.mark.timeout(300)
async def test_a_trainer_stopped_by_a_coordinator_that_dies_is_restarted_with_the_run(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    async with FaultEnvironment(make_job(training=TRAINING), tmp_path, fork_server) as environment:
        await environment.until_applied(2)
        suspending = asyncio.create_task(environment.suspend())

        def kill_coordinator() -> None:
            suspending.cancel()  # the next coordinator receives no request to suspend
            environment.kill_9("coordinator")

        await environment.inject_at(Moment("trainer", "Stop", "after"), kill_coordinator)
        applied = environment.applied
        await environment.until_applied(applied + 2)
        assert environment.applied >= applied + 2
        await environment.ended("trainer")
        await environment.succeeded()
    check(environment)
