"""Rounds and the receiver, over gloo between two threads."""

import threading
import time

import blake3
import pytest
import torch

from rljob.transfer.packed_weights import pack
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.rounds import send_round
from rljob.transfer.weight_group import WeightGroup

torch.set_num_threads(1)
LONGER_THAN_A_TEST = 1000.0
"""Timeout of a group whose operation must end by its own deadline; the time limit of the test is shorter."""


def tensors(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    return [
        ("a", torch.randn(300, 100, generator=generator) * scale),
        ("b", torch.randn(7, generator=generator).to(torch.bfloat16)),
        ("c", torch.randn(64, 128, generator=generator).t()),  # not contiguous, and not aligned in its bucket
        ("d", torch.randn((), generator=generator)),
    ]


class Engine:
    """A receiver that stores the loaded tensors."""

    def __init__(self):
        self.receiver = WeightReceiver("cpu")
        self.loaded = {}

    def load(self, pairs):
        self.loaded.update((name, tensor.clone()) for name, tensor in pairs)


@pytest.fixture
def group():
    """Starter of a group: returns the sender's member and an engine that has joined."""
    members = []

    def start(bucket_bytes, seconds=60.0):
        listener = RendezvousListener("127.0.0.1", 2)
        engine = Engine()
        arguments = (listener.rendezvous, 1, "gloo", bucket_bytes, seconds)
        thread = threading.Thread(target=engine.receiver.join, args=arguments, daemon=True)
        thread.start()
        members.append(WeightGroup.host(listener, "gloo", seconds))
        thread.join()
        members.append(engine.receiver)
        return members[-2], engine

    yield start
    for member in members:
        (member.leave if isinstance(member, WeightReceiver) else member.abandon)()


def test_packed_weights_have_types_and_shapes_and_unsupported_types_are_rejected():
    metas = pack(tensors(), 1).parameters
    assert [(m.name, m.dtype, m.shape) for m in metas] == [
        ("a", "float32", [300, 100]),
        ("b", "bfloat16", [7]),
        ("c", "float32", [128, 64]),
        ("d", "float32", []),
    ]
    with pytest.raises(ValueError, match="parameter q is int64"):
        pack([("q", torch.zeros(2, dtype=torch.int64))], 1)


@pytest.mark.parametrize("bucket_bytes", [1, 40_000, 1 << 30])
def test_an_engine_loads_the_sent_tensors_for_any_bucket_size(group, bucket_bytes):
    sender, engine = group(bucket_bytes)
    for scale in (1.0, 2.0):  # the group serves the next update too
        expected = tensors(scale)
        weights = pack(expected, bucket_bytes)
        thread = threading.Thread(target=engine.receiver.receive, args=(weights.parameters, engine.load, 60.0))
        thread.start()
        sent = send_round(sender, weights, time.monotonic() + 60)
        thread.join()
        plain = b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, t in expected)
        assert sent == engine.receiver.digest == weights.digest() == blake3.blake3(plain).hexdigest()
        assert engine.loaded.keys() == dict(expected).keys()
        assert all(engine.loaded[name].equal(tensor) for name, tensor in expected)


def test_a_receiver_that_did_not_join_refuses_to_receive():
    with pytest.raises(RuntimeError, match="no weight group is joined"):
        WeightReceiver("cpu").receive(pack(tensors(), 1).parameters, lambda pairs: None, 1.0)


def test_a_receiver_leaves_when_the_sender_sends_nothing_until_the_timeout(group):
    _sender, engine = group(50_000, LONGER_THAN_A_TEST)
    with pytest.raises(RuntimeError):
        engine.receiver.receive(pack(tensors(), 1).parameters, engine.load, 0.3)
    with pytest.raises(RuntimeError, match="no weight group is joined"):
        engine.receiver.receive(pack(tensors(), 1).parameters, engine.load, 0.3)


def test_a_receiver_whose_load_fails_leaves_and_the_sender_fails(group):
    sender, engine = group(50_000)

    def load(pairs):
        raise KeyError("no such parameter")

    def receive():
        with pytest.raises(KeyError):
            engine.receiver.receive(pack(tensors(), 1).parameters, load, 60.0)

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(RuntimeError):
        send_round(sender, pack(tensors(), 50_000), time.monotonic() + 60)
    thread.join()
