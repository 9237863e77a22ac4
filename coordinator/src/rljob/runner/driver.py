"""The trajectories of a runner: leased by the coordinator and kept until it acknowledges their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rljob.protocol.coordinator_link import MessageLink
from rljob.protocol.runner_protocol import (
    AckGroups,
    AckTrajectories,
    Cancel,
    FilterGroup,
    GenerateResult,
    LeaseTrajectory,
    PoolAnswerStored,
    RegisterRunner,
    TrajectoryFailed,
)
from rljob.runner.data import SPLITS
from rljob.runner.group_filter import FilteredGroups, GroupFilter
from rljob.runner.leased_trajectory import Codec, LeasedTrajectory, TaskRuntime
from rljob.runner.process_record import ProcessRecord
from rljob.runner.prompts import PromptSource
from rljob.runner.sample_tasks import make_task

CAPACITY = 4096


class RunnerDriver:
    """Receives the coordinator's messages and holds all leased trajectories.

    Args:
        instance: name of this process.
        connect: returns the link to the coordinator; its argument returns the messages to send first on every connect.
        runtimes: task name → task, loop and reward of its trajectories.
        prompts: the prompts of all tasks.
        codec: the policy's tokenizer.
        held_out: task name → number of rows of its held-out split; tasks with endless splits are absent.
        filters: task name → user-written group filter, of the tasks that have one.
        capacity: trajectories of training that it drives at a time, and as many of evaluations.
        record: whose code runs in this process, and how the process before ended.
    """

    def __init__(
        self,
        instance: str,
        connect: Callable[[Callable[[], list[Any]]], MessageLink],
        runtimes: dict[str, TaskRuntime],
        prompts: PromptSource,
        codec: Codec,
        held_out: dict[str, int],
        filters: Mapping[str, GroupFilter] = MappingProxyType({}),
        capacity: int = CAPACITY,
        record: ProcessRecord | None = None,
    ) -> None:
        self._instance = instance
        self._runtimes = runtimes
        self._prompts = prompts
        self._codec = codec
        self._held_out = held_out
        self._trajectories: dict[str, LeasedTrajectory] = {}
        self._capacity = capacity
        self._record = record or ProcessRecord()
        self._link = connect(self._register)
        self._groups = FilteredGroups(filters, self._link.send)

    async def run(self) -> None:
        """Serve the coordinator until cancelled.

        Raises:
            RefusedError: the coordinator rejects this runner permanently.
        """
        asyncio.get_running_loop().set_task_factory(make_task)
        async for message in self._link.messages():
            match message:
                case LeaseTrajectory():
                    self._lease(message)
                case GenerateResult():
                    if message.sample in self._trajectories:
                        self._trajectories[message.sample].receive(message)
                case PoolAnswerStored(sample=sample, answer=answer):
                    if sample in self._trajectories:
                        self._trajectories[sample].questions.receive(answer)
                case AckTrajectories(samples=samples):
                    for sample in samples:
                        self._acknowledge(sample)
                case Cancel(samples=samples):
                    for sample in samples:
                        self._cancel(sample)
                case FilterGroup():
                    self._groups.ask(message)
                case AckGroups(numbers=numbers):
                    self._groups.acknowledge(numbers)

    def close(self) -> None:
        """Cancel all trajectories and group filters; the coordinator leases them again, and asks again."""
        self._groups.close()
        for trajectory in self._trajectories.values():
            trajectory.cancel()

    def _register(self) -> list[Any]:
        pending = [message for trajectory in self._trajectories.values() for message in trajectory.pending]
        return [
            RegisterRunner(
                self._instance,
                self._capacity,
                {name: t.lease for name, t in self._trajectories.items()},
                self._held_out,
                self._record.before,
            ),
            *pending,
            *self._groups.pending,
        ]

    def _lease(self, lease: LeaseTrajectory) -> None:
        known = self._trajectories.get(lease.sample)
        if known is not None and known.lease != lease.lease:
            self._cancel(lease.sample)
            known = None
        if known is not None:
            for turn in lease.turns:
                known.receive(turn)
            for answer in lease.answers:
                known.questions.receive(answer)
            if known.finished:
                for result in known.pending:
                    self._link.send(result)
        elif lease.task not in self._runtimes or lease.split not in SPLITS:
            reason = f"there is no task {lease.task} with a split {lease.split}"
            self._link.send(TrajectoryFailed(lease.sample, reason, lease.attempt, lease.lease))
        else:
            self._trajectories[lease.sample] = LeasedTrajectory(
                lease, self._runtimes[lease.task], self._prompts, self._codec, self._link.send, self._record.running
            )

    def _acknowledge(self, sample: str) -> None:
        known = self._trajectories.get(sample)
        if known is not None and known.finished:
            del self._trajectories[sample]

    def _cancel(self, sample: str) -> None:
        known = self._trajectories.pop(sample, None)
        if known is not None:
            known.cancel()
