"""The store of a forming group: torch's use of it, and its limits."""

import contextlib
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from rljob.transfer.exchange import MAX_BYTES, ExchangeStore

SECONDS = 60.0


@pytest.fixture
def pair():
    """The stores of a sender and its worker, and the worker's socket."""
    ours, theirs = socket.socketpair()
    end = time.monotonic() + SECONDS
    store = ExchangeStore({1: ours}, end)
    yield store, theirs
    store.close()
    theirs.close()


def test_torch_reads_and_sets_values_through_the_store(pair):
    """By PrefixStore, which calls the store from C++ as gloo and NCCL do."""
    sender = pair[0]
    worker = ExchangeStore({0: pair[1]}, time.monotonic() + SECONDS)
    dist.PrefixStore("a", sender).set("key", "value")
    dist.PrefixStore("a", worker).set("other", "x" * 100_000)
    assert dist.PrefixStore("a", worker).get("key") == b"value"
    dist.PrefixStore("a", sender).wait(["other"], timedelta(seconds=SECONDS))
    assert sender.check(["a/other"]) and not sender.check(["other"])
    worker.close()
    with pytest.raises(RuntimeError, match="rank 1 left the weight group while it formed"):
        sender.get("missing")
    sender.close()
    sender.set("late", b"stays here")
    assert sender.get("late") == b"stays here"
    with pytest.raises(RuntimeError, match="did not connect in time"):
        sender.get("missing")


def test_waiting_for_a_value_ends_by_its_time_limit(pair):
    with pytest.raises(RuntimeError, match="did not connect in time"):
        pair[0].wait(["missing"], timedelta(seconds=0.05))


TOO_LARGE = struct.pack("!HI", 1, MAX_BYTES)
TOO_MANY = (struct.pack("!HI", 1, 9999) + bytes(10_000)) * 200


@pytest.mark.parametrize("frame", [TOO_LARGE, TOO_MANY], ids=["a large one", "many"])
def test_a_member_cannot_fill_the_memory_of_another(pair, frame):
    def send():
        with contextlib.suppress(OSError):  # the store is closed
            pair[1].sendall(frame)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(RuntimeError, match=r"too many|exchanged more than"):
        pair[0].get("missing")
