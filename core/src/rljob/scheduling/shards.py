"""Assigns the samples of a batch to data-parallel ranks. Coordinator and trainer compute the same assignment."""

from __future__ import annotations

from collections.abc import Sequence


def assign(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Return for each rank the indices of its samples, in batch order.

    Longest-processing-time greedy: the longest sample goes to the rank with the fewest tokens. A rank is empty only
    when there are fewer samples than ranks.

    Args:
        tokens: length of each sample in tokens.
        ranks: data-parallel size.
    """
    load = [(0, rank) for rank in range(ranks)]
    shards: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        filled, rank = min(load, key=lambda entry: (entry[0], len(shards[entry[1]]), entry[1]))
        shards[rank].append(index)
        load[rank] = (filled + tokens[index], rank)
    return [sorted(shard) for shard in shards]
