"""Turns of tests in several processes that share one cluster: a test that stops a part of the cluster runs alone."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from tools.cluster.node.place import outside


@contextlib.contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Wait for a turn, beside other tests or ``alone``, and keep it."""
    root = outside().root
    root.mkdir(parents=True, exist_ok=True)
    with (root / "queue.lock").open("w") as queue, (root / "tests.lock").open("w") as tests:
        fcntl.flock(queue, fcntl.LOCK_EX)  # a test that waits to run alone lets no other test pass
        fcntl.flock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def installing() -> Iterator[None]:
    """Keep the other processes from installing: helm refuses two upgrades of a chart at the same time."""
    root = outside().root
    root.mkdir(parents=True, exist_ok=True)
    with (root / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
