"""The ranks wait for each other in any order and for any time."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import threading
from typing import Any

import pytest

from rljob.protocol.environment import RENDEZVOUS_ID
from rljob.trainer import process_group


@pytest.fixture
def place(monkeypatch):
    """Where ranks meet; looked for often."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(process_group, "AWAIT_SECONDS", 0.01)
    return port


def _come(rank: int, met: Any, last: Any) -> None:
    store = process_group._rendezvous(rank, 3)
    met.put(rank)
    last.wait(60)  # the place is rank 0's
    del store


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_ranks_meet_in_whatever_order_they_come(place, order):
    """As processes: threads of one would hold each other up, as torch keeps Python's lock while it connects."""
    context = multiprocessing.get_context("fork")
    met, last = context.Queue(), context.Event()
    ranks = [context.Process(target=_come, args=(rank, met, last), daemon=True) for rank in order]
    for rank in ranks[:-1]:
        rank.start()
    with pytest.raises(queue.Empty):  # no rank continues before all have joined
        met.get(timeout=0.1)
    ranks[-1].start()
    assert {met.get(timeout=60) for _ in order} == {0, 1, 2}
    last.set()
    for rank in ranks:
        rank.join(60)


def test_a_rank_that_finds_another_jobs_trainer_ends(place, monkeypatch):
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


def test_what_is_waited_for_is_said_now_and_then(place, monkeypatch, caplog):
    monkeypatch.setattr(process_group, "LOG_SECONDS", 0.0)
    waiting = threading.Thread(target=process_group._await, args=("127.0.0.1", place))
    with caplog.at_level("INFO"):
        waiting.start()
        while not caplog.records:
            waiting.join(0.01)
    assert f"waiting for rank 0 at 127.0.0.1:{place} for" in caplog.text
    with socket.create_server(("127.0.0.1", place)):
        waiting.join(60)
    assert not waiting.is_alive()
