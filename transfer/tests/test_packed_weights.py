"""Packing: a plan made once, buckets that are sent while others are gathered, and the order of work on a GPU."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rljob.transfer import snapshot_stream
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.checksum import Checksum, chunk_sums
from rljob.transfer.packed_weights import PackedWeights, pack
from rljob.transfer.snapshot_stream import SnapshotStream
from rljob.transfer.wire_plan import WirePlan

TENSORS = [(name, torch.full((100,), value)) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
ONE_EACH = 400


def test_a_bucket_is_ready_before_the_next_one_is_gathered():
    weights, sent = PackedWeights(WirePlan.of(TENSORS, ONE_EACH)), threading.Event()

    def gather():
        yield TENSORS[0]
        yield TENSORS[1]
        assert sent.wait(60), "the first bucket was not ready"
        yield TENSORS[2]

    def send():
        weights.bucket(0)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    weights.fill(gather())
    assert weights.digest() == pack(TENSORS, ONE_EACH).digest()
    assert [float(bucket.view(torch.float32)[0]) for bucket in weights.buckets] == [1.0, 2.0, 3.0]


def test_weights_that_cannot_be_gathered_fail_their_sends_and_their_digest():
    weights = PackedWeights(WirePlan.of(TENSORS, ONE_EACH))

    def gather():
        yield TENSORS[0]
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        weights.fill(gather())
    weights.bucket(0)
    with pytest.raises(RuntimeError, match=r"not gathered: ZeroDivisionError\('a bug'\)"):
        weights.bucket(1)
    with pytest.raises(RuntimeError, match="not gathered"):
        weights.digest()


def test_a_send_waits_for_a_bucket_until_its_deadline():
    weights = PackedWeights(WirePlan.of(TENSORS, ONE_EACH))
    with pytest.raises(RuntimeError, match="not gathered in time"):
        weights.bucket(0, time.monotonic() - 1)
    weights.fill(TENSORS)


@pytest.mark.parametrize(
    "tensors",
    [TENSORS[:2], [*TENSORS, ("d", torch.zeros(1))], TENSORS[::-1], [("a", torch.zeros(99)), *TENSORS[1:]]],
    ids=["one less", "one more", "another order", "another shape"],
)
def test_tensors_that_are_not_the_planned_ones_are_refused(tensors):
    weights = PackedWeights(WirePlan.of(TENSORS, 1 << 20))
    with pytest.raises(ValueError, match="planned"):
        weights.fill(tensors)


def test_one_plan_serves_all_updates_in_the_type_of_the_wire():
    plan = WirePlan.of(TENSORS, ONE_EACH, torch.bfloat16)
    assert (plan.sizes, {meta.dtype for meta in plan.parameters}) == ([400, 200], {"bfloat16"})
    for scale in (1.0, 0.3):
        weights = PackedWeights(plan)
        weights.fill((name, tensor * scale) for name, tensor in TENSORS)
        plain = pack([(name, (tensor * scale).bfloat16()) for name, tensor in TENSORS], ONE_EACH)
        assert weights.digest() == plain.digest()


def test_sums_that_the_device_computed_give_the_same_digest():
    raw = torch.randint(0, 256, ((2 << 20) + 21,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    digests = []
    for sums in (None, chunk_sums(raw), chunk_sums(raw[3:]), chunk_sums(torch.cat([raw[:3], raw])[3:])):
        checksum = Checksum()
        checksum.update(raw, sums)
        digests.append(checksum.hexdigest())
    assert digests[0] == digests[1] == digests[3] != digests[2]


class Cuda:
    """Streams of a GPU by their operations; nothing runs on a GPU here."""

    def __init__(self):
        self.calls = []
        self.current = self.Stream(self, "computation")

    class Stream:
        def __init__(self, cuda, name="copies"):
            self.cuda, self.name, self.device = cuda, name, "cuda:0"

        def wait_stream(self, other):
            self.cuda.calls.append(f"{self.name} wait for {other.name}")

        def record_event(self):
            number = sum(call.startswith("mark") for call in self.cuda.calls) + 1
            self.cuda.calls.append(f"mark {number} in {self.name}")
            return SimpleNamespace(synchronize=lambda: self.cuda.calls.append(f"host waits for mark {number}"))

    @contextmanager
    def stream(self, stream):
        self.calls.append(f"begin {stream.name}")
        yield
        self.calls.append(f"end {stream.name}")


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    fake = SimpleNamespace(
        Stream=lambda device: Cuda.Stream(found), stream=found.stream, current_stream=lambda device: found.current
    )
    monkeypatch.setattr(snapshot_stream.torch, "cuda", fake)
    return found


def test_the_copy_has_a_stream_of_its_own_and_the_next_step_waits_for_it_on_the_gpu(cuda, monkeypatch):
    monkeypatch.setattr(PackedWeights, "_hash", lambda self: None)
    weights = PackedWeights(WirePlan.of(TENSORS, ONE_EACH))
    weights.fill(TENSORS, BucketBuffers(), SnapshotStream("cuda:0"))
    assert cuda.calls == [
        "copies wait for computation",
        "begin copies",
        "mark 1 in copies",
        "mark 2 in copies",
        "mark 3 in copies",
        "end copies",
        "computation wait for copies",
    ], "the host waited"
    weights.bucket(1)
    assert cuda.calls[-1] == "host waits for mark 2", "a send waits for its bucket only"
