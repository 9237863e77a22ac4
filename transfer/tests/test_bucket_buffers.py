"""Memory for buckets: reused once nothing refers to it, and never before."""

import threading

import torch

from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.packed_weights import pack


def test_memory_is_lent_again_once_no_tensor_refers_to_it():
    buffers = BucketBuffers()
    first = buffers.take(100)
    view = first[10:20].view(torch.int16)
    place = first.data_ptr()
    del first
    assert buffers.take(100).data_ptr() != place  # the view needs it
    view.fill_(7)
    del view
    again = buffers.take(80)
    assert (again.data_ptr(), again.numel(), again.dtype) == (place, 80, torch.uint8)


def test_a_bucket_gets_the_smallest_buffer_that_is_large_enough():
    buffers = BucketBuffers()
    taken = [buffers.take(size) for size in (300, 100, 200)]
    places = {tensor.numel(): tensor.data_ptr() for tensor in taken}
    del taken
    assert [buffers.take(size).data_ptr() for size in (150, 100, 201)] == [places[200], places[100], places[300]]


def test_no_more_buffers_are_kept_than_asked_for_and_small_ones_give_way():
    buffers = BucketBuffers(most=2)
    taken = [buffers.take(100) for _ in range(5)]
    assert buffers.kept_bytes() == 200
    del taken
    large = [buffers.take(300), buffers.take(300), buffers.take(300)]
    assert buffers.kept_bytes() == 600
    assert len({tensor.data_ptr() for tensor in large}) == 3
    buffers.keep(1)
    assert buffers.kept_bytes() == 300


def test_a_buffer_above_the_limit_is_not_kept():
    buffers = BucketBuffers(most=2, most_bytes=200)
    assert buffers.take(201).numel() == 201
    assert buffers.kept_bytes() == 0
    buffers.take(200)
    assert buffers.kept_bytes() == 200


def test_memory_is_aligned_for_every_type():
    assert all(BucketBuffers().take(size).data_ptr() % 64 == 0 for size in (1, 1000, 1 << 20))


def tensors(value):
    return [(name, torch.full((size,), value)) for name, size in (("a", 1000), ("b", 10), ("c", 600))]


def test_the_next_copy_of_the_weights_uses_the_memory_of_the_one_before():
    buffers = BucketBuffers()
    weights = pack(tensors(1.0), 4000, buffers=buffers)
    places, size = [bucket.data_ptr() for bucket in weights.buckets], buffers.kept_bytes()
    assert (len(places), size) == (2, 4 * 1610)
    weights.digest()
    for thread in threading.enumerate():
        if thread.name == "hash-weights":
            thread.join()
    del weights
    again = pack(tensors(2.0), 4000, buffers=buffers)
    assert [bucket.data_ptr() for bucket in again.buckets] == places
    assert again.digest() == pack(tensors(2.0), 4000).digest()


def test_a_copy_that_is_still_sent_is_not_overwritten_and_memory_of_one_copy_is_kept():
    buffers = BucketBuffers()
    sent = pack(tensors(1.0), 4000, buffers=buffers)
    later = [pack(tensors(value), 4000, buffers=buffers) for value in (2.0, 3.0)]
    expected = [pack(tensors(value), 4000) for value in (1.0, 2.0, 3.0)]
    for weights, plain in zip([sent, *later], expected, strict=True):
        assert all(ours.equal(theirs) for ours, theirs in zip(weights.buckets, plain.buckets, strict=True))
    assert buffers.kept_bytes() == 4 * 1610
