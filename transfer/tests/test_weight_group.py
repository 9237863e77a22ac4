"""Weight groups: deadlines, errors and abandoned members; NCCL is played by stand-ins."""

import gc
import os
import threading
import time
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from rljob.transfer import weight_group
from rljob.transfer.packed_weights import pack
from rljob.transfer.rendezvous import Rendezvous, RendezvousListener, connect
from rljob.transfer.rounds import send_round
from rljob.transfer.weight_group import WeightGroup

LONGER_THAN_A_TEST = 1000.0
"""Timeout of a group whose operation must end by its own deadline; the time limit of the test is shorter."""


def joined(seconds=60.0, host="127.0.0.1"):
    """Return the two members of a new group, sender first."""
    listener = RendezvousListener(host, 2)
    members = {}
    worker = threading.Thread(
        target=lambda: members.update(worker=WeightGroup.join(listener.rendezvous, 1, "gloo", seconds)), daemon=True
    )
    worker.start()
    sender = WeightGroup.host(listener, "gloo", seconds)
    worker.join()
    return sender, members["worker"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_members_know_their_rank_and_broadcast_from_any_of_them(host):
    sender, worker = joined(host=host)
    assert [(member.rank, member.size, member.device) for member in (sender, worker)] == [(0, 2, "cpu"), (1, 2, "cpu")]
    deadline = time.monotonic() + 60
    for root, member, other in ((0, sender, worker), (1, worker, sender)):
        sent, received = torch.arange(5), torch.zeros(5, dtype=torch.int64)
        thread = threading.Thread(target=member.broadcast, args=(sent, root, deadline))
        thread.start()
        other.broadcast(received, root, deadline)
        thread.join()
        assert received.equal(sent)
    sender.abandon()
    worker.abandon()


def test_a_broadcast_whose_root_sends_nothing_ends_by_its_deadline():
    sender, worker = joined(LONGER_THAN_A_TEST)
    with pytest.raises(RuntimeError):
        worker.broadcast(torch.zeros(4), 0, time.monotonic() + 0.3)
    with pytest.raises(RuntimeError, match="took too long"):
        sender.broadcast(torch.zeros(4), 0, time.monotonic() - 0.1)
    sender.abandon()
    worker.abandon()


def test_an_abandoned_member_refuses_to_broadcast_and_closes_its_sockets():
    def sockets():
        return {c.laddr + c.raddr for c in psutil.Process().net_connections("tcp") if c.status != "NONE"}

    before = sockets()
    sender, worker = joined()
    new = sockets() - before  # groups of other tests may close theirs meanwhile
    assert new
    for member in (sender, worker):
        member.abandon()
        member.abandon()  # idempotent
        with pytest.raises(RuntimeError, match="abandoned"):
            member.broadcast(torch.zeros(4), 0, time.monotonic() + 60)
    deadline = time.monotonic() + 60
    while sockets() & new and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not sockets() & new


def test_abandoning_ends_a_waiting_broadcast():
    sender, worker = joined(LONGER_THAN_A_TEST)
    errors = []

    def wait():
        try:
            worker.broadcast(torch.zeros(4), 0, time.monotonic() + LONGER_THAN_A_TEST)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    sender.abandon()
    worker.abandon()
    thread.join(60)
    assert len(errors) == 1


class Work:
    """An operation of NCCL; as in torch it is completed after an error too."""

    def __init__(self, error):
        self._error = error

    def is_completed(self):
        return True

    def exception(self):
        return self._error


class Communicator:
    """A communicator of NCCL whose operations end as ``broadcast`` returns."""

    def __init__(self, broadcast):
        self.broadcast = broadcast
        self.aborted = threading.Event()
        self.abort = self.aborted.set

    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL communicator was aborted on rank 0")])
def test_a_completed_operation_of_nccl_with_an_error_is_an_error(error):
    group = WeightGroup(Communicator(lambda tensors, options: Work(error)), None, "meta")
    deadline = time.monotonic() + 60
    if error is None:
        group.broadcast(torch.zeros(4, device="meta"), 0, deadline)
        return
    with pytest.raises(RuntimeError, match="died, or NCCL failed: NCCL communicator was aborted"):
        group.broadcast(torch.zeros(4, device="meta"), 0, deadline)


@pytest.mark.parametrize("fails", [False, True])
def test_errors_of_a_peer_never_end_this_process_but_those_of_other_groups_do(monkeypatch, fails):
    """torch reads the settings when it makes a process group, so they must not be seen by other process groups."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before, seen = dict(os.environ), {}

    class ProcessGroup:
        class Options:
            pass

        def __init__(self, *arguments):
            seen.update(os.environ)
            if fails:
                raise RuntimeError("no GPU")

    monkeypatch.setattr(weight_group, "dist", SimpleNamespace(ProcessGroupNCCL=ProcessGroup))
    try:
        weight_group._nccl(None, 0, Rendezvous("g", "127.0.0.1", 1, 2))
    except RuntimeError:
        assert fails
    assert {key: seen[key] for key in weight_group.NCCL_SETTINGS} == dict.fromkeys(weight_group.NCCL_SETTINGS, "0")
    assert dict(os.environ) == before


def test_a_communicator_whose_creation_hangs_ends_by_the_deadline_and_holds_no_weights(monkeypatch):
    """ncclCommInitRank waits for a peer without end; the thread that waits ends here when the peer answers at last."""
    answers = threading.Event()
    communicator = Communicator(lambda tensors, options: answers.wait() and Work(None))
    monkeypatch.setattr(weight_group, "_nccl", lambda *arguments: communicator)
    listener = RendezvousListener("127.0.0.1", 2)

    def send():
        weights = pack([("a", torch.zeros(4))], 1)
        with pytest.raises(RuntimeError, match="was not created in time"):
            send_round(WeightGroup.host(listener, "nccl", 0.5, "cpu"), weights, time.monotonic() + 60)
        weights.digest()
        return weakref.ref(weights.buckets[0])

    threading.Thread(target=connect, args=(listener.rendezvous, 1, time.monotonic() + 60), daemon=True).start()
    sent = send()
    gc.collect()
    assert sent() is None
    assert communicator.aborted.wait(60)
    answers.set()
