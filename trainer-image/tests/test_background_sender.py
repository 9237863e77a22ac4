"""Sending in the background, with a fake sender that the test controls."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rljob.protocol.shared_messages import Probe
from rljob.protocol.trainer_protocol import CancelSend, EngineTarget, SendWeights, WeightGroupReady, WeightsSent
from rljob.trainer.background_sender import BackgroundSender
from rljob.trainer.weight_sender import WeightTransferError
from rljob.transfer.packed_weights import PackedWeights, pack
from rljob.transfer.rendezvous import Rendezvous

WEIGHTS = pack([("w", torch.ones(2, 3))], 1)
PROBE = Probe([[1, 2]], [[-1.0]])


@dataclass
class FakeSender:
    """Blocks in ``send`` until the test sets the event of the engine."""

    events: queue.Queue[tuple[Any, ...]] = field(default_factory=queue.Queue)
    finished: dict[str, threading.Event] = field(default_factory=dict)
    error: Exception | None = None

    def open(self, engine: str, fresh: bool, workers: int) -> Rendezvous:
        self.events.put(("open", engine, fresh))
        self.finished[engine] = threading.Event()
        return Rendezvous("nonce", "127.0.0.1", 1, 1 + workers)

    def send(self, engine: str, weights: PackedWeights) -> str:
        if self.error is not None:
            raise self.error
        assert self.finished[engine].wait(60)
        return weights.digest()

    def close(self, engine: str) -> None:
        self.events.put(("close", engine))

    def close_idle(self, seconds: float) -> None:
        assert seconds > 60


@pytest.fixture
def sender() -> FakeSender:
    return FakeSender()


@pytest.fixture
def posted() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def publisher(sender, posted) -> BackgroundSender:
    return BackgroundSender(sender, "gloo", posted.put)


def command(*engines: str, update: int = 4) -> SendWeights:
    return SendWeights(2, update, [EngineTarget(engine, True, 1) for engine in engines])


def test_without_engines_the_digest_is_posted(publisher, posted):
    publisher.publish(command(), WEIGHTS, PROBE)
    sent = posted.get(timeout=60)
    assert isinstance(sent, WeightsSent)
    assert (sent.engine, sent.digest, sent.error, sent.update) == ("", WEIGHTS.digest(), "", 4)


def test_each_engine_has_its_own_group_and_end(publisher, sender, posted):
    publisher.publish(command("a", "b"), WEIGHTS, PROBE)
    ready = {message.engine: message for message in (posted.get(timeout=60), posted.get(timeout=60))}
    assert ready.keys() == {"a", "b"}
    assert all(isinstance(message, WeightGroupReady) and message.probe == PROBE for message in ready.values())
    assert [(meta.name, meta.dtype, meta.shape) for meta in ready["a"].parameters] == [("w", "float32", [2, 3])]
    for engine in ("b", "a"):  # a slow engine does not delay others
        sender.finished[engine].set()
        sent = posted.get(timeout=60)
        assert (sent.engine, sent.digest, sent.error, sent.incarnation) == (engine, WEIGHTS.digest(), "", 2)


@pytest.mark.parametrize("error", [WeightTransferError("it died"), ZeroDivisionError("a bug")])
def test_a_failed_send_is_reported(publisher, sender, posted, error):
    sender.error = error
    publisher.publish(command("a"), WEIGHTS, PROBE)
    assert isinstance(posted.get(timeout=60), WeightGroupReady)
    sent = posted.get(timeout=60)
    assert str(error) in sent.error and sent.digest == ""


def test_a_cancelled_send_is_answered_once_and_at_once(publisher, sender, posted):
    publisher.publish(command("a"), WEIGHTS, PROBE)
    assert isinstance(posted.get(timeout=60), WeightGroupReady)
    publisher.cancel(CancelSend(2, 4, "a"))
    assert posted.get(timeout=60).error == "cancelled"
    assert sender.events.get(timeout=60)[0] == "open" and sender.events.get(timeout=60) == ("close", "a")
    sender.finished["a"].set()
    publisher.publish(command(update=5), WEIGHTS, PROBE)
    assert posted.get(timeout=60).update == 5
    assert posted.empty()


def test_a_send_can_be_cancelled_before_it_begins(publisher, sender, posted):
    publisher.cancel(CancelSend(2, 4, "a"))
    publisher.publish(command("a"), WEIGHTS, PROBE)
    sent = posted.get(timeout=60)
    assert (sent.engine, sent.error) == ("a", "cancelled")
    assert sender.events.empty()


def test_after_a_reconnect_earlier_sends_are_not_answered(publisher, sender, posted):
    publisher.publish(command("a"), WEIGHTS, PROBE)
    assert isinstance(posted.get(timeout=60), WeightGroupReady)
    publisher.forget()
    finished = sender.finished["a"]
    publisher.publish(command("a", update=5), WEIGHTS, PROBE)
    assert posted.get(timeout=60).update == 5
    finished.set()
    sender.finished["a"].set()
    assert posted.get(timeout=60).update == 5
    assert posted.empty()
