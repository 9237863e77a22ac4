"""A member that is killed or stopped at any step of forming a group, or of a round: the other member gets an error by
its deadline, and its process lives and forms the next group."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from rljob.transfer import handshake, rendezvous, weight_group
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
]
"""Functions before whose calls a member may end."""


def send(listener, seconds):
    group = WeightGroup.host(listener, "gloo", seconds)
    try:
        send_round(group, pack(TENSORS, BUCKET_BYTES), time.monotonic() + seconds)
    finally:
        group.abandon()


def receive(place, seconds):
    receiver = WeightReceiver("cpu")
    receiver.join(place, 1, "gloo", BUCKET_BYTES, seconds)
    try:
        receiver.receive(pack(TENSORS, 1).parameters, lambda tensors: None, seconds)
    finally:
        receiver.leave()


def member(role, end, number, pipe):
    """Be a member in a process of its own that gets signal ``number`` before step ``end``; report the steps."""
    torch.set_num_threads(1)
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
        send(listener, PLENTY)
    else:
        receive(pipe.recv(), PLENTY)
    pipe.send(steps)


class Peer:
    """A member in a process, and the member of this process in a thread."""

    def __init__(self, role, end=0, number=0):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=member, args=(role, end, number, theirs), daemon=True)
        self.process.start()
        self.role, self.error = role, ""

    def begin(self, seconds):
        self.thread = threading.Thread(target=self._run, args=(seconds,), daemon=True)
        self.thread.start()

    def _run(self, seconds):
        try:
            if self.role == "sender":
                receive(self.pipe.recv(), seconds)
            else:
                listener = RendezvousListener(HOST, 2)
                self.pipe.send(listener.rendezvous)
                send(listener, seconds)
        except RuntimeError as error:
            self.error = str(error)

    def succeed(self):
        """Carry out a round; return the steps of the peer."""
        self.begin(PLENTY)
        self.thread.join()
        assert self.error == ""
        return self.pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


def scenario(role, number, pipe):
    """End a member at each step and report the steps that the other one did not notice; then form another group."""
    after = Peer(role)  # forked before there are threads
    steps = Peer(role).succeed()
    assert steps >= 13
    # The last step of a sender is to receive the worker's receipt, which the worker does not notice.
    peers = [Peer(role, end, number) for end in range(1, steps + (role == "worker"))]
    for peer in peers:
        peer.begin(SECONDS)
    for peer in peers:
        peer.thread.join(PLENTY)
    unnoticed = [end for end, peer in enumerate(peers, start=1) if peer.thread.is_alive() or not peer.error]
    after.succeed()
    for peer in (*peers, after):
        peer.kill()
    pipe.send(unnoticed)


@pytest.mark.parametrize("role", ["sender", "worker"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_ends_at_any_step_is_an_error_of_the_other_one_in_time(role, number):
    """In a process of its own: gloo waits up to 30 s longer for a dead peer, in a thread; it must end before Python."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=scenario, args=(role, number, theirs))
    process.start()
    theirs.close()
    assert pipe.poll(2 * PLENTY)
    assert pipe.recv() == []
    process.kill()
    process.join()
