"""The rendezvous of ranks that start in any order and at any time, and the ports of their groups."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import socket
import threading
from typing import Any

import psutil
import pytest
import torch

from rljob.protocol.environment import RENDEZVOUS_ID
from rljob.protocol.free_port import free_port
from rljob.trainer import process_group


@pytest.fixture
def master_port(monkeypatch):
    """Address of the rendezvous, with a short polling interval."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(process_group, "AWAIT_SECONDS", 0.01)
    return port


def _join(rank: int, joined: Any, last: Any) -> None:
    store = process_group._rendezvous(rank, 3)
    joined.put(rank)
    last.wait(60)  # the store is served by rank 0
    del store


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_ranks_join_in_any_order(master_port, order):
    """Uses processes: threads would block each other, because torch holds the GIL while it connects."""
    context = multiprocessing.get_context("fork")
    joined, last = context.Queue(), context.Event()
    ranks = [context.Process(target=_join, args=(rank, joined, last), daemon=True) for rank in order]
    for rank in ranks[:-1]:
        rank.start()
    with pytest.raises(queue.Empty):  # no rank continues before all have joined
        joined.get(timeout=0.1)
    ranks[-1].start()
    assert {joined.get(timeout=60) for _ in order} == {0, 1, 2}
    last.set()
    for rank in ranks:
        rank.join(60)


def _listening() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}


def _try_ports(rank: int, size: int, tried: Any, all_tried: Any) -> None:
    """Join, try to connect to the ports that gloo listens at, and put (number of ports, accepted, sum over ranks)."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    inherited = _listening()
    world = process_group.join_world()
    ports = _listening() - inherited - {int(os.environ["MASTER_PORT"])}
    accepted = 0
    for port in ports:
        with contextlib.suppress(TimeoutError):
            socket.create_connection(("127.0.0.1", port), 0.05).close()
            accepted += 1
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(total, group=world.control)
    tried.put((len(ports), accepted, total.item()))
    all_tried.wait(60)


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_all_ranks_have_joined_accept_no_connection(master_port, monkeypatch, size):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    tried, all_tried = context.Queue(), context.Event()
    ranks = [
        context.Process(target=_try_ports, args=(rank, size, tried, all_tried), daemon=True) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    assert [tried.get(timeout=60) for _ in ranks] == [(2, 0, size**2)] * size
    all_tried.set()
    for rank in ranks:
        rank.join(60)


def test_a_rank_that_finds_another_jobs_trainer_ends(master_port, monkeypatch):
    context = multiprocessing.get_context("fork")
    last = context.Event()
    monkeypatch.setenv(RENDEZVOUS_ID, "theirs")
    other = context.Process(target=_first, args=(last,), daemon=True)
    other.start()
    monkeypatch.setenv(RENDEZVOUS_ID, "ours")
    with pytest.raises(RuntimeError, match="another job's trainer is at"):
        process_group._rendezvous(1, 2)
    last.set()
    other.join(60)


def _first(last: Any) -> None:
    store = process_group._rendezvous(0, 2)
    last.wait(60)
    del store


def test_waiting_for_rank_0_is_logged_repeatedly(master_port, monkeypatch, caplog):
    monkeypatch.setattr(process_group, "LOG_SECONDS", 0.0)
    waiting = threading.Thread(target=process_group._await, args=("127.0.0.1", master_port))
    with caplog.at_level("INFO"):
        waiting.start()
        while not caplog.records:
            waiting.join(0.01)
    assert f"waiting for rank 0 at 127.0.0.1:{master_port} for" in caplog.text
    with socket.create_server(("127.0.0.1", master_port)):
        waiting.join(60)
    assert not waiting.is_alive()
