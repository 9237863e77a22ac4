"""The wire format of weights, and the shards of a batch: rules that two processes apply independently."""

from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.messages import ParameterMeta
from rljob.protocol.weights import parameter_bytes, plan_buckets
from rljob.scheduling.shards import assign


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


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 8))
def test_shards_are_a_partition_in_batch_order(tokens, ranks):
    shards = assign(tokens, ranks)
    assert len(shards) == ranks
    assert sorted(i for shard in shards for i in shard) == list(range(len(tokens)))
    assert all(shard == sorted(shard) for shard in shards)
    assert assign(tokens, ranks) == shards


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_shards_differ_by_one_sample_at_most_and_are_empty_only_without_enough_samples(tokens, ranks):
    shards = assign(tokens, ranks)
    loads = [sum(tokens[i] for i in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(tokens)
    assert sum(not shard for shard in shards) == max(0, ranks - len(tokens))


def test_the_longest_sample_goes_to_the_shard_with_the_fewest_tokens():
    assert assign([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert assign([3, 3, 3], 1) == [[0, 1, 2]]
    assert assign([], 2) == [[], []]
