"""For all tests: their order when several processes share them out, the examples of hypothesis, a clean process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ("tools.cluster.fixtures",)

# Before torch is imported, here and in processes that tests start. A second thread of torch waits for the first one by
# spinning: with three test processes on two cores, a model took twelve times as much CPU to train.
os.environ["OMP_NUM_THREADS"] = "1"

# A fork never collects the garbage of the tests before it: the destructor of a process group waits for its threads,
# which a fork does not have.
os.register_at_fork(after_in_child=gc.freeze)

# No example has a deadline, and no draw is called slow: both are times, and the machine may be busy.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("thorough"), derandomize=True)
# `make test` draws the same examples every time, so that no change fails by chance; `make thorough` draws new ones.
settings.load_profile("thorough" if os.environ.get("RLJOB_THOROUGH") else "repeatable")

LONGEST_FIRST = (
    "e2e/test_real_run.py",
    "e2e/test_kill_matrix.py",
    "rollout-image/tests/test_engine.py",
    "rollout-image/tests/test_engine_parallel.py",
    "e2e/test_extensions.py",
    "e2e/test_bad_input.py",
    "trainer-image/tests/test_launch.py",
    "e2e/test_docs.py",
    "e2e/test_corrupted_update.py",
    "e2e/test_resume.py",
    "cli/tests/test_local_run.py",
    "trainer-image/tests/test_trainer_process.py",
    "e2e/test_every_field.py",
    "coordinator/tests/test_run.py",
    "e2e/integration/test_operator_faults_restart.py",
    "e2e/integration/test_benchmark.py",
    "e2e/integration/test_coordinator.py",
    "e2e/integration/test_pages.py",
    "e2e/integration/test_crd_install.py",
    "e2e/integration/test_operator_life.py",
    "e2e/integration/test_operator_faults_others.py",
    "e2e/integration/test_operator_faults.py",
    "e2e/pods/test_long_job.py",
    "e2e/pods/test_cli_in_a_cluster.py",
    "e2e/pods/test_without_an_engine.py",
)
"""Files of a quarter of a minute and more. After them come the other files of e2e, which start processes; the files of
unit tests fill the gaps, so that all workers end at the same time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, in a worker of pytest-xdist only: alone, short tests come first."""
    if not hasattr(config, "workerinput"):
        return
    place = {config.rootpath / name: i for i, name in enumerate(LONGEST_FIRST)}
    whole_runs = config.rootpath / "e2e"
    items.sort(key=lambda item: place.get(item.path, len(place) + (whole_runs not in item.path.parents)))


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Keep what an entry point does to its process, when a test calls it in this one, from all tests after it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    logging.disable(logging.NOTSET)
    after = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert after == mask, f"the test blocked signals, and left them so: {after - mask}"
