"""Connections to the listener of a gloo device, before and after the group has formed."""

import resource
import socket
import struct
import time

import psutil
import pytest
import torch

from rljob.transfer import gloo_listener

SECONDS = 60.0
REFUSAL_SECONDS = 0.05
"""Time limit of a connection that must not be accepted."""


def refused(address):
    """Return whether the kernel accepts no connection."""
    with pytest.raises(TimeoutError):
        socket.create_connection(address[:2], REFUSAL_SECONDS).close()
    return True


def accepted(address):
    """Return whether the kernel accepts a connection."""
    socket.create_connection(address[:2], SECONDS).close()
    return True


def sockaddr(listener):
    """Return the address as gloo sends it."""
    host, port = listener.getsockname()[:2]
    flow, rest = (b"", bytes(8)) if listener.family == socket.AF_INET else (bytes(4), bytes(4))
    address = struct.pack("!H", port) + flow + socket.inet_pton(listener.family, host)
    return struct.pack("=H", listener.family) + address + rest


@pytest.mark.parametrize("family, host", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_the_listener_of_the_address_drops_new_connections_and_keeps_those_it_has(family, host):
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_server((host, 0), family=family) as other,
        socket.create_connection(listener.getsockname()[:2], SECONDS) as early,
    ):
        earlier = listener.accept()[0]
        gloo_listener.drop_new_connections([b"another value", b"before" + sockaddr(listener) + b"after"])
        assert refused(listener.getsockname())
        assert accepted(other.getsockname())
        earlier.sendall(b"sent")
        assert early.recv(4) == b"sent"
        earlier.close()


def test_sockets_that_listen_since_a_block_drop_connections_after_it():
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        with gloo_listener.accepting_until_formed():
            found = socket.create_server(("127.0.0.1", 0))
            assert accepted(found.getsockname())
        with found:
            assert refused(found.getsockname())
            assert accepted(earlier.getsockname())


def test_a_kernel_that_refuses_filters_leaves_the_listener_as_it_is(monkeypatch):
    monkeypatch.setattr(gloo_listener, "SO_ATTACH_FILTER", -1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gloo_listener.drop_new_connections([sockaddr(listener)])
        assert accepted(listener.getsockname())


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_soft_limit_of_descriptors_becomes_the_hard_one(monkeypatch, error):
    limits = []

    def setrlimit(_kind, limit):
        limits.append(limit)
        if error:
            raise error

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    gloo_listener.raise_descriptor_limit()
    assert limits == [(4096, 4096)]


def listening():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}


def test_a_formed_group_accepts_no_connection_and_broadcasts_and_the_next_one_forms(form):
    for number in (1.0, 2.0):
        before = listening()
        group = form(workers=2).host().join(1).join(2).wait()
        assert len(group.members) == 3, group.errors
        found = listening() - before
        assert len(found) == 3
        for address in found:
            assert refused(address)
        received = [torch.full((3,), number), torch.zeros(3), torch.zeros(3)]
        end = time.monotonic() + SECONDS
        waits = [member.begin_broadcast(received[rank], 0, end) for rank, member in group.members.items()]
        for wait in waits:
            wait()
        assert [tensor.tolist() for tensor in received] == [[number] * 3] * 3
