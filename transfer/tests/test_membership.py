"""The members' proof over the communicator, and rivals that take a member's place at the data ports of gloo."""

import socket
import struct
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from rljob.transfer import handshake, weight_group
from rljob.transfer.membership import prove_membership

HOST = "127.0.0.1"
SECONDS = 60.0


class TakesThePlace:
    """A rival at the data ports of gloo: connects to each as soon as it listens, with the first numbers."""

    def __init__(self, monkeypatch, message):
        self.connections = []
        self._message = message
        self._lock = threading.Lock()
        self._plain = dist.ProcessGroupGloo.create_device
        monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", self._create_device)

    def _create_device(self, **options):
        with self._lock:
            before = _ports()
            device = self._plain(**options)
            for port in _ports() - before:
                for number in range(4):
                    self.connections.append(socket.create_connection((HOST, port), SECONDS))
                    self.connections[-1].sendall(struct.pack("<q", number) + self._message)
        return device


def _ports():
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("message", [b"", bytes(range(256)) * 16], ids=["silent", "garbage"])
def test_a_rival_in_a_members_place_in_gloo_fails_the_group_and_the_next_one_forms(form, monkeypatch, workers, message):
    monkeypatch.setattr(weight_group, "PROOF_SECONDS", 0.5)
    with monkeypatch.context() as patched:
        rival = TakesThePlace(patched, message)
        group = form(workers=workers).host()
        for rank in range(1, workers + 1):
            group.join(rank)
        group.wait()
    assert len(rival.connections) >= 8
    assert group.members == {}
    assert all("another process may have taken the place of one" in error for error in group.errors.values())
    again = form(workers=workers).host()
    for rank in range(1, workers + 1):
        again.join(rank)
    again.wait()
    assert len(again.members) == workers + 1, again.errors
    for connection in rival.connections:
        connection.close()


class Wire:
    """A group of two whose second member is played by the test: broadcasts are taken from ``arriving``."""

    size, device = 2, "cpu"

    def __init__(self, rank, arriving):
        self.rank = rank
        self.sent = []
        self._arriving = arriving

    def broadcast(self, tensor, root, deadline):
        if root == self.rank:
            self.sent.append(bytes(tensor.numpy()))
        else:
            tensor.copy_(torch.frombuffer(bytearray(self._arriving(self.sent)), dtype=torch.uint8))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_without_the_nonce_does_not_pass_the_proof(rank):
    answers = iter([bytes(32), bytes(32)]) if rank else iter([bytes(64)])
    with pytest.raises(RuntimeError, match=f"rank {1 - rank} of the weight group does not know its nonce"):
        prove_membership(Wire(rank, lambda sent: next(answers)), "nonce", time.monotonic() + SECONDS)


def test_a_recorded_answer_does_not_pass_the_proof():
    """The sender's challenge differs in every group, so an answer of another group with the same nonce is refused."""
    own = bytes(32)
    answer = own + handshake.proof("nonce", "worker of the communicator", 1, bytes(32), own)
    with pytest.raises(RuntimeError, match="rank 1"):
        prove_membership(Wire(0, lambda sent: answer), "nonce", time.monotonic() + SECONDS)
