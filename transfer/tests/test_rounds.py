"""Rounds and the receivers, over gloo between threads."""

import threading
import time

import blake3
import pytest
import torch

from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.bucket_wires import PlainWire, wire_buffers
from rljob.transfer.packed_weights import pack
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import SENDER_RANK, RendezvousListener
from rljob.transfer.rounds import KEPT_BUCKETS, receive_round, send_round
from rljob.transfer.weight_group import WeightGroup

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
def start():
    """Starter of a group: returns the sender's member and the workers of an engine, which have joined."""
    members = []

    def start(bucket_bytes, seconds=60.0, workers=2, transport="gloo"):
        listener = RendezvousListener("127.0.0.1", 1 + workers)
        engines = [Engine() for _ in range(workers)]
        threads = []
        for rank, engine in enumerate(engines, start=1):
            arguments = (listener.rendezvous, rank, transport, bucket_bytes, seconds)
            threads.append(threading.Thread(target=engine.receiver.join, args=arguments, daemon=True))
            threads[-1].start()
        members.append(WeightGroup.host(listener, transport, seconds))
        for thread in threads:
            thread.join()
        members.extend(engine.receiver for engine in engines)
        return members[-1 - workers], engines

    yield start
    for member in members:
        (member.leave if isinstance(member, WeightReceiver) else member.abandon)()


@pytest.fixture
def group(start):
    """Starter of a group with one worker."""

    def start_one(bucket_bytes, seconds=60.0, transport="gloo"):
        sender, (engine,) = start(bucket_bytes, seconds, 1, transport)
        return sender, engine

    return start_one


class Receiving:
    """Workers that receive one round in threads; ``errors`` has what each raised."""

    def __init__(self, engines, metas):
        self.errors = [None] * len(engines)
        self._threads = [
            threading.Thread(target=self._run, args=(i, engine, metas)) for i, engine in enumerate(engines)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, i, engine, metas):
        try:
            engine.receiver.receive(metas, engine.load, 60.0)
        except Exception as error:  # noqa: BLE001 the test looks at it
            self.errors[i] = error

    def wait(self):
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive()
        return self.errors


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
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_an_engine_loads_the_sent_tensors_for_any_bucket_size(group, bucket_bytes, transport):
    sender, engine = group(bucket_bytes, transport=transport)
    buffers = wire_buffers(transport, "cpu")
    for scale in (1.0, 2.0):  # the group serves the next update too
        expected = tensors(scale)
        weights = pack(expected, bucket_bytes, buffers=buffers)
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


def test_every_worker_of_an_engine_gets_every_tensor(start):
    sender, engines = start(40_000, workers=3)
    for scale in (1.0, 2.0):
        weights = pack(tensors(scale), 40_000)
        receiving = Receiving(engines, weights.parameters)
        sent = send_round(sender, weights, time.monotonic() + 60)
        assert receiving.wait() == [None] * 3
        for engine in engines:
            assert engine.receiver.digest == sent
            assert all(engine.loaded[name].equal(tensor) for name, tensor in tensors(scale))


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
@pytest.mark.parametrize("spoiled", [1, 2])
def test_no_worker_uses_an_update_of_which_another_one_received_other_bytes(start, monkeypatch, spoiled, transport):
    sender, engines = start(40_000, transport=transport)
    wire = engines[spoiled - 1].receiver._group.wire
    plain = wire.begin_receive

    def spoil(group, bucket, deadline):
        received = plain(group, bucket, deadline)

        def wait():
            received()
            bucket[5] += 1

        return wait

    monkeypatch.setattr(wire, "begin_receive", spoil)
    weights = pack(tensors(), 40_000, buffers=wire_buffers(transport, "cpu"))
    receiving = Receiving(engines, weights.parameters)
    with pytest.raises(ValueError, match=f"rank {spoiled} received other bytes"):
        send_round(sender, weights, time.monotonic() + 60)
    errors = [str(error) for error in receiving.wait()]
    assert f"but {weights.digest()} were sent" in errors.pop(spoiled - 1)
    assert errors == [f"the worker of rank {spoiled} received other bytes than were sent"]


def test_an_engine_may_hold_the_tensors_it_loads_for_longer_than_their_bucket(group):
    """vLLM holds the tensors of a layer until it has all of them, across buckets."""
    sender, engine = group(1000)
    held = {}
    for scale in (1.0, 2.0, 3.0):
        weights = pack([(f"t{i}", torch.full((300,), scale * i)) for i in range(20)], 1000)
        load = held.setdefault(scale, {}).update
        thread = threading.Thread(target=engine.receiver.receive, args=(weights.parameters, load, 60.0))
        thread.start()
        send_round(sender, weights, time.monotonic() + 60)
        thread.join()
    for scale, loaded in held.items():
        assert all(loaded[f"t{i}"].equal(torch.full((300,), scale * i)) for i in range(20))


class Playback:
    """A worker's end of a group that receives ``weights`` from no sender: gloo's threads hold a tensor a little longer
    than its broadcast takes."""

    rank, size, device, wire = 1, 2, "cpu", PlainWire()

    def __init__(self, weights):
        self._messages = [*weights.buckets, torch.frombuffer(bytearray.fromhex(weights.digest()), dtype=torch.uint8)]

    def broadcast(self, tensor, root, deadline):
        if root == SENDER_RANK:
            tensor.copy_(self._messages.pop(0))

    def begin_broadcast(self, tensor, root, deadline):
        self.broadcast(tensor, root, deadline)
        return lambda: None


def test_a_receiver_uses_the_memory_of_few_buckets_for_all_updates():
    buffers, places, parts = BucketBuffers(KEPT_BUCKETS), [], []

    def load(pairs):
        places.extend(tensor.data_ptr() for _, tensor in pairs)
        parts[:] = [tensor for _, tensor in pairs]  # held until the next bucket is loaded, as by vLLM

    weights = pack([(f"t{i}", torch.full((300,), float(i))) for i in range(20)], 1000)
    for _ in range(3):
        receive_round(Playback(weights), weights.plan, load, time.monotonic() + 60, buffers)
    assert len(places) == 60
    assert len(set(places)) <= KEPT_BUCKETS


@pytest.mark.parametrize("failing", [1, 2])
def test_a_worker_that_cannot_load_fails_the_update_of_all(start, monkeypatch, failing):
    sender, engines = start(40_000)

    def load(pairs):
        raise KeyError("no such parameter")

    monkeypatch.setattr(engines[failing - 1], "load", load)
    weights = pack(tensors(), 40_000)
    receiving = Receiving(engines, weights.parameters)
    with pytest.raises(RuntimeError):
        send_round(sender, weights, time.monotonic() + 60)
    sender.abandon()  # as WeightSender does: the other worker may wait for the sender
    assert all(receiving.wait())
