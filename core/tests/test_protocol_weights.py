"""The wire formats of weights and of requests for shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.shards import SelectionError, decode_selection, encode_selection
from rljob.protocol.shared_messages import ParameterMeta
from rljob.protocol.weights import parameter_bytes, plan_buckets


def meta(*shape, dtype="float32"):
    return ParameterMeta("w", dtype, list(shape))


def test_the_bytes_of_a_tensor_follow_from_shape_and_type():
    assert parameter_bytes(meta(3, 5)) == 60
    assert parameter_bytes(meta(3, 5, dtype="bfloat16")) == 30
    assert parameter_bytes(meta()) == 4
    assert parameter_bytes(meta(0, 7)) == 0


def test_a_bucket_closes_with_the_tensor_that_reaches_its_size():
    sizes = [meta(2), meta(2), meta(1), meta(9), meta(1)]  # 8, 8, 4, 36, 4 bytes
    assert plan_buckets(sizes, 16) == [range(0, 2), range(2, 4), range(4, 5)]
    assert plan_buckets(sizes, 1) == [range(i, i + 1) for i in range(5)]
    assert plan_buckets(sizes, 1 << 20) == [range(0, 5)]
    assert plan_buckets([], 16) == []


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 200))
def test_buckets_are_all_tensors_in_order_and_no_larger_than_needed(sizes, bucket_bytes):
    metas = [meta(size) for size in sizes]
    buckets = plan_buckets(metas, bucket_bytes)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    for bucket in buckets[:-1]:
        assert sum(4 * sizes[i] for i in bucket) >= bucket_bytes
    for bucket in buckets:
        assert sum(4 * sizes[i] for i in bucket[:-1]) < bucket_bytes


@given(st.lists(st.booleans(), max_size=40))
def test_a_selection_is_decoded_to_the_selected_samples(chosen):
    indices = [i for i, wanted in enumerate(chosen) if wanted]
    body = encode_selection(indices, len(chosen))
    assert decode_selection(body, len(chosen)) == indices
    for wrong, samples in ((body + b"\0", len(chosen)), (b"\xff\xff", 9), (b"", 1)):
        with pytest.raises(SelectionError, match=f"each of the {samples} samples"):
            decode_selection(wrong, samples)
