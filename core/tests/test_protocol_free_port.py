"""Ports for servers that another process binds later."""

import random
import socket

from rljob.protocol import free_port as module
from rljob.protocol.free_port import HIGHEST, LOWEST, free_port


def test_a_port_is_free_and_no_ephemeral_one():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert LOWEST <= port <= HIGHEST


def test_a_port_that_is_in_use_is_not_chosen(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        choices = iter([taken.getsockname()[1], taken.getsockname()[1], free := free_port()])
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: next(choices))
        assert module.free_port() == free
