"""Samples and checkpoints on NFS, the ledger on a volume of its own: kills in mid-commit lose nothing.

Every pod mounts the volume as a client of its own from a real NFS server, see :mod:`e2e.pods.nfs.server`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.pods.full.test_many_deaths import complete, small
from e2e.pods.job import RESTRICTED, Job
from e2e.pods.killing import kill_processes, processes
from e2e.pods.nfs.server import CLASS, NfsServer
from e2e.system_packages import require_packages
from rljob.ledger.segments import HEADER
from tools.cluster.node import Cluster, Node

START_SECONDS, SECONDS = 600.0, 240.0
COMMITS, CHECKPOINTS = 3, 1
"""How often the coordinator is killed in a commit, and the trainer while it writes a checkpoint."""
TRIES = 4
"""A kill may come too late: it is then done again, so often at most."""
OUTAGE_SECONDS = 10.0
POLL_SECONDS = 0.0002
REFERENCED = "SELECT segment, MAX(position + length) AS length FROM completions GROUP BY segment"
MOUNTS = """
import os
mounts = dict(line.split()[1:3] for line in open("/proc/mounts"))
print(mounts["/var/lib/rljob"], mounts[os.environ["RLJOB_LEDGER"]])
"""

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture
def server(node: Cluster) -> Iterator[NfsServer]:
    """The NFS server of the volume."""
    if not isinstance(node, Node):
        pytest.skip("the server runs in the network of this machine's own cluster")
    require_packages("nfs")
    with NfsServer(node) as found:
        yield found


@pytest.fixture
def job(node: Cluster, installed: Any, server: NfsServer) -> Iterator[Job]:
    """The job; nothing uses the server after its end."""
    storage = {"className": CLASS, "accessModes": ["ReadWriteMany"], "ledger": {"size": "1Gi"}}
    name = node.namespace("nfs", RESTRICTED)
    yield Job(node, name, small(storage=storage))
    node.kubectl("delete", "namespace", name, "--timeout=120s")


def sizes(server: NfsServer) -> dict[str, int]:
    """Return the size of each segment of the payload."""
    return {path.name: path.stat().st_size for path in (server.export / "payload").glob("*.segment")}


def until_begun(begun: Callable[[], bool], what: str) -> None:
    """Return as soon as something has begun: it takes a few milliseconds."""
    deadline = time.monotonic() + SECONDS
    while not begun():
        assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}"
        time.sleep(POLL_SECONDS)


def kill_coordinator_in_a_commit(job: Job, server: NfsServer) -> bool:
    """Kill the coordinator after it has written records and before it has committed the rows that refer to them.

    Returns:
        Whether the kill came in time: a segment ends with a record that no row refers to.
    """
    lives, victims, before = job.lives(), processes(job.pod("coordinator")), sizes(server)

    def grown() -> dict[str, int]:
        return {name: size for name, size in sizes(server).items() if size > before.get(name, 0)}

    until_begun(lambda: bool(grown()), "a record")
    kill_processes(victims)
    name = f"{job.name}-coordinator-0"
    job.until(lambda: job.lives()[name] != lives[name], SECONDS, "the coordinator to be started again")
    written = grown()
    job.run_status()
    referenced = {f"{row['segment']:08d}.segment": row["length"] + HEADER.size for row in job.ledger(REFERENCED)}
    return any(size > referenced.get(segment, 0) for segment, size in written.items())


def kill_trainer_in_a_checkpoint(job: Job, server: NfsServer) -> bool:
    """Kill the trainer while it writes a checkpoint; return whether the kill came before the end of writing."""
    victims = processes(job.pod("trainer"))

    def unfinished() -> set[Path]:
        return set((server.export / "checkpoints").glob("*.tmp-*"))

    before = unfinished()
    until_begun(lambda: bool(unfinished() - before), "a checkpoint")
    kill_processes(victims)
    return bool(unfinished() - before)


def times(count: int, kill: Callable[[Job, NfsServer], bool], job: Job, server: NfsServer) -> None:
    """Kill until so many kills came in time; the run makes progress after each."""
    done = 0
    for _ in range(count + TRIES):
        done += kill(job, server)
        job.reaches(job.step() + 1, SECONDS)
        if done == count:
            return
    raise AssertionError(f"{done} of {count + TRIES} kills came in time, not {count}")


def test_a_run_on_nfs_with_its_own_ledger_volume_survives_kills_in_mid_commit(job: Job, server: NfsServer) -> None:
    job.apply()
    job.reaches(1, START_SECONDS)
    storage, ledger = job.python(MOUNTS).split()
    assert storage == "fuse.nfs" and ledger != storage
    assert not (server.export / "ledger.sqlite").exists()
    times(COMMITS, kill_coordinator_in_a_commit, job, server)
    times(CHECKPOINTS, kill_trainer_in_a_checkpoint, job, server)
    server.kill()
    time.sleep(OUTAGE_SECONDS)
    server.start()
    complete(job, SECONDS * 2)
