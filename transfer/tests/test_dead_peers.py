"""A member that is killed or stopped at any step of forming a group, or of a round: the other members get an error by
their deadline, and their process lives and forms the next group."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from rljob.transfer import bucket_wires, handshake, rendezvous, weight_group
from rljob.transfer.bucket_wires import wire_buffers
from rljob.transfer.exchange import ExchangeStore
from rljob.transfer.packed_weights import pack
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.rounds import send_round
from rljob.transfer.weight_group import WeightGroup

HOST = "127.0.0.1"
BUCKET_BYTES = 1 << 20
TENSORS = [(name, torch.full((300_000,), float(i))) for i, name in enumerate("abc")]
SECONDS = 2.0
PLENTY = 60.0
STEPS = [
    (weight_group, "connect"),
    (rendezvous, "member_handshake"),
    (handshake, "_receive"),
    (handshake, "_send"),
    (RendezvousListener, "accept_members"),
    (ExchangeStore, "set"),
    (ExchangeStore, "wait"),
    (WeightGroup, "broadcast"),
    (bucket_wires, "handle_of"),
    (bucket_wires, "read_shared"),
]
"""Functions before whose calls a member may end."""
RANKS = {"sender": 0, "worker": 1, "second worker": 2}
"""Role of the member that ends → its rank. The group with a second worker has three members."""


def send(listener, transport, seconds):
    group = WeightGroup.host(listener, transport, seconds)
    try:
        weights = pack(TENSORS, BUCKET_BYTES, buffers=wire_buffers(transport, "cpu"))
        send_round(group, weights, time.monotonic() + seconds)
    finally:
        group.abandon()


def receive(place, rank, transport, seconds):
    receiver = WeightReceiver("cpu")
    receiver.join(place, rank, transport, BUCKET_BYTES, seconds)
    try:
        receiver.receive(pack(TENSORS, 1).parameters, lambda tensors: None, seconds)
    finally:
        receiver.leave()


def member(role, transport, end, number, pipe):
    """Be a member in a process of its own that gets signal ``number`` before step ``end``; report the steps."""
    steps = 0

    def count(plain):
        def step(*args, **kwargs):
            nonlocal steps
            steps += 1
            if steps == end:
                os.kill(os.getpid(), number)
            return plain(*args, **kwargs)

        return step

    for owner, name in STEPS:
        setattr(owner, name, count(getattr(owner, name)))
    if role == "sender":
        listener = RendezvousListener(HOST, 2)
        pipe.send(listener.rendezvous)
        send(listener, transport, PLENTY)
    else:
        receive(pipe.recv(), RANKS[role], transport, PLENTY)
    pipe.send(steps)


class Peer:
    """A member in a process, and the other members in threads of this process."""

    def __init__(self, role, transport, end=0, number=0):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=member, args=(role, transport, end, number, theirs), daemon=True)
        self.process.start()
        self.role, self.transport, self.errors, self.threads = role, transport, [], []

    def begin(self, seconds):
        if self.role == "sender":
            self._start(lambda: receive(self.pipe.recv(), 1, self.transport, seconds))
            return
        listener = RendezvousListener(HOST, 1 + RANKS[self.role])
        place = listener.rendezvous
        self.pipe.send(place)
        self._start(lambda: send(listener, self.transport, seconds))
        for rank in range(1, RANKS[self.role]):
            self._start(lambda rank=rank: receive(place, rank, self.transport, seconds))

    def _start(self, take_part):
        def run():
            try:
                take_part()
            except RuntimeError as error:
                self.errors.append(str(error))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def wait(self):
        """Return whether all members of this process got an error in time."""
        for thread in self.threads:
            thread.join(PLENTY)
        return len(self.errors) == len(self.threads)

    def did_not_end(self):
        """Return whether the peer completed its round: the number of steps differs by a wait from round to round."""
        try:
            return self.pipe.poll(PLENTY) and self.pipe.recv() > 0
        except EOFError:
            return False

    def succeed(self):
        """Carry out a round; return the steps of the peer."""
        self.begin(PLENTY)
        self.wait()
        assert self.errors == []
        return self.pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


def scenario(role, transport, number, pipe):
    """End a member at each step and report the steps that the other one did not notice; then form another group."""
    after = Peer(role, transport)  # forked before there are threads
    steps = Peer(role, transport).succeed()
    assert steps >= 13
    # The last step of a sender is to receive the worker's receipt, which the worker does not notice.
    peers = [Peer(role, transport, end, number) for end in range(1, steps + (role != "sender"))]
    for peer in peers:
        peer.begin(SECONDS)
    unnoticed = [end for end, peer in enumerate(peers, start=1) if not peer.wait() and not peer.did_not_end()]
    after.succeed()
    for peer in (*peers, after):
        peer.kill()
    pipe.send(unnoticed)


@pytest.mark.parametrize("role", RANKS)
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_ends_at_any_step_is_an_error_of_the_others_in_time(role, transport, number):
    """In a process of its own: gloo waits up to 30 s longer for a dead peer, in a thread; it must end before Python."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=scenario, args=(role, transport, number, theirs))
    process.start()
    theirs.close()
    assert pipe.poll(2 * PLENTY)
    assert pipe.recv() == []
    process.kill()
    process.join()
