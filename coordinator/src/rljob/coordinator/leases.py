"""Leases of open samples: which runner drives which sample, and the samples that wait for a runner."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping
from functools import cached_property

from rljob.coordinator.connection import Connection
from rljob.coordinator.event_counts import EventCounts, Requeue
from rljob.coordinator.trajectory import Trajectory
from rljob.ledger.states import Kind
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import runner_protocol as m


class RunnerLeases:
    """The trajectories that a runner holds, in the order of their leases. ``capacity``: of each kind."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[Kind, dict[str, Trajectory]] = {kind: {} for kind in Kind}

    def free(self, kind: Kind) -> int:
        """Return how many more trajectories of a kind the runner takes."""
        return self._capacity - len(self._held[kind])

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory."""
        self._held[trajectory.kind][trajectory.sample.id] = trajectory

    def remove(self, trajectory: Trajectory) -> None:
        """Remove a trajectory."""
        self._held[trajectory.kind].pop(trajectory.sample.id, None)

    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories."""
        return [trajectory for held in self._held.values() for trajectory in held.values()]


class Leases:
    """The leases of one run. A trajectory is here from :meth:`wait` to :meth:`remove`; after a change of trajectories
    or runners :meth:`assign` leases what it can.

    Args:
        ledger: a lease is sent once all that precedes it is durable.
        before_lease: called with a trajectory just before it gets a lease.
        events: counts of the run.
    """

    def __init__(self, ledger: LedgerWriter, before_lease: Callable[[Trajectory], None], events: EventCounts) -> None:
        self._ledger = ledger
        self._events = events
        self._before_lease = before_lease
        self._runners: dict[Connection, RunnerLeases] = {}
        self._unleased: dict[str, Trajectory] = {}
        self._waiting: dict[Kind, list[tuple[tuple[int, int, int], str]]] = {kind: [] for kind in Kind}
        """Heaps of (order, sample) of the unleased trajectories, and of some that have been leased or dropped since."""
        self._last_number = 0

    def restore(self, starts: int) -> None:
        """Continue the numbers of leases in the coordinator process number ``starts``: the numbers of each process are
        higher than those of all processes before it."""
        self._last_number = starts << 32

    def next_number(self) -> int:
        """Return the next number, of a lease or of a group that a runner filters."""
        self._last_number += 1
        return self._last_number

    @cached_property
    def _now(self) -> Callable[[], float]:
        return asyncio.get_running_loop().time

    @property
    def runners(self) -> list[Connection]:
        """The connected runners."""
        return [connection for connection in self._runners if connection.open]

    @property
    def waiting(self) -> int:
        """Number of trajectories without a runner."""
        return len(self._unleased)

    def wait(self, trajectory: Trajectory) -> None:
        """Let a trajectory without a runner wait for one."""
        self._unleased[trajectory.sample.id] = trajectory
        trajectory.since = self._now()
        heapq.heappush(self._waiting[trajectory.kind], (trajectory.order, trajectory.sample.id))

    def remove(self, trajectory: Trajectory) -> None:
        """Remove a trajectory that ended, without a message to its runner."""
        if trajectory.runner is not None:
            self._runners[trajectory.runner].remove(trajectory)
        self._unleased.pop(trajectory.sample.id, None)

    def release(self, trajectory: Trajectory, reason: Requeue) -> None:
        """Cancel the lease of a trajectory, and let it wait for another one."""
        self._events.requeued(reason)
        if trajectory.runner is not None:
            trajectory.runner.send(m.Cancel([trajectory.sample.id]))
            self._runners[trajectory.runner].remove(trajectory)
            trajectory.runner = None
        self.wait(trajectory)
        self.assign()

    def register(
        self,
        connection: Connection,
        capacity: int,
        driving: Mapping[str, int],
        by_sample: Mapping[str, Trajectory],
    ) -> None:
        """Register a runner, or register it again.

        Args:
            connection: connection of the runner.
            capacity: how many leases it accepts.
            driving: sample → lease that it already holds. The newest lease of a sample counts: after a restart of the
                coordinator, runners may report several.
            by_sample: sample → trajectory of all open samples.
        """
        for other in list(self._runners):
            if other.instance == connection.instance and other is not connection:
                self._remove_runner(other)
        leases = self._runners.setdefault(connection, RunnerLeases(max(1, capacity)))
        for sample_id, lease in driving.items():
            trajectory = by_sample.get(sample_id)
            holder = None if trajectory is None else trajectory.runner
            held = holder not in (None, connection)
            if trajectory is None or lease < trajectory.lease or (held and lease == trajectory.lease):
                connection.send(m.Cancel([sample_id]))
                continue
            if held and holder is not None:
                self._runners[holder].remove(trajectory)
                holder.send(m.Cancel([sample_id]))
            trajectory.runner, trajectory.lease = connection, lease
            trajectory.since = self._now()
            leases.add(trajectory)
            self._unleased.pop(sample_id, None)
        self.assign()

    def lose(self, connection: Connection) -> None:
        """Remove a runner; its leases go to other runners."""
        self._remove_runner(connection)
        self.assign()

    def _remove_runner(self, connection: Connection) -> None:
        leases = self._runners.pop(connection, None)
        for trajectory in leases.trajectories() if leases is not None else []:
            self._events.requeued("runner_lost")
            trajectory.runner = None
            self.wait(trajectory)

    def assign(self) -> None:
        """Lease samples without a runner to the runners with the most free capacity, in order of admission. Evaluations
        have a capacity of their own: the trainer may wait for them."""
        if not self._unleased:
            return
        for kind, waiting in self._waiting.items():
            if waiting:
                self._assign_kind(kind, waiting)

    def _assign_kind(self, kind: Kind, waiting: list[tuple[tuple[int, int, int], str]]) -> None:
        while waiting:
            trajectory = self._unleased.get(waiting[0][1])
            if trajectory is None:
                heapq.heappop(waiting)
                continue
            runner = self._freest(kind)
            if runner is None:
                return
            _, sample_id = heapq.heappop(waiting)
            del self._unleased[sample_id]
            self._lease(trajectory, runner)

    def _freest(self, kind: Kind) -> Connection | None:
        """Return the connected runner with the most free capacity for a kind; None if none has any."""
        freest, most = None, 0
        for runner, leases in self._runners.items():
            free = leases.free(kind)
            if free > most and runner.open:
                freest, most = runner, free
        return freest

    def _lease(self, trajectory: Trajectory, runner: Connection) -> None:
        self._before_lease(trajectory)
        trajectory.runner, trajectory.since = runner, self._now()
        self._runners[runner].add(trajectory)
        turns = [turn.tokens(*key) for key, turn in trajectory.turns.items() if turn.finished]
        split = "train" if trajectory.version is None else "heldOut"
        trajectory.lease = self.next_number()
        lease = m.LeaseTrajectory(
            trajectory.sample.id, trajectory.task, trajectory.row, split, turns, trajectory.attempts, trajectory.lease,
            [*trajectory.answers.values()],
        )  # fmt: skip
        self._ledger.then(runner.send, lease)
