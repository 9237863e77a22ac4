"""Weight groups: deadlines and abandoned members."""

import threading
import time

import psutil
import pytest
import torch

from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.weight_group import WeightGroup

torch.set_num_threads(1)
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
        return sum(connection.status != "NONE" for connection in psutil.Process().net_connections("tcp"))

    before = sockets()
    sender, worker = joined()
    assert sockets() > before
    for member in (sender, worker):
        member.abandon()
        member.abandon()  # idempotent
        with pytest.raises(RuntimeError, match="abandoned"):
            member.broadcast(torch.zeros(4), 0, time.monotonic() + 60)
    deadline = time.monotonic() + 60
    while sockets() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sockets() <= before


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
