"""Sending weights: the received bytes, and the time limit with a dead, stopped or absent peer."""

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time

import blake3
import psutil
import pytest
import torch

from rljob.protocol.shared_messages import Probe
from rljob.protocol.trainer_protocol import EngineTarget, SendWeights
from rljob.protocol.weights import plan_buckets
from rljob.trainer.background_sender import BackgroundSender
from rljob.trainer.weight_sender import WeightSender, WeightTransferError
from rljob.transfer.packed_weights import pack
from rljob.transfer.rounds import receive_round
from rljob.transfer.weight_group import WeightGroup
from rljob.transfer.wire_plan import WirePlan

LONGER_THAN_A_TEST = 1000.0
"""Timeout of a group whose send must end by its own deadline; the time limit of the test is shorter."""


def tensors(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    return [
        ("a", torch.randn(300, 100, generator=generator) * scale),
        ("b", torch.randn(7, generator=generator).to(torch.bfloat16)),
        ("c", torch.randn(64, 128, generator=generator).t()),  # not contiguous
        ("d", torch.randn((), generator=generator)),
    ]


def packed(scale=1.0, bucket_bytes=50_000):
    return pack(tensors(scale), bucket_bytes)


def sender(seconds=60.0, host="127.0.0.1"):
    return WeightSender(host, seconds, "gloo")


class Peer:
    """The engine's side of the wire format in rljob.protocol.weights."""

    def __init__(self, info, seconds=60.0):
        self.group = WeightGroup.join(info, 1, "gloo", seconds)
        self.deadline = time.monotonic() + seconds
        self.received = b""

    def receive(self, metas, bucket_bytes=50_000, spoil=False):
        round_bytes = b""
        for bucket in plan_buckets(metas, bucket_bytes):
            size = sum(t.numel() * t.element_size() for t in (tensors()[i][1] for i in bucket))
            buffer = torch.empty(size, dtype=torch.uint8)
            self.broadcast(buffer, 0)
            round_bytes += bytes(buffer.numpy())
        self.received = round_bytes
        self.broadcast(sent := torch.zeros(32, dtype=torch.uint8), 0)
        assert bytes(sent) == blake3.blake3(round_bytes).digest()
        receipt = blake3.blake3(round_bytes + (b"!" if spoil else b"")).digest()
        self.broadcast(torch.frombuffer(bytearray(receipt), dtype=torch.uint8), 1)

    def broadcast(self, tensor, root):
        self.group.broadcast(tensor, root, self.deadline)


def in_thread(target, *args, **kwargs):
    thread = threading.Thread(target=target, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_byte_arrives_in_order_and_the_digest_is_the_receivers(host):
    out, arrived = sender(host=host), {}
    info = out.open("e", fresh=False)

    def engine():
        peer = Peer(info)
        for _ in range(2):  # the same group serves the next update
            peer.receive(packed().parameters)
        arrived["bytes"] = peer.received

    thread = in_thread(engine)
    assert out.send("e", packed()) == packed().digest()
    assert out.open("e", fresh=False) == info
    sent = out.send("e", packed(2.0))
    thread.join()
    assert sent == packed(2.0).digest() != packed().digest()
    plain = b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, t in tensors(scale=2.0))
    assert arrived["bytes"] == plain
    assert sent == blake3.blake3(plain).hexdigest()


def test_the_digest_does_not_depend_on_the_bucket_size():
    digests = set()
    for bucket_bytes in (1, 40_000, 1 << 30):
        out = sender()
        info = out.open("e", fresh=False)
        thread = in_thread(lambda i=info, b=bucket_bytes: Peer(i).receive(packed().parameters, b))
        digests.add(out.send("e", packed(bucket_bytes=bucket_bytes)))
        thread.join()
    assert digests == {packed().digest()}


def test_a_send_to_an_engine_that_never_joins_ends_by_the_timeout():
    out = sender(LONGER_THAN_A_TEST)
    first = out.open("e", fresh=False)
    out._timeout = 1.0
    with pytest.raises(WeightTransferError, match="engine e did not receive"):
        out.send("e", packed())
    assert out.open("e", fresh=False) != first, "a broken group is not handed out again"


def _closed(info):
    try:
        socket.create_connection((info.address, info.port), 60.0).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_process_that_connects_before_the_engine_receives_nothing_and_the_port_is_closed_after_joining():
    out = sender()
    info = out.open("e", fresh=False)
    with socket.create_connection((info.address, info.port), 60.0) as rival:
        rival.sendall(bytes(1000))
        engine = in_thread(lambda: Peer(info).receive(packed().parameters))
        assert out.send("e", packed()) == packed().digest()
        with contextlib.suppress(ConnectionResetError):
            assert rival.recv(1) == b""
    engine.join()
    assert _closed(info)


@pytest.mark.parametrize("waiting", [True, False])
def test_closing_a_group_before_the_engine_has_joined_closes_its_port_and_ends_the_send(waiting):
    out, errors = sender(LONGER_THAN_A_TEST), queue.Queue()
    info = out.open("e", fresh=False)

    def send():
        try:
            out.send("e", packed())
        except WeightTransferError as error:
            errors.put(str(error))

    opened = out._opened["e"]
    if waiting:
        in_thread(send)
        while not opened.listener._accepting.locked():
            time.sleep(0.001)
    out.close("e")
    assert _closed(info)
    if waiting:
        assert errors.get(timeout=60) == "engine e did not receive the weights: the weight group was abandoned"


def test_a_new_group_closes_the_port_of_the_previous_one_that_no_engine_joined():
    out = sender()
    first = out.open("e", fresh=False)
    second = out.open("e", fresh=True)
    assert _closed(first) and not _closed(second)
    assert first.group != second.group
    out.close("e")


def test_sending_without_a_group_is_an_error():
    with pytest.raises(WeightTransferError, match="no weight group is open to engine e"):
        sender().send("e", packed())


def test_an_engine_that_received_other_bytes_is_an_error():
    out = sender()
    info = out.open("e", fresh=False)
    in_thread(lambda: Peer(info).receive(packed().parameters, spoil=True))
    with pytest.raises(WeightTransferError, match="worker of rank 1 received other bytes than were sent"):
        out.send("e", packed())


def _join_and_wait(info, ready):
    peer = Peer(info)
    ready.set()
    peer.receive(packed().parameters)
    ready.clear()
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_is_stopped_or_killed_makes_send_raise(number):
    """With a stopped peer by the timeout; with a killed peer at once, because its send has more time than this test."""
    out = sender(LONGER_THAN_A_TEST)
    info = out.open("e", fresh=False)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    peer = context.Process(target=_join_and_wait, args=(info, ready), daemon=True)
    peer.start()
    try:
        out.send("e", packed())
        os.kill(peer.pid, number)
        out._timeout = 1.0 if number == signal.SIGSTOP else LONGER_THAN_A_TEST
        with pytest.raises(WeightTransferError):
            out.send("e", packed())
        with pytest.raises(WeightTransferError, match="no weight group"):
            out.send("e", packed())
    finally:
        os.kill(peer.pid, signal.SIGKILL)
        peer.join()


def test_an_engine_that_hangs_does_not_delay_another():
    out = sender()
    absent, present = out.open("absent", fresh=False), out.open("present", fresh=False)
    waiting = in_thread(lambda: out.send("absent", packed()))
    in_thread(lambda: Peer(present).receive(packed().parameters))
    out.send("present", packed())
    assert waiting.is_alive()
    Peer(absent).receive(packed().parameters)
    waiting.join()


def _sockets():
    return {c.laddr + c.raddr for c in psutil.Process().net_connections("tcp") if c.status != "NONE"}


@pytest.fixture
def forked():
    """Function that forks processes."""
    started = []

    def start(target, *args):
        started.append(multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def test_groups_of_engines_that_are_gone_are_closed_with_their_sockets(forked):
    out, ready = sender(LONGER_THAN_A_TEST), multiprocessing.get_context("fork").Event()
    before = _sockets()
    forked(_join_and_wait, out.open("idle", fresh=False), ready)
    out.send("idle", packed())
    dead = forked(_join_and_wait, out.open("stopped", fresh=False), ready)
    out.send("stopped", packed())
    os.kill(dead.pid, signal.SIGSTOP)
    new = _sockets() - before  # groups of other tests may close theirs meanwhile
    assert len(new) >= 4
    out.close_idle(60.0)
    assert out._opened.keys() == {"idle", "stopped"}
    out._timeout = 1.0
    with pytest.raises(WeightTransferError):
        out.send("stopped", packed())
    out.close_idle(0.0)
    assert out._opened == {}
    while _sockets() & new:
        time.sleep(0.01)


def _join_and_freeze(info):
    peer = Peer(info)
    peer.broadcast(torch.empty(120_000, dtype=torch.uint8), 0)  # receives only the first bucket
    os.kill(os.getpid(), signal.SIGSTOP)


def test_an_engine_that_stops_during_an_update_does_not_affect_another(forked):
    posted = queue.Queue()
    publisher = BackgroundSender(sender(), "gloo", posted.put)
    command = SendWeights(1, 7, [EngineTarget("frozen", True, 1), EngineTarget("healthy", True, 1)])
    large = [*tensors(), ("e", torch.zeros(8 << 20))]  # more than the socket buffers hold
    publisher.publish(command, pack(large, 50_000), Probe([], []))
    ready = {message.engine: message for message in (posted.get(timeout=60), posted.get(timeout=60))}
    stopped = forked(_join_and_freeze, ready["frozen"])
    peer = Peer(ready["healthy"])
    receive_round(peer.group, WirePlan(ready["healthy"].parameters, 50_000), lambda tensors: None, peer.deadline)
    healthy = posted.get(timeout=60)
    assert (healthy.engine, healthy.digest, healthy.error) == ("healthy", pack(large, 50_000).digest(), "")
    stopped.kill()  # otherwise its send fails only after a minute
    frozen = posted.get(timeout=60)
    assert frozen.engine == "frozen" and "did not receive the weights" in frozen.error
