"""The wires of buckets: memory that processes share, and parts that a GPU stages."""

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rljob.transfer import bucket_wires, shared_memory
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.bucket_wires import PlainWire, StagedWire, wire_buffers
from rljob.transfer.packed_weights import pack
from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.rounds import send_round
from rljob.transfer.shared_memory import Handle, handle_of, read_shared
from rljob.transfer.weight_group import WeightGroup

SIZE = 300_000


def shared(size=SIZE):
    bucket = wire_buffers("ipc", "cpu").take(size)
    return bucket.copy_(torch.arange(size) % 251)


def memfds():
    """Return the inodes of the memfds that this process has open."""
    inodes = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, for example by a thread of another test
            if "memfd:" in os.readlink(each):
                inodes.add(each.stat().st_ino)
    return inodes


def test_another_process_reads_the_memory_of_this_one():
    bucket, (ours, theirs) = shared(), multiprocessing.get_context("fork").Pipe()

    def read(message):
        into = torch.zeros(SIZE, dtype=torch.uint8)
        read_shared(Handle.decode(message), into)
        theirs.send(bytes(into.numpy()))

    process = multiprocessing.get_context("fork").Process(target=read, args=(handle_of(bucket).encode(),))
    process.start()
    assert ours.recv() == bytes(bucket.numpy())
    process.join()


def test_memory_that_nothing_refers_to_is_given_back():
    buffers = BucketBuffers(allocate=shared_memory.shared_memory)
    bucket = buffers.take(SIZE)
    handle, view = handle_of(bucket), bucket[5:]
    del bucket, buffers
    gc.collect()
    read_shared(handle, torch.zeros(SIZE, dtype=torch.uint8))
    assert handle.inode in memfds()
    del view
    gc.collect()
    assert handle.inode not in memfds()
    with pytest.raises(FileNotFoundError):
        read_shared(handle, torch.zeros(SIZE, dtype=torch.uint8))


@pytest.mark.parametrize("change", [{"inode": 1}, {"descriptor": 0}, {"process": 1 << 30}, {"size": SIZE - 1}])
def test_other_memory_than_that_of_the_handle_is_refused(change):
    bucket = shared()
    with pytest.raises(OSError):
        read_shared(replace(handle_of(bucket), **change), torch.zeros(SIZE, dtype=torch.uint8))


def test_memory_that_ends_does_not_take_new_memory_at_its_address_with_it():
    """Threads get and give back memory of one size, so they get each other's addresses."""
    lost = []

    def use():
        for _ in range(500):
            memory = torch.from_numpy(shared_memory.shared_memory(SIZE))
            try:
                handle_of(memory)
            except KeyError as error:
                lost.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []


def form(monkeypatch, read):
    """Form a group over ipc whose worker reads with ``read``; return the errors of both members."""
    monkeypatch.setattr(bucket_wires, "read_shared", read)
    listener, errors = RendezvousListener("127.0.0.1", 2), {}

    def run(name, member):
        try:
            member().abandon()
        except RuntimeError as error:
            errors[name] = str(error)

    joining = threading.Thread(
        target=run, args=("worker", lambda: WeightGroup.join(listener.rendezvous, 1, "ipc", 60.0)), daemon=True
    )
    joining.start()
    run("sender", lambda: WeightGroup.host(listener, "ipc", 60.0))
    joining.join()
    return errors


def test_a_group_forms_only_where_the_memory_can_be_read(monkeypatch):
    def absent(handle, into):
        raise FileNotFoundError("no such process")

    def another(handle, into):
        into.fill_(7)

    assert form(monkeypatch, read_shared) == {}
    for read, reason in ((absent, "no such process"), (another, "another process has its number")):
        started = time.monotonic()
        errors = form(monkeypatch, read)
        assert errors.keys() == {"worker", "sender"}
        assert "ipc needs the trainer and the engine in processes of one user on one machine" in errors["worker"]
        assert reason in errors["worker"] and errors["worker"].endswith("; set auto or gloo")
        assert time.monotonic() - started < 30


class Wire:
    """A group whose broadcasts end when they are waited for."""

    device = "cpu"

    def __init__(self):
        self.events, self.sent, self.running = [], b"", []

    def begin_broadcast(self, tensor, root, deadline):
        content = bytes(tensor.numpy())
        self.running.append(tensor)

        def wait():
            self.running.remove(tensor)
            assert bytes(tensor.numpy()) == content, "overwritten while it was on the wire"
            self.sent += content

        self.events.append(len(self.running))
        return wait


def test_a_gpu_holds_two_parts_of_a_bucket_and_copies_one_while_the_other_is_on_the_wire(monkeypatch):
    monkeypatch.setattr(bucket_wires, "STAGE_BYTES", 1000)
    wire, group = StagedWire(), Wire()
    for size in (4500, 10, 1000):
        bucket = shared(size)
        group.events, group.sent = [], b""
        wire.begin_send(group, bucket, time.monotonic() + 60)
        assert group.sent == bytes(bucket.numpy()) and not group.running
        assert group.events == [1, 2, 2, 2, 2][: -(-size // 1000)]
        assert sum(stage.nbytes for stage in wire._stages) == 2000


def test_gloo_has_the_next_bucket_before_the_one_on_the_wire_is_waited_for():
    events, weights = [], pack([(f"t{i}", torch.ones(500)) for i in range(4)], 1000)

    def begin_broadcast(tensor, root, deadline):
        number = sum(event[0] == "begin" for event in events)
        events.append(("begin", number))
        return lambda: events.append(("wait", number))

    def broadcast(tensor, root, deadline):
        events.append(("digest", root))

    group = SimpleNamespace(
        rank=0, size=2, device="cpu", wire=PlainWire(), begin_broadcast=begin_broadcast, broadcast=broadcast
    )
    send_round(group, weights, time.monotonic() + 60)
    assert events[:8] == [
        ("begin", 0), ("begin", 1), ("wait", 0), ("begin", 2), ("wait", 1), ("begin", 3), ("wait", 2), ("wait", 3),
    ]  # fmt: skip
    assert events[8:] == [("digest", 0), ("digest", 1)]


def test_a_worker_receives_the_parts_that_the_sender_stages(monkeypatch):
    monkeypatch.setattr(bucket_wires, "STAGE_BYTES", 1000)
    parts, bucket, got = list(shared(4500).split(1000)), shared(4500), torch.zeros(4500, dtype=torch.uint8)
    group = SimpleNamespace(broadcast=lambda tensor, root, deadline: tensor.copy_(parts.pop(0)))
    StagedWire().begin_receive(group, got, 0.0)()
    assert got.equal(bucket) and not parts


def test_a_round_over_nccl_has_a_stream_of_its_own_to_its_last_digest(monkeypatch):
    """On the default stream the digests would wait for all kernels of the training step that are queued."""
    current, broadcasts, weights = [], [], pack([("a", torch.ones(5000))], 1000)

    @contextlib.contextmanager
    def stream(own):
        current.append(own)
        yield
        current.remove(own)

    fake = SimpleNamespace(Stream=lambda device: f"own of {device}", stream=stream)
    monkeypatch.setattr(bucket_wires.torch, "cuda", fake)
    wire = StagedWire()
    wire._stages = [torch.zeros(bucket_wires.STAGE_BYTES, dtype=torch.uint8)] * 2
    group = SimpleNamespace(rank=0, size=2, device="cuda:0", wire=wire)
    group.begin_broadcast = lambda *call: broadcasts.append([*current]) or (lambda: None)
    group.broadcast = group.begin_broadcast
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    for _ in range(2):
        send_round(group, weights, time.monotonic() + 60)
    assert broadcasts == [["own of cuda:0"]] * 6 and not current
