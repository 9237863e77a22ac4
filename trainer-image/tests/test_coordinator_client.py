"""Rank 0's connection to the coordinator."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from rljob.protocol import trainer_protocol as m
from rljob.protocol.shared_messages import Reject
from rljob.trainer.coordinator_client import CoordinatorClient


@pytest.fixture
def cancelled() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def rank0(coordinator, cancelled) -> Iterator[CoordinatorClient]:
    made = CoordinatorClient(coordinator.url, coordinator.token, m.RegisterTrainer("trainer-x", 0, 5), cancelled.put)
    yield made
    made.close()


async def command(rank0: CoordinatorClient) -> Any:
    return await asyncio.to_thread(rank0.next, 10)


async def test_commands_arrive_in_order_and_cancellations_at_once(coordinator, rank0, cancelled):
    rank0.start()
    registration = await coordinator.receive(m.RegisterTrainer)
    assert (registration.instance, registration.incarnation, registration.step) == ("trainer-x", 0, 5)
    await coordinator.send(m.TrainerRegistered(3, 5), m.SendWeights(3, 1, []), m.CancelSend(3, 1, "e"), m.Stop("end"))
    kinds = [type(await command(rank0)) for _ in range(3)]
    assert kinds == [m.TrainerRegistered, m.SendWeights, m.Stop]
    assert cancelled.get(timeout=60).engine == "e"


async def test_a_reconnect_repeats_results_and_drops_queued_commands(coordinator, rank0):
    rank0.post(m.StepDone(2, 4, {}))  # of an earlier incarnation: not repeated
    rank0.start()
    await coordinator.receive(m.RegisterTrainer)
    await coordinator.send(m.TrainerRegistered(3, 5))
    await command(rank0)
    missing = m.RefusedCheckpoint(6, "the trainer did not find it")
    for _ in range(2):
        rank0.refuse([missing])
        again = await coordinator.receive(m.RegisterTrainer)
        assert (again.incarnation, again.refused) == (3, [missing])
    for result in (m.StepDone(3, 5, {}), m.StepDone(3, 6, {"loss": 1.0}), m.Checkpointed(3, 7, "checkpoints/x")):
        rank0.post(result)
        await coordinator.receive(type(result))
    await coordinator.send(m.Checkpoint(3, 7, []), m.CancelSend(3, 1, "e"))
    await coordinator.socket.close()
    registration = await coordinator.receive(m.RegisterTrainer)
    assert (registration.incarnation, registration.step, registration.refused) == (3, 7, [missing])
    assert await coordinator.receive(m.StepDone) == m.StepDone(3, 6, {"loss": 1.0})
    assert await coordinator.receive(m.Checkpointed) == m.Checkpointed(3, 7, "checkpoints/x")
    await coordinator.send(m.TrainerRegistered(3, 7))
    assert isinstance(await command(rank0), m.TrainerRegistered)


async def test_a_rejected_token_is_a_fatal_reject_command(coordinator, cancelled):
    rank0 = CoordinatorClient(coordinator.url, "wrong", m.RegisterTrainer("trainer-x", 0, 0), cancelled.put)
    rank0.start()
    refused = await command(rank0)
    assert isinstance(refused, Reject) and refused.fatal


async def test_waiting_for_a_command_ends_by_the_timeout(coordinator, rank0):
    assert rank0.next(0.001) is None


async def test_a_retried_command_is_obsolete_after_stop_but_not_after_other_commands(coordinator, rank0):
    rank0.start()
    await coordinator.receive(m.RegisterTrainer)
    await coordinator.send(m.TrainerRegistered(3, 5))
    await command(rank0)
    await coordinator.send(m.SendWeights(3, 1, []))
    assert not await asyncio.to_thread(rank0.wait_obsolete, 0.1)
    waiting = asyncio.create_task(asyncio.to_thread(rank0.wait_obsolete, 10))
    await coordinator.send(m.Stop("the run failed"))
    assert await waiting


async def test_a_permanent_failure_of_the_connection_is_raised(coordinator, rank0, monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rank0._link, "messages", broken)
    rank0.start()
    with pytest.raises(RuntimeError, match="a thread of the trainer failed"):
        await command(rank0)
