"""Rank 0's conversation with the coordinator."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from rljob.protocol import messages as m
from rljob.trainer.coordinator_client import CoordinatorClient


@pytest.fixture
def cancelled() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def rank0(coordinator, cancelled) -> Iterator[CoordinatorClient]:
    made = CoordinatorClient(coordinator.url, coordinator.token, "trainer-x", 5, cancelled.put)
    yield made
    made.close()


async def command(rank0: CoordinatorClient) -> Any:
    return await asyncio.to_thread(rank0.next, 10)


async def test_commands_arrive_in_order_and_cancellations_at_once(coordinator, rank0, cancelled):
    rank0.start()
    registration = await coordinator.hear(m.RegisterTrainer)
    assert (registration.instance, registration.incarnation, registration.step) == ("trainer-x", 0, 5)
    await coordinator.tell(m.TrainerRegistered(3, 5), m.SendWeights(3, 1, []), m.CancelSend(3, 1, "e"), m.Stop("end"))
    kinds = [type(await command(rank0)) for _ in range(3)]
    assert kinds == [m.TrainerRegistered, m.SendWeights, m.Stop]
    assert cancelled.get(timeout=60).engine == "e"


async def test_a_reconnect_repeats_results_and_drops_commands_that_will_be_said_again(coordinator, rank0):
    rank0.post(m.StepDone(2, 4, {}))  # of an earlier incarnation: not repeated
    rank0.start()
    await coordinator.hear(m.RegisterTrainer)
    await coordinator.tell(m.TrainerRegistered(3, 5))
    await command(rank0)
    for result in (m.StepDone(3, 5, {}), m.StepDone(3, 6, {"loss": 1.0}), m.Checkpointed(3, 7, "checkpoints/x")):
        rank0.post(result)
        await coordinator.hear(type(result))
    await coordinator.tell(m.Checkpoint(3, 7, []), m.CancelSend(3, 1, "e"))
    await coordinator.socket.close()
    registration = await coordinator.hear(m.RegisterTrainer)
    assert (registration.incarnation, registration.step) == (3, 7)
    assert await coordinator.hear(m.StepDone) == m.StepDone(3, 6, {"loss": 1.0})
    assert await coordinator.hear(m.Checkpointed) == m.Checkpointed(3, 7, "checkpoints/x")
    await coordinator.tell(m.TrainerRegistered(3, 7))
    assert isinstance(await command(rank0), m.TrainerRegistered)


async def test_a_refused_token_is_a_command_to_leave(coordinator, cancelled):
    rank0 = CoordinatorClient(coordinator.url, "wrong", "trainer-x", 0, cancelled.put)
    rank0.start()
    refused = await command(rank0)
    assert isinstance(refused, m.Reject) and refused.fatal


async def test_waiting_ends_when_the_time_is_up(coordinator, rank0):
    assert rank0.next(0.001) is None


async def test_what_is_being_tried_again_is_given_up_for_an_order_to_stop_but_not_for_work(coordinator, rank0):
    rank0.start()
    await coordinator.hear(m.RegisterTrainer)
    await coordinator.tell(m.TrainerRegistered(3, 5))
    await command(rank0)
    await coordinator.tell(m.SendWeights(3, 1, []))
    assert not await asyncio.to_thread(rank0.overtaken, 0.1)
    waiting = asyncio.create_task(asyncio.to_thread(rank0.overtaken, 10))
    await coordinator.tell(m.Stop("the run failed"))
    assert await waiting


async def test_a_connection_that_broke_for_good_ends_the_process(coordinator, rank0, monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rank0._link, "messages", broken)
    rank0.start()
    with pytest.raises(RuntimeError, match="broke for good"):
        await command(rank0)
